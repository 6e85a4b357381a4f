# SPDX-License-Identifier: Apache-2.0
"""FP16, BF16 and INT8 graphs become engines: what `convert` writes is what TensorRT's builder takes."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from rich.console import Console

from build_engines.calibrate import CalibrationPair, calibrate, script_of
from build_engines.convert import convert
from build_engines.engine import profiles_of
from build_engines.errors import EngineError
from build_engines.fetch import fetch
from build_engines.pairing import write_pairing
from build_engines.pairs import SAMPLE, read_pairs
from build_engines.quantize import attention_products, linear_layers
from build_engines.serving_code import pair_encoding
from build_engines.steps import Steps
from build_engines.table import BasePrecision, Reranker
from tests.tensorrt.graphs import exported
from tests.tensorrt.without_gpu import TensorRT

ROWS = ("tiny_bert", "tiny_xlm_roberta", "light_reranker")
# What is INT8: nothing, the linear layers, or attention too; and the precision of the rest.
PRECISIONS: dict[str, tuple[str, BasePrecision]] = {
    "fp16": ("nothing", "fp16"),
    "bf16": ("nothing", "bf16"),
    "int8_fp16": ("linear", "fp16"),
    "int8_bf16": ("linear", "bf16"),
    "int8_attention_fp16": ("attention", "fp16"),
}


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A row's FP32 graph with ranges of real activations."""

    reranker: Reranker
    graph: Path
    ranges: dict[str, float]

    def layers(self, what: str) -> list[str]:
        """Name the products that are INT8."""
        graph = onnx.load(self.graph, load_external_data=False).graph
        linear = [node.name for node in linear_layers(graph)]
        attention = [node.name for node in attention_products(graph)]
        return {"nothing": [], "linear": linear, "attention": linear + attention}[what]


@pytest.fixture(scope="module")
def calibrated(rows: dict[str, Reranker], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Calibrated]:
    root = tmp_path_factory.mktemp("calibrated")
    return functools.cache(lambda name: _calibrated(rows[name], root / name))


def _calibrated(reranker: Reranker, folder: Path) -> Calibrated:
    """Calibrate on the sample's pairs: enough to have real activations, not to judge INT8."""
    graph, checkpoint = exported(reranker), fetch(reranker)
    steps = Steps(folder, Console(file=io.StringIO()))
    pairing = steps.run("pairing", {}, lambda out: write_pairing(checkpoint, reranker, out)).folder
    encoder = pair_encoding.PairEncoder.load(pairing, cache_bytes=1 << 20, max_text_bytes=1_000_000)
    pairs = [_pair(encoder, c.query, text) for c in read_pairs(SAMPLE)[:3] for text in c.documents[:4]]
    with_attention = replace(reranker, int8_attention=True)
    calibrate(with_attention, graph, pairs, folder, lambda: None)
    return Calibrated(reranker, graph, json.loads((folder / "ranges.json").read_text(encoding="utf-8")))


def _pair(encoder: pair_encoding.PairEncoder, query: str, document: str) -> CalibrationPair:
    encoded = encoder.encode([query.encode()], [document.encode()])
    length = int(encoded.attention_mask.sum())
    return CalibrationPair(32, script_of(document), {name: array[:, :length] for name, array in encoded.arrays.items()})


@pytest.fixture(scope="module")
def built(
    tensorrt: TensorRT, calibrated: Callable[[str], Calibrated], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], dict[str, Any]]:
    """Build each engine once; return TensorRT's facts beside `convert`'s."""

    def build(name: str, precision: str) -> dict[str, Any]:
        found = calibrated(name)
        if precision == "fp32":
            return tensorrt.build(found.graph, profiles_of(found.reranker))
        what, base = PRECISIONS[precision]
        out = tmp_path_factory.mktemp(f"{name}-{precision}")
        facts = convert(found.graph, found.ranges, found.layers(what), base, out)
        return facts | tensorrt.build(out / "model.onnx", profiles_of(found.reranker))

    return functools.cache(build)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ROWS)
def test_every_precision_becomes_an_engine_for_every_bucket(
    built: Callable[[str, str], dict[str, Any]], rows: dict[str, Reranker], name: str, precision: str
) -> None:
    reranker, facts = rows[name], built(name, precision)
    assert [profile["length"] for profile in facts["profiles"]] == list(reranker.buckets)
    ids = ["input_ids", "attention_mask"] + (["token_type_ids"] if reranker.segment_ids else [])
    assert facts["inputs"] == dict.fromkeys(ids, "INT64")
    # The head and SCORE are FP32 whatever the body is.
    assert facts["outputs"] == {"SCORE": "FLOAT"}
    layers = 6 if name == "light_reranker" else 2
    assert facts["int8_layers"] == layers * {"nothing": 0, "linear": 6, "attention": 8}[PRECISIONS[precision][0]]


def test_the_light_reranker_shrinks_with_its_precision(built: Callable[[str, str], dict[str, Any]]) -> None:
    plans = {
        precision: built("light_reranker", precision)["plan_bytes"] for precision in ("fp32", *list(PRECISIONS)[:4])
    }
    # 22.6 M weights, of which 10.6 M in linear layers: 2 bytes less each in FP16, and 1 less still in INT8.
    for base in ("fp16", "bf16"):
        assert 30e6 < plans["fp32"] - plans[base] < 50e6
        assert 5e6 < plans[base] - plans[f"int8_{base}"] < 15e6
    graphs = {precision: built("light_reranker", precision)["bytes"] for precision in ("fp16", "int8_fp16")}
    assert 10.5e6 < graphs["fp16"] - graphs["int8_fp16"] < 10.7e6


def test_a_converted_graph_with_a_zero_point_is_refused(
    tensorrt: TensorRT, calibrated: Callable[[str], Calibrated], tmp_path: Path
) -> None:
    found = calibrated("tiny_bert")
    convert(found.graph, found.ranges, found.layers("linear"), "bf16", tmp_path)
    model = onnx.load(tmp_path / "model.onnx")
    pair = next(node for node in model.graph.node if node.op_type == "QuantizeLinear")
    (zero,) = (weight for weight in model.graph.initializer if weight.name == pair.input[2])
    zero.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(zero) + 5, zero.name))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(EngineError, match=r"QuantizeLinear .*Non-zero zero point"):
        tensorrt.build(tmp_path / "model.onnx", profiles_of(found.reranker))


def test_a_channel_of_next_to_nothing_is_taken_in_int8_and_fp16(
    tensorrt: TensorRT, calibrated: Callable[[str], Calibrated], tmp_path: Path
) -> None:
    # Its scale would be 0 in FP16, which TensorRT refuses.
    found = calibrated("tiny_bert")
    model = onnx.load(found.graph)
    matrix = linear_layers(model.graph)[4].input[1]
    (weight,) = (weight for weight in model.graph.initializer if weight.name == matrix)
    array = onnx.numpy_helper.to_array(weight).copy()
    array[:, 7] *= 1e-8
    weight.CopyFrom(onnx.numpy_helper.from_array(array, matrix))
    onnx.save(model, tmp_path / "fp32.onnx")
    convert(tmp_path / "fp32.onnx", found.ranges, found.layers("linear"), "fp16", tmp_path)
    assert tensorrt.build(tmp_path / "model.onnx", profiles_of(found.reranker))["plan_bytes"] > 0
