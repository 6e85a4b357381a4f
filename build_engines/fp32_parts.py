# SPDX-License-Identifier: Apache-2.0
"""The parts of a graph that compute in FP32 whatever its base precision is.

The head is what follows the last normalisation; in FP32 it costs one row per pair. Two things before it compute in FP32
too, as they do in Transformers: the inside of a normalisation (ONNX says so of LayerNormalization, `stash_type`; an
RMSNorm is exported step by step), and the angles of rotary positions, since BF16 skips whole numbers above 256.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import NodeProto

from build_engines.errors import ExportError

# Picking tokens is not part of the head: as part of the body it picks from half as many bytes.
_PICKING = ("Gather", "GatherElements", "GatherND")
# How an RMSNorm's factor comes from its input, last step first.
_RMS = ("Reciprocal", "Sqrt", "Add", "ReduceMean", "Pow")


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
