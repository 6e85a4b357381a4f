# SPDX-License-Identifier: Apache-2.0
"""One graph that scores with any choice of INT8 layers: the twin of `low_precision`, with a switch at each product.

A large model takes half a minute to quantise and open. With switches it is opened once, then every layer's share in the
loss of INT8, and every candidate of the search, is only a run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from build_engines.configs import TOKENS_PER_RUN
from build_engines.low_precision import twin
from build_engines.onnx_files import save
from build_engines.quantize import quantize_for_tensorrt
from build_engines.serving_code import graph_scoring
from build_engines.table import BasePrecision


def write_switched(
    graph: Path, ranges: Mapping[str, float], nodes: Sequence[str], base: BasePrecision, path: Path
) -> None:
    """Write a twin in `base` precision whose input `int8:NODE` (bool) switches the Q/DQ pairs of that node on."""
    model = onnx.load(graph, load_external_data=False)
    inputs = {node.name: list(node.input) for node in model.graph.node}
    weights = {weight.name: weight for weight in model.graph.initializer}  # outlive what quantising removes
    model = quantize_for_tensorrt(model, ranges, nodes, graph.parent)
    kept = {weight.name for weight in model.graph.initializer}
    changed = []
    for node in model.graph.node:
        for index, plain in enumerate(inputs.get(node.name, ())):
            quantised = node.input[index]
            if quantised == plain or node.name not in nodes:
                continue
            if plain in weights and plain not in kept:
                model.graph.initializer.append(weights[plain])
                kept.add(plain)
            chosen = f"{node.name}_input_{index}"
            changed.append(
                helper.make_node("Where", [_switch(node.name), quantised, plain], [chosen], f"{chosen}_where")
            )
            node.input[index] = chosen
        changed.append(node)
    model.graph.input.extend(helper.make_tensor_value_info(_switch(name), TensorProto.BOOL, []) for name in nodes)
    model.graph.ClearField("node")
    model.graph.node.extend(changed)
    save(twin(model, base, graph.parent), path)


# Stands for a change that is not finite: NaN has no place in an order, and neither has JSON one for it.
_LOST = float(np.finfo(np.float32).max)


class SwitchedScorer(graph_scoring.GraphScorer):
    """Scores with the nodes of `int8` in INT8 and the others in base precision."""

    def __init__(self, path: Path, nodes: Sequence[str]) -> None:
        super().__init__(path, threads=graph_scoring.available_threads(), tokens_per_run=TOKENS_PER_RUN)
        self.nodes = tuple(nodes)
        self.input_names -= {_switch(name) for name in nodes}
        self.choose(())

    def choose(self, int8: Collection[str]) -> None:
        """Score with these nodes in INT8 from now on."""
        self._switches = {_switch(name): np.array(name in int8) for name in self.nodes}

    def run_padded(self, rows: Sequence[tuple[graph_scoring.PaddedPairs, int]], length: int) -> NDArray[np.float32]:
        """Score some rows of requests in one batch padded to `length` tokens; return float32[rows]."""
        return self.run(self._alone, graph_scoring.pad_rows(rows, self.input_names, length))[:, 0]

    def run(self, session: object, feed: dict[str, NDArray[np.int64]]) -> NDArray[np.float32]:
        """Run the graph once with the switches as they are."""
        return super().run(session, feed | self._switches)


def sensitivities(
    scorer: SwitchedScorer, requests: Sequence[graph_scoring.PaddedPairs], advance: Callable[[], None]
) -> dict[str, float]:
    """Return how much INT8 in each node alone changes the scores on average, largest first."""
    scorer.choose(())
    reference = np.concatenate(scorer.score(requests))
    found = {}
    for name in scorer.nodes:
        scorer.choose((name,))
        change = np.abs(np.concatenate(scorer.score(requests)) - reference).mean()
        found[name] = float(np.nan_to_num(change, nan=_LOST, posinf=_LOST))
        advance()
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _switch(node: str) -> str:
    return f"int8:{node}"
