# SPDX-License-Identifier: Apache-2.0
"""A scorer whose INT8 layers change scores as a test wants, in the place of the switched twin.

The scores are those of a real tiny graph, and each INT8 layer adds so much to some and takes it from the others, by
nothing but the ids of a pair.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import build_engines.verify_gpu
from build_engines.pairs import Candidates
from build_engines.progress import no_bars
from build_engines.serving_code import graph_scoring
from build_engines.switched import SwitchedScorer
from build_engines.verify import Verifier
from build_engines.verify_gpu import verify_for_tensorrt
from tests.unit.gpu_builds import LOOSE
from tests.unit.tiny_models import TinyModels

Change = Callable[["Chosen", dict[str, NDArray[np.int64]]], NDArray[np.float64]]


class Chosen(SwitchedScorer):
    """The FP32 graph with what INT8 layers add; `layout` adds what a faulty engine would."""

    def __init__(self, graph: Path, layers: dict[str, float], spread: float, layout: Change | None = None) -> None:
        graph_scoring.GraphScorer.__init__(self, graph, threads=1, tokens_per_run=512)
        self.nodes = tuple(layers)
        self.layers = layers
        self.spread = spread
        self.layout = layout
        self.chosen: list[list[str]] = []
        self.choose(())

    def run(self, session: object, feed: dict[str, NDArray[np.int64]]) -> NDArray[np.float32]:
        scores: NDArray[np.float64] = graph_scoring.GraphScorer.run(self, session, feed).astype(np.float64)
        int8 = [name for name in self.nodes if self._switches[f"int8:{name}"]]
        if not self.chosen or self.chosen[-1] != int8:
            self.chosen.append(int8)
        scores[:, 0] += sum(self.layers[name] for name in int8) * self.spread * np.where(drawn(feed) < 0.5, -1, 1)
        if self.layout is not None:
            scores[:, 0] += self.layout(self, feed)
        return scores.astype(np.float32)

    @property
    def int8(self) -> bool:
        """Whether any layer is INT8 now."""
        return any(self._switches.values())


def drawn(feed: dict[str, NDArray[np.int64]]) -> NDArray[np.float64]:
    """A number from 0 to below 1 for each row; the padding does not change it."""
    rows = [ids[mask == 1] for ids, mask in zip(feed["input_ids"], feed["attention_mask"], strict=True)]
    digests = [hashlib.sha256(row.astype(np.int64).tobytes()).digest() for row in rows]
    return np.array([int.from_bytes(digest[:4], "big") / 2**32 for digest in digests])


@dataclasses.dataclass
class Bench:
    """A tiny model with its FP32 scores, where SwitchedScorer is to be one that the test chooses."""

    tiny: TinyModels
    out: Path
    candidates: list[Candidates]
    patch: pytest.MonkeyPatch
    family: str = "xlm_roberta"

    def verifier(self, **row: Any) -> Verifier:
        model = self.tiny.model(self.family)
        reranker = dataclasses.replace(model.reranker, **{"gates": LOOSE, "base_gates": LOOSE} | row)
        return Verifier(reranker, model.pairing, int(model.checkpoint.config["vocab_size"]), self.candidates)

    def verify(
        self, layers: dict[str, float], layout: Change | None = None, **row: Any
    ) -> tuple[dict[str, Any], Chosen]:
        """Verify with a scorer of these layers; return the facts, and the scorer."""
        graph = self.tiny.graph(self.family)
        made: list[Chosen] = []

        def open_scorer(path: Path, nodes: Sequence[str]) -> Chosen:
            assert (path, tuple(nodes)) == (Path("switched.onnx"), tuple(layers))
            made.append(Chosen(graph, layers, self.spread, layout))
            return made[-1]

        self.patch.setattr(build_engines.verify_gpu, "SwitchedScorer", open_scorer)
        verifier = self.verifier(**row)
        sample = verifier.requests[:3]
        facts = verify_for_tensorrt(verifier, graph, Path("switched.onnx"), list(layers), sample, self.out, no_bars)
        return facts, made[0]

    @property
    def spread(self) -> float:
        return float(np.concatenate(self.fp32()).std())

    def fp32(self) -> list[NDArray[np.float32]]:
        scorer = graph_scoring.GraphScorer(self.tiny.graph(self.family), threads=1, tokens_per_run=0)
        return [scores[:, 0] for scores in scorer.score(self.verifier().requests)]
