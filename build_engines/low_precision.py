# SPDX-License-Identifier: Apache-2.0
"""An FP32 graph -> the same in FP16 or BF16 for TensorRT, and a twin that shows its rounding on any CPU.

TensorRT's networks are strongly typed: precision is what the graph says. Everything up to the last normalisation takes
the base precision; what follows, the head, stays FP32: it costs one row per pair. Two things before it compute in FP32
too, as they do in Transformers: the inside of a normalisation (ONNX says so of LayerNormalization, `stash_type`; the
steps that RMSNorm is exported as get Casts), and the angles of rotary positions, since BF16 holds no whole number above
256. Q/DQ pairs stay where they are, their scales are converted with the rest, so that no Cast comes between a
DequantizeLinear and its MatMul.

ONNX Runtime's CPU provider cannot tell whether FP16 is good enough: it computes nearly all of an FP16 graph in FP32,
without rounding in between, and no BF16 graph at all. The twin is an FP32 graph that rounds each tensor where the
converted graph would store it; a value beyond FP16 becomes infinite there as it would on a GPU. It is slightly
pessimistic: fused kernels round less often.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.shape_inference import infer_shapes

from build_engines.errors import ExportError
from build_engines.table import BasePrecision

_ELEMENT = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
_NUMPY = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
# These hand values on, and integer products are scaled in FP32: nothing to round again.
_EXACT = frozenset(
    {
        *("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Slice", "Concat", "Split", "Identity"),
        *("Gather", "GatherElements", "GatherND", "Where", "Neg", "DequantizeLinear"),
    }
)
# Picking tokens is not part of the head: as part of the body it picks from half as many bytes.
_PICKING = ("Gather", "GatherElements", "GatherND")
# How an RMSNorm's factor comes from its input, last step first.
_RMS = ("Reciprocal", "Sqrt", "Add", "ReduceMean", "Pow")


@dataclass(frozen=True, slots=True)
class _Types:
    """Which tensors of a graph are FP32, and which nodes take the base precision."""

    floats: frozenset[str]
    low_nodes: frozenset[str]
    low_tensors: frozenset[str]

    @classmethod
    def of(cls, model: onnx.ModelProto) -> _Types:
        graph = model.graph
        names = [node.name for node in graph.node]
        if len(set(names)) < len(names) or "" in names:
            raise ExportError("The graph has nodes without a name of their own; export it again with build_engines.")
        typed = infer_shapes(_skeleton(model)).graph
        values = [*typed.value_info, *typed.input, *typed.output]
        floats = {v.name for v in values if v.type.tensor_type.elem_type == TensorProto.FLOAT}
        floats |= {i.name for i in graph.initializer if i.data_type == TensorProto.FLOAT}
        untyped = {name for node in graph.node for name in node.output} - {value.name for value in values}
        if untyped:
            raise ExportError(f"The types of {sorted(untyped)[:3]} cannot be told; export the graph again.")
        low = frozenset(names) - fp32_nodes(graph)
        return cls(
            frozenset(floats), low, frozenset(t for n in graph.node if n.name in low for t in n.output if t in floats)
        )


def fp32_nodes(graph: onnx.GraphProto) -> frozenset[str]:
    """Return the nodes that compute in FP32 in any base precision: the head, and what Transformers computes so."""
    inside = {name for norm in _rms_norms(graph) for name in norm.inside}
    return head_nodes(graph) | inside | _rotary_angles(graph)


def head_nodes(graph: onnx.GraphProto) -> frozenset[str]:
    """Return the nodes after the last normalisation; picking tokens is not part of the head."""
    ends = {norm.end for norm in _rms_norms(graph)}
    norms = [node for node in graph.node if node.op_type == "LayerNormalization" or node.name in ends]
    if not norms:
        raise ExportError("The graph has no LayerNormalization and no RMSNorm; export it with opset 17 or later.")
    reached, head = set(norms[-1].output), set()
    for node in graph.node:  # in topological order, as ONNX demands
        if reached & set(node.input):
            reached |= set(node.output)
            if node.op_type not in _PICKING:
                head.add(node.name)
    return frozenset(head)


@dataclass(frozen=True, slots=True)
class _RmsNorm:
    """The names of the nodes inside, which compute in FP32, and of the last node, which may be one of them."""

    inside: tuple[str, ...]
    end: str


def _rms_norms(graph: onnx.GraphProto) -> Iterable[_RmsNorm]:
    """Find x * (1 / sqrt(mean(x ** 2) + epsilon)), and the product with a weight after it.

    Llama, Qwen and most others multiply `weight * x` after they have rounded x; Gemma multiplies `x * (1 + weight)` and
    rounds then. The exporter keeps the order of the factors, by which they are told apart.
    """
    producer = {output: node for node in graph.node for output in node.output}
    constant = {weight.name for weight in graph.initializer}
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for node in graph.node:
        steps = _steps_back(producer, node.input[1], _RMS) if node.op_type == "Mul" else ()
        if not steps or steps[-1].input[0] != node.input[0]:
            continue
        inside = (*(step.name for step in steps), node.name)
        after = readers.get(node.output[0], [])
        if len(after) != 1 or after[0].op_type != "Mul" or not constant & set(after[0].input):
            yield _RmsNorm(inside, node.name)
        elif after[0].input[0] in constant:
            yield _RmsNorm(inside, after[0].name)
        else:
            yield _RmsNorm((*inside, after[0].name), after[0].name)


def _steps_back(producer: Mapping[str, NodeProto], name: str, operators: Sequence[str]) -> tuple[NodeProto, ...]:
    """Return the nodes of these operators that lead to a tensor by their first inputs, or none."""
    steps: list[NodeProto] = []
    for operator in operators:
        node = producer.get(name)
        if node is None or node.op_type != operator:
            return ()
        steps.append(node)
        name = node.input[0]
    return tuple(steps)


def _rotary_angles(graph: onnx.GraphProto) -> frozenset[str]:
    """Return the nodes that lead to a cosine or sine, themselves, and their product with a constant (YaRN's)."""
    producer = {output: node for node in graph.node for output in node.output}
    constant = {weight.name for weight in graph.initializer}
    turns = [node for node in graph.node if node.op_type in ("Cos", "Sin")]
    outputs = {node.output[0] for node in turns}
    found = {n.name for n in graph.node if n.op_type == "Mul" and outputs & set(n.input) and constant & set(n.input)}
    while turns:
        node = turns.pop()
        if node.name not in found:
            found.add(node.name)
            turns += [producer[name] for name in node.input if name in producer]
    return frozenset(found)


def lower(model: onnx.ModelProto, base: BasePrecision) -> onnx.ModelProto:
    """Return a copy in which all but `fp32_nodes` is FP16 or BF16; inputs and SCORE keep their types.

    Raises ExportError for a graph whose types cannot be told.
    """
    types, graph = _Types.of(model), model.graph
    weights = {i.name: i for i in graph.initializer if i.name in types.floats}
    nodes: list[NodeProto] = []
    cast: dict[tuple[str, bool], str] = {}
    used: dict[str, TensorProto] = {i.name: i for i in graph.initializer if i.name not in types.floats}

    def as_type(name: str, low: bool) -> str:
        if name in weights:
            return _weight(used, weights[name], base if low else None)
        if name not in types.floats or (name in types.low_tensors) == low:
            return name
        if (name, low) not in cast:
            cast[name, low] = f"{name}_{base if low else 'fp32'}"
            to = _ELEMENT[base] if low else TensorProto.FLOAT
            nodes.append(helper.make_node("Cast", [name], [cast[name, low]], f"{cast[name, low]}_cast", to=to))
        return cast[name, low]

    for node in graph.node:
        low = node.name in types.low_nodes
        changed = NodeProto()
        changed.CopyFrom(node)
        changed.input[:] = [as_type(name, low) for name in node.input]
        if low and node.op_type == "Cast" and node.output[0] in types.floats:
            next(attribute for attribute in changed.attribute if attribute.name == "to").i = _ELEMENT[base]
        nodes.append(changed)
    for output in graph.output:
        if output.name in types.low_tensors:
            raise ExportError(f"The graph ends in {output.name} without a head; export it again with build_engines.")
    return _model(model, nodes, used.values())


def twin(model: onnx.ModelProto, base: BasePrecision) -> onnx.ModelProto:
    """Return an FP32 copy that rounds every tensor which `lower` would store as FP16 or BF16."""
    types, graph = _Types.of(model), model.graph
    weights = {weight.name: weight for weight in graph.initializer if weight.name in types.floats}
    used = {weight.name: weight for weight in graph.initializer if weight.name not in types.floats}
    nodes: list[NodeProto] = []
    entered: set[str] = set()

    def as_stored(name: str, low: bool) -> str:
        if name in weights:
            return _weight(used, weights[name], base if low else None, as_fp32=True)
        if not low or name not in types.floats or name in types.low_tensors:
            return name
        if name not in entered:  # computed in FP32, stored for the body
            entered.add(name)
            nodes.extend(_rounding(name, name, f"{name}_rounded", base))
        return f"{name}_rounded"

    for node in graph.node:
        low, name = node.name in types.low_nodes, node.output[0]
        exact = NodeProto()
        exact.CopyFrom(node)
        exact.input[:] = [as_stored(i, low) for i in node.input]
        nodes.append(exact)
        if low and node.op_type not in _EXACT and name in types.floats:
            exact.output[0] = f"{name}_exact"
            nodes.extend(_rounding(name, f"{name}_exact", name, base))
    return _model(model, nodes, used.values())


def _rounding(name: str, source: str, target: str, base: BasePrecision) -> tuple[NodeProto, NodeProto]:
    down = helper.make_node("Cast", [source], [f"{name}_{base}"], f"{name}_down", to=_ELEMENT[base])
    return down, helper.make_node("Cast", [f"{name}_{base}"], [target], f"{name}_up", to=TensorProto.FLOAT)


def _skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with large weights declared only: type inference copies and would pass protobuf's 2 GiB."""
    copy = onnx.ModelProto()
    copy.ir_version = model.ir_version
    copy.opset_import.extend(model.opset_import)
    graph = model.graph
    copy.graph.name = graph.name
    for field in ("node", "input", "output"):
        getattr(copy.graph, field).extend(getattr(graph, field))
    for weight in graph.initializer:
        if weight.ByteSize() < 1024:
            copy.graph.initializer.append(weight)
        else:
            copy.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, list(weight.dims)))
    return copy


def _weight(
    used: dict[str, TensorProto], weight: TensorProto, base: BasePrecision | None, *, as_fp32: bool = False
) -> str:
    """Put a weight among those used, stored in (or rounded to) a base precision if there is one; return its name."""
    name = weight.name if base is None else f"{weight.name}_{base}"
    if name not in used:
        used[name] = weight
        if base is not None:
            values = numpy_helper.to_array(weight).astype(_NUMPY[base])
            used[name] = numpy_helper.from_array(values.astype(np.float32) if as_fp32 else values, name)
    return name


def _model(model: onnx.ModelProto, nodes: Iterable[NodeProto], weights: Iterable[TensorProto]) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), model.graph.name, model.graph.input, model.graph.output, list(weights))
    return helper.make_model(graph, ir_version=model.ir_version, opset_imports=model.opset_import)
