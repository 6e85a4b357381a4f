# SPDX-License-Identifier: Apache-2.0
"""An FP32 graph -> the same in FP16 or BF16 for TensorRT, and a twin that shows its rounding on any CPU.

TensorRT's networks are strongly typed: precision is what the graph says. All nodes take the base precision but those of
`fp32_parts`; Casts stand where tensors pass from one to the other. Q/DQ pairs stay where they are, their scales are
converted with the rest, so that no Cast comes between a DequantizeLinear and its MatMul.

ONNX Runtime's CPU provider cannot tell whether FP16 is good enough: it computes nearly all of an FP16 graph in FP32,
without rounding in between, and no BF16 graph at all. The twin is an FP32 graph that rounds each tensor where the
converted graph would store it; a value beyond FP16 becomes infinite there as it would on a GPU. It is slightly
pessimistic: fused kernels round less often.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data
from onnx.shape_inference import infer_shapes

from build_engines.errors import ExportError
from build_engines.fp32_parts import fp32_nodes
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
        typed = inferred(model)
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


def lower(model: onnx.ModelProto, base: BasePrecision, folder: Path | None = None) -> onnx.ModelProto:
    """Return a copy in which all but `fp32_nodes` is FP16 or BF16; inputs and SCORE keep their types.

    Weights that the model does not hold are read from `folder`, one after the other. Raises ExportError for a graph
    whose types cannot be told.
    """
    types, graph = _Types.of(model), model.graph
    made = _Made(model, types.floats, base, folder, as_fp32=False)
    cast: set[str] = set()

    def as_type(name: str, low: bool) -> str:
        if name in made.weights:
            return made.weight(name, low)
        if name not in types.floats or (name in types.low_tensors) == low:
            return name
        other = f"{name}_{base if low else 'fp32'}"
        if other not in cast:
            cast.add(other)
            to = _ELEMENT[base] if low else TensorProto.FLOAT
            made.nodes.append(helper.make_node("Cast", [name], [other], f"{other}_cast", to=to))
        return other

    for node in graph.node:
        low = node.name in types.low_nodes
        changed = NodeProto()
        changed.CopyFrom(node)
        changed.input[:] = [as_type(name, low) for name in node.input]
        if low and node.op_type == "Cast" and node.output[0] in types.floats:
            next(attribute for attribute in changed.attribute if attribute.name == "to").i = _ELEMENT[base]
        made.nodes.append(changed)
    for output in graph.output:
        if output.name in types.low_tensors:
            raise ExportError(f"The graph ends in {output.name} without a head; export it again with build_engines.")
    return made.model()


def twin(model: onnx.ModelProto, base: BasePrecision, folder: Path | None = None) -> onnx.ModelProto:
    """Return an FP32 copy that rounds every tensor which `lower` would store as FP16 or BF16; `folder` as there."""
    types, graph = _Types.of(model), model.graph
    made = _Made(model, types.floats, base, folder, as_fp32=True)
    entered: set[str] = set()

    def as_stored(name: str, low: bool) -> str:
        if name in made.weights:
            return made.weight(name, low)
        if not low or name not in types.floats or name in types.low_tensors:
            return name
        if name not in entered:  # computed in FP32, stored for the body
            entered.add(name)
            made.nodes.extend(_rounding(name, name, f"{name}_rounded", base))
        return f"{name}_rounded"

    for node in graph.node:
        low, name = node.name in types.low_nodes, node.output[0]
        exact = NodeProto()
        exact.CopyFrom(node)
        exact.input[:] = [as_stored(i, low) for i in node.input]
        made.nodes.append(exact)
        if low and node.op_type not in _EXACT and name in types.floats:
            exact.output[0] = f"{name}_exact"
            made.nodes.extend(_rounding(name, f"{name}_exact", name, base))
    return made.model()


def _rounding(name: str, source: str, target: str, base: BasePrecision) -> tuple[NodeProto, NodeProto]:
    down = helper.make_node("Cast", [source], [f"{name}_{base}"], f"{name}_down", to=_ELEMENT[base])
    return down, helper.make_node("Cast", [f"{name}_{base}"], [target], f"{name}_up", to=TensorProto.FLOAT)


class _Made:
    """The model that is made: its nodes, and the weights that they read, each in the types that it is read in.

    A weight goes into the model when the first node wants it. What it was computed from is then free again: a large
    model is not in memory twice.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        floats: Collection[str],
        base: BasePrecision,
        folder: Path | None,
        *,
        as_fp32: bool,
    ) -> None:
        self.nodes: list[NodeProto] = []
        self.weights = {weight.name: weight for weight in model.graph.initializer if weight.name in floats}
        self._folder, self._base, self._as_fp32 = str(folder or ""), base, as_fp32
        self._model = _without_weights(model)
        self._used: set[str] = set()
        for weight in model.graph.initializer:
            if weight.name not in floats:
                self._use(weight, weight.name)

    def weight(self, name: str, low: bool) -> str:
        """Use a weight, stored in (or rounded to) the base precision or as it is; return its name."""
        used = f"{name}_{self._base}" if low else name
        if used not in self._used:
            self._use(self.weights[name], used)
        return used

    def _use(self, weight: TensorProto, name: str) -> None:
        self._used.add(name)
        if name == weight.name and not uses_external_data(weight):
            self._model.graph.initializer.append(weight)
            return
        values = numpy_helper.to_array(weight, self._folder)
        if name != weight.name:
            values = values.astype(_NUMPY[self._base])
            if self._as_fp32:
                values = values.astype(np.float32)
        self._model.graph.initializer.append(numpy_helper.from_array(values, name))

    def model(self) -> onnx.ModelProto:
        """Return what was made."""
        self._model.graph.node.extend(self.nodes)
        return self._model


def inferred(model: onnx.ModelProto) -> onnx.GraphProto:
    """Return a graph with the types of all tensors.

    Large weights are only declared in it: type inference copies them and would pass protobuf's 2 GiB.
    """
    copy = _without_weights(model)
    copy.graph.node.extend(model.graph.node)
    for weight in model.graph.initializer:
        if weight.ByteSize() < 1024 and not uses_external_data(weight):
            copy.graph.initializer.append(weight)
        else:
            copy.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, list(weight.dims)))
    return infer_shapes(copy).graph


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model's name, inputs, outputs and versions, with neither nodes nor weights."""
    copy = onnx.ModelProto()
    copy.ir_version = model.ir_version
    copy.opset_import.extend(model.opset_import)
    copy.graph.name = model.graph.name
    copy.graph.input.extend(model.graph.input)
    copy.graph.output.extend(model.graph.output)
    return copy
