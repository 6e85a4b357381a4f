# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints taken through the build's first steps once, for all the tests that read them."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from build_engines.export import export
from build_engines.fetch import Checkpoint, fetch
from build_engines.pairing import write_pairing
from build_engines.quantize import quantize_for_cpu
from build_engines.serving_code import pair_encoding
from build_engines.table import Reranker
from tests.checkpoints import row, write_bert, write_bi_encoder, write_roberta, write_xlm_roberta
from tests.decoder_checkpoints import DECODER_FAMILIES, decoder_row, write_decoder

WRITERS = {
    "bert": write_bert,
    "roberta": write_roberta,
    "xlm_roberta": write_xlm_roberta,
    "bi_encoder": write_bi_encoder,
}
CROSS_ENCODERS = ("bert", "roberta", "xlm_roberta")


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A checkpoint, its row, its own tokenizer, and the folder with tokenizer.json and pairing.json for serving."""

    reranker: Reranker
    checkpoint: Checkpoint
    tokenizer: Any
    pairing: Path

    def encoder(self, *, cache_bytes: int = 1 << 20, max_text_bytes: int = 1_000_000) -> pair_encoding.PairEncoder:
        """Load the serving code's encoder anew."""
        return pair_encoding.PairEncoder.load(self.pairing, cache_bytes=cache_bytes, max_text_bytes=max_text_bytes)


class TinyModels:
    """Each family is written, paired, exported and quantised at most once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = functools.cache(self._model)
        self.encoder = functools.cache(lambda family: self.model(family).encoder())
        self.graph = functools.cache(self._graph)
        self.int8_graph = functools.cache(self._int8_graph)

    def _model(self, family: str) -> TinyModel:
        folder = self.root / family / "checkpoint"
        if family in DECODER_FAMILIES:
            reranker = decoder_row(f"tiny_{family}", write_decoder(folder, family), family)
            return prepare(reranker, self._made(family, "pairing"))
        WRITERS[family](folder)
        return prepare(row(f"tiny_{family}", folder), self._made(family, "pairing"))

    def _graph(self, family: str) -> Path:
        model = self.model(family)
        out = self._made(family, "export")
        export(model.checkpoint, model.reranker, out)
        return out / "model.onnx"

    def _int8_graph(self, family: str) -> Path:
        out = self._made(family, "quantize")
        quantize_for_cpu(self.graph(family), out)
        return out / "model.onnx"

    def _made(self, family: str, step: str) -> Path:
        folder = self.root / family / step
        folder.mkdir(parents=True)
        return folder


def prepare(reranker: Reranker, out: Path) -> TinyModel:
    """Fetch a row's checkpoint and write its pairing into `out`."""
    checkpoint = fetch(reranker)
    write_pairing(checkpoint, reranker, out)
    if reranker.prompt:  # not through transformers, which reads DeepSeek's texts as another tokenizer would
        return TinyModel(reranker, checkpoint, Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json")), out)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
    tokenizer.model_max_length = 1 << 30  # longer texts are given on purpose
    return TinyModel(reranker, checkpoint, tokenizer, out)


def data_folder(name: str) -> Path:
    """Return a folder of real texts; skip the test where there is none."""
    root = os.environ.get("TRITON_RERANK_DATA")
    if not root:
        pytest.skip("TRITON_RERANK_DATA is not set: no real texts to read")
    return Path(root) / name
