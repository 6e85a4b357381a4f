# SPDX-License-Identifier: Apache-2.0
"""Plans to run, the graphs that they must equal, and padded pairs to run them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

from build_engines.engine import build_plan, import_tensorrt, profiles_of
from build_engines.errors import EngineError
from build_engines.fetch import fetch
from build_engines.gpu import find_gpu
from build_engines.low_precision import lower
from build_engines.pairing import write_pairing
from build_engines.pairs import SAMPLE, read_pairs
from build_engines.serving_code import graph_scoring, pair_encoding
from build_engines.table import Reranker, find_reranker
from tests.checkpoints import row, write_bert, write_xlm_roberta
from tests.tensorrt.graphs import exported
from tests.tensorrt.without_gpu import KEPT, ROOT

# Left by: python -m build_engines build light_reranker --target gpu
INT8_GRAPH = ROOT / "build" / "light_reranker" / "convert" / "model.onnx"

# Of the scores' standard deviation. On these graphs FP16 rounding moves a score by at most 0.015 of it (build_engines'
# `twin`, on a CPU), and TensorRT sums in another order. Wrong padding moves it by about 1.
TOLERANCE = 0.05

_TINY = {"tiny_bert": write_bert, "tiny_xlm_roberta": write_xlm_roberta}


@dataclass(frozen=True, slots=True)
class Case:
    """A reranker in one precision: fp32, fp16 or int8."""

    name: str
    precision: str

    def __str__(self) -> str:
        return f"{self.name}-{self.precision}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan, and the graph that says on a CPU what it must score."""

    path: Path
    reference: Path
    reranker: Reranker
    vocabulary: int
    pad_id: int

    @property
    def limits(self) -> graph_scoring.Limits:
        """What the scorer takes."""
        return graph_scoring.Limits(self.vocabulary, self.reranker.max_length)

    def pairs(self, lengths: Sequence[int], width: int, seed: int = 0) -> graph_scoring.PaddedPairs:
        """Return rows of random ids, padded to `width` as the tokenizer pads them."""
        rng = np.random.default_rng(seed)
        tokens = np.array(lengths)
        places = np.arange(width)
        mask = (places < tokens[:, None]).astype(np.int64)
        ids = np.where(mask == 1, rng.integers(5, self.vocabulary, mask.shape), self.pad_id)
        arrays = {"input_ids": ids, "attention_mask": mask}
        if self.reranker.segment_ids:
            arrays["token_type_ids"] = (places >= tokens[:, None] // 3).astype(np.int64) * mask
        return graph_scoring.PaddedPairs.check(arrays, graph_scoring.Limits(self.vocabulary, self.reranker.max_length))


def missing() -> str:
    """Return what is not here of that which a plan needs to run; nothing where all of it is."""
    if find_gpu() is None:
        return "no NVIDIA GPU is visible"
    try:
        import_tensorrt()
    except EngineError as error:
        return str(error)
    return ""


def sample(plan: Plan, folder: Path) -> list[graph_scoring.PaddedPairs]:
    """Return the requests that the project's own sample of real texts becomes; `folder` gets the tokenizer."""
    write_pairing(fetch(plan.reranker), plan.reranker, folder)
    encoder = pair_encoding.PairEncoder.load(folder, cache_bytes=0, max_text_bytes=1 << 20)
    requests = []
    for query in read_pairs(SAMPLE):
        documents = [document.encode() for document in query.documents]
        pairs = encoder.encode([query.query.encode()] * len(documents), documents)
        requests.append(graph_scoring.PaddedPairs.check(pairs.arrays, plan.limits))
    return requests


def build(case: Case, folder: Path) -> Plan:
    """Build the plan of a case; skip where a build has not left its INT8 graph."""
    tiny = _TINY.get(case.name)
    if tiny is None:
        reranker = find_reranker(case.name)
    else:
        reranker = row(case.name, tiny(KEPT / "checkpoints" / case.name), buckets=(32, 128, 512))
    graph = reference = exported(reranker)
    if case.precision == "int8":
        if not INT8_GRAPH.is_file():
            pytest.skip(f"no INT8 graph: run python -m build_engines build {case.name} --target gpu")
        graph = reference = INT8_GRAPH
    elif case.precision == "fp16":
        graph = folder / "model.onnx"
        onnx.save(lower(onnx.load(reference), "fp16"), graph)
    build_plan(graph, folder, profiles_of(reranker), reranker.engine)
    config = fetch(reranker).config
    return Plan(folder / "model.plan", reference, reranker, int(config["vocab_size"]), int(config["pad_token_id"]))
