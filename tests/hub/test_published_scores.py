# SPDX-License-Identifier: Apache-2.0
"""The real BGE checkpoints, exported and tokenised by this project, give the scores that others have published.

They run where TRITON_RERANK_CHECKPOINTS names a folder that holds checkpoints under their names on the hub (such as
bge-reranker-v2-m3), or with TRITON_RERANK_HUB=1, which downloads them (1 to 2 GB each). Exports stay in build/hub.
"""

from __future__ import annotations

import dataclasses
import io
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from build_engines.build import build
from build_engines.places import REPOSITORY
from build_engines.request import BuildRequest
from build_engines.serving_code import graph_scoring, pair_encoding
from build_engines.table import Reranker, find_reranker
from tests.checkpoints import CORPUS, row, write_xlm_roberta

EXPORTS = REPOSITORY.parent / "build" / "hub"

PANDA = (
    "The giant panda (Ailuropoda melanoleuca), sometimes called a panda bear or simply panda, is a bear species "
    "endemic to China."
)

# FlagEmbedding prints what a model in FP16 gave. FP16 has steps of 0.004 from 4 on and of 0.008 from 8 on, and rounding
# inside the model adds to that: where the panda pairs are published in both precisions (large), they differ by 0.003.
FP16 = 0.02
# -5.6085 and 5.7623 lie between the steps of FP16, so they come from FP32, where two correct programs differ by 1e-4;
# more is allowed because theirs may have run on a GPU that multiplies FP32 as TF32.
FP32 = 0.005

PUBLISHED = [
    ("bge_reranker", "query", "passage", -5.65234375, FP16),
    ("bge_reranker", "what is panda?", "hi", -8.1875, FP16),
    ("bge_reranker", "what is panda?", PANDA, 5.26171875, FP16),
    # Published without a precision; their sigmoids, 0.000162 and 0.4739, say no more.
    ("bge_reranker", "A red apple", "A llama in the garden", -8.727, FP16),
    ("bge_reranker", "A red apple", "I want some fruit", -0.105, FP16),
    ("bge_reranker_large", "query", "passage", -1.5263671875, FP16),
    ("bge_reranker_large", "what is panda?", "hi", -5.6085, FP32),
    ("bge_reranker_large", "what is panda?", PANDA, 5.7623, FP32),
]
# All three have XLM-RoBERTa's vocabulary. No score of bge-reranker-base is published together with its texts.
APPLE_AND_LLAMA = [0, 62, 4842, 108787, 2, 2, 62, 67140, 23, 70, 80583, 2]


@dataclass(frozen=True, slots=True)
class Exported:
    """A reranker's FP32 graph and its tokenizer, as a build leaves them."""

    reranker: Reranker
    graph: Path
    encoder: pair_encoding.PairEncoder

    def score(self, pairs: list[tuple[str, str]]) -> list[float]:
        """Score pairs as the server on a CPU does."""
        encoded = self.encoder.encode(*([text.encode() for text in texts] for texts in zip(*pairs, strict=True)))
        arrays = {"input_ids": encoded.input_ids, "attention_mask": encoded.attention_mask}
        threads = graph_scoring.available_threads()
        scorer = graph_scoring.GraphScorer(self.graph, threads=threads, tokens_per_run=512)
        (scores,) = scorer.score([graph_scoring.PaddedPairs(arrays, encoded.attention_mask.sum(axis=1))])
        return [float(score) for score in scores[:, 0]]


def export(reranker: Reranker, folder: Path) -> Exported:
    console = Console(file=io.StringIO())
    # Nothing is installed: this target ends with the graph.
    graph = build(BuildRequest(reranker, "onnx", folder / "repository", folder), console)
    assert isinstance(graph, Path)
    pairing = folder / reranker.name / "pairing"
    encoder = pair_encoding.PairEncoder.load(pairing, cache_bytes=0, max_text_bytes=1 << 20)
    return Exported(reranker, graph, encoder)


@pytest.fixture(scope="module")
def exported(request: pytest.FixtureRequest) -> Exported:
    reranker = find_reranker(request.param)
    place = os.environ.get("TRITON_RERANK_CHECKPOINTS")
    if place:
        folder = Path(place) / reranker.checkpoint.rsplit("/", maxsplit=1)[-1]
        if not folder.is_dir():
            pytest.skip(f"there is no {folder}")
        reranker = dataclasses.replace(reranker, checkpoint=str(folder), revision="")
    elif os.environ.get("TRITON_RERANK_HUB") != "1":
        pytest.skip("no real checkpoints: set TRITON_RERANK_CHECKPOINTS=DIR, or TRITON_RERANK_HUB=1 to download them")
    return export(reranker, EXPORTS)


@pytest.mark.parametrize("exported", ["bge_reranker", "bge_reranker_base", "bge_reranker_large"], indirect=True)
def test_published_ids_and_scores_are_met(exported: Exported) -> None:
    encoded = exported.encoder.encode([b"A red apple"], [b"A llama in the garden"])
    assert encoded.input_ids[encoded.attention_mask == 1].tolist() == APPLE_AND_LLAMA
    rows = [row for row in PUBLISHED if row[0] == exported.reranker.name]
    found = exported.score([(query, document) for _, query, document, _, _ in rows]) if rows else []
    far = [
        f"{query} / {document}: {score:.4f}, published is {published} (within {tolerance})"
        for (_, query, document, published, tolerance), score in zip(rows, found, strict=True)
        if not abs(score - published) <= tolerance
    ]
    assert not far


def test_the_way_from_a_checkpoint_to_scores_agrees_with_transformers(tmp_path: Path) -> None:
    folder = write_xlm_roberta(tmp_path / "checkpoint")
    pairs = [(CORPUS[0], CORPUS[1]), (CORPUS[0], CORPUS[10]), (CORPUS[4], PANDA), ("query", "passage")]
    found = export(row("tiny", folder), tmp_path / "build").score(pairs)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = AutoModelForSequenceClassification.from_pretrained(folder)(**batch).logits[:, 0].numpy()
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
