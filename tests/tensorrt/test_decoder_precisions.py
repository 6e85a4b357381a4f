# SPDX-License-Identifier: Apache-2.0
"""Decoders of every family become engines: what `convert` writes in any precision is what TensorRT's builder takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from build_engines.convert import convert
from build_engines.engine import profiles_of
from build_engines.quantize import linear_layers
from build_engines.table import BasePrecision, Reranker
from tests.decoder_checkpoints import DECODER_FAMILIES, REAL_TOKENIZERS, decoder_row, write_decoder
from tests.tensorrt.graphs import exported
from tests.tensorrt.without_gpu import KEPT, TensorRT
from tests.unit.small_graphs import run

# Whether linear layers are INT8, and the precision of the rest.
PRECISIONS: dict[str, tuple[bool, BasePrecision]] = {
    "fp16": (False, "fp16"),
    "bf16": (False, "bf16"),
    "int8_bf16": (True, "bf16"),
}
BUCKETS = (32, 64, 128)
LAYERS = 2


def tiny(family: str) -> Reranker:
    """Return the row of a tiny decoder, whose checkpoint is kept between sessions."""
    folder = write_decoder(KEPT / "checkpoints" / f"tiny_{family}", family, layers=LAYERS)
    return decoder_row(f"tiny_{family}", folder, family, max_length=BUCKETS[-1], buckets=BUCKETS)


def measured(graph: Path) -> dict[str, float]:
    """Return the ranges of what enters the linear layers, on random tokens."""
    model = onnx.load(graph)
    names = sorted({node.input[0] for node in linear_layers(model.graph)})
    ids = np.random.default_rng(0).integers(5, 1000, (4, BUCKETS[-1]))
    found = run(model, {"input_ids": ids, "attention_mask": np.ones_like(ids)}, names)
    return {name: float(np.abs(values).max()) for name, values in found.items()}


@pytest.fixture(scope="module")
def built(tensorrt: TensorRT, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, Any]]:
    """Build each engine once; return TensorRT's facts beside `convert`'s."""
    graphs = functools.cache(lambda family: exported(tiny(family)))
    ranges = functools.cache(lambda family: measured(graphs(family)))

    def build(family: str, precision: str) -> dict[str, Any]:
        graph, profiles = graphs(family), profiles_of(tiny(family))
        if precision == "fp32":
            return tensorrt.build(graph, profiles)
        int8, base = PRECISIONS[precision]
        layers = [node.name for node in linear_layers(onnx.load(graph).graph)] if int8 else []
        out = tmp_path_factory.mktemp(f"{family}-{precision}")
        facts = convert(graph, ranges(family), layers, base, out)
        return facts | tensorrt.build(out / "model.onnx", profiles)

    return functools.cache(build)


@pytest.mark.parametrize("precision", ["fp32", *PRECISIONS])
@pytest.mark.parametrize("family", DECODER_FAMILIES)
def test_every_precision_becomes_an_engine_for_every_bucket(
    built: Callable[[str, str], dict[str, Any]], family: str, precision: str
) -> None:
    facts = built(family, precision)
    assert [profile["length"] for profile in facts["profiles"]] == list(BUCKETS)
    assert facts["inputs"] == {"input_ids": "INT64", "attention_mask": "INT64"}
    # The head and SCORE are FP32 whatever the body is.
    assert facts["outputs"] == {"SCORE": "FLOAT"}
    if precision != "fp32":
        assert facts["int8_layers"] == (7 * LAYERS if PRECISIONS[precision][0] else 0)


@pytest.mark.parametrize("family", REAL_TOKENIZERS)  # with a vocabulary of the published size, most of a plan
def test_a_16_bit_plan_holds_half_the_embeddings(built: Callable[[str, str], dict[str, Any]], family: str) -> None:
    plans = {precision: built(family, precision)["plan_bytes"] for precision in ("fp32", "fp16", "bf16")}
    words = REAL_TOKENIZERS[family][1] * 32
    for base in ("fp16", "bf16"):
        assert 1.8 * words < plans["fp32"] - plans[base] < 2.2 * words
