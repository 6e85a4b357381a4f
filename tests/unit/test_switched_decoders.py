# SPDX-License-Identifier: Apache-2.0
"""Decoders with a switch at each product score, choice by choice, as what `convert` makes of that choice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from build_engines.convert import Verified, convert, largest_difference
from build_engines.low_precision import twin
from build_engines.quantize import attention_products, linear_layers, quantize_for_tensorrt
from build_engines.serving_code import graph_scoring
from build_engines.switched import SwitchedScorer, sensitivities, write_switched
from build_engines.table import BasePrecision
from tests.unit.decoder_graphs import KINDS, LAYERS, Decoder, DecoderGraphs, prompts
from tests.unit.small_graphs import run

every_kind = pytest.mark.parametrize("kind", KINDS)
both_bases = pytest.mark.parametrize("base", ["fp16", "bf16"])
# Kernels that add up in another order round some values the other way; INT8 moves scores by several times this.
SAME = 0.03
FEED = prompts((300, 40, 7, 23, 4, 111))


def requests(count: int = 4) -> list[graph_scoring.PaddedPairs]:
    return [
        graph_scoring.PaddedPairs(prompts((length,), seed=length), np.array([length]))
        for length in range(30, 30 + 45 * count, 45)
    ]


def products(decoder: Decoder) -> tuple[list[str], list[str], dict[str, float]]:
    """Name the linear layers and attention's products, and measure the ranges of what enters them."""
    graph = decoder.graph().graph
    linear, attention = linear_layers(graph), attention_products(graph)
    names = sorted({n.input[0] for n in linear} | {name for n in attention for name in n.input})
    largest = {name: float(np.abs(values).max()) for name, values in run(decoder.graph(), FEED, names).items()}
    return [node.name for node in linear], [node.name for node in attention], largest


def scores(scorer: SwitchedScorer) -> NDArray[np.float32]:
    (found,) = scorer.score([graph_scoring.PaddedPairs(FEED, FEED["attention_mask"].sum(axis=1))])
    return found


@both_bases
@every_kind
def test_any_choice_scores_as_the_graph_that_has_no_other(
    decoders: DecoderGraphs, tmp_path: Path, kind: str, base: BasePrecision
) -> None:
    decoder = decoders.of(kind)
    linear, attention, ranges = products(decoder)
    nodes = linear + attention
    write_switched(decoder.path, ranges, nodes, base, tmp_path / "switched.onnx")
    scorer = SwitchedScorer(tmp_path / "switched.onnx", nodes)
    assert scorer.input_names == {"input_ids", "attention_mask"}
    exact = run(decoder.graph(), FEED)["SCORE"]
    seen = []
    for int8 in ([], linear, nodes, linear[::2]):
        scorer.choose(int8)
        model = quantize_for_tensorrt(decoder.graph(), ranges, int8) if int8 else decoder.graph()
        expected = run(twin(model, base), FEED)["SCORE"]
        seen.append(scores(scorer))
        np.testing.assert_allclose(seen[-1], expected, atol=SAME * float(exact.std()))
    assert len({found.tobytes() for found in seen}) == 4


@every_kind
def test_every_linear_layer_has_a_sensitivity(decoders: DecoderGraphs, tmp_path: Path, kind: str) -> None:
    decoder = decoders.of(kind)
    linear, _, ranges = products(decoder)
    # A range a thousand times too large leaves nothing of the values.
    graph = {node.name: node for node in decoder.graph().graph.node}
    absurd = graph["layers.2.mlp.down_proj"].input[0]
    write_switched(decoder.path, ranges | {absurd: 1000 * ranges[absurd]}, linear, "bf16", tmp_path / "switched.onnx")
    steps: list[None] = []
    found = sensitivities(SwitchedScorer(tmp_path / "switched.onnx", linear), requests(), lambda: steps.append(None))
    assert set(found) == set(linear)
    assert len(steps) == 7 * LAYERS
    assert next(iter(found)) == "layers.2.mlp.down_proj"
    assert min(found.values()) > 0


@pytest.mark.parametrize("choice", ["nothing", "linear"])
@every_kind
def test_a_converted_graph_scores_as_verified(decoders: DecoderGraphs, tmp_path: Path, kind: str, choice: str) -> None:
    # BF16 is checked by the builder only: ONNX Runtime has no CPU kernels for it.
    decoder = decoders.of(kind)
    linear, _, ranges = products(decoder)
    write_switched(decoder.path, ranges, linear, "fp16", tmp_path / "switched.onnx")
    int8 = linear if choice == "linear" else []
    assert convert(decoder.path, ranges, int8, "fp16", tmp_path)["int8_layers"] == len(int8)
    scorer = SwitchedScorer(tmp_path / "switched.onnx", linear)
    scorer.choose(int8)
    exact = run(decoder.graph(), FEED)["SCORE"]
    shift = float(np.abs(scores(scorer) - exact).max())
    verified = Verified(tmp_path / "switched.onnx", tuple(linear), tuple(int8), shift)
    difference = largest_difference(tmp_path / "model.onnx", verified, requests())
    assert 0 < difference < shift + 0.05 * float(exact.std())


@both_bases
@every_kind
def test_converted_graphs_are_valid_and_half_as_large(
    decoders: DecoderGraphs, tmp_path: Path, kind: str, base: BasePrecision
) -> None:
    decoder = decoders.of(kind)
    linear, _, ranges = products(decoder)
    sizes = {}
    for name, int8 in {"none": [], "all": linear}.items():
        (tmp_path / name).mkdir()
        sizes[name] = convert(decoder.path, ranges, int8, base, tmp_path / name)["bytes"]
        onnx.checker.check_model(onnx.load(tmp_path / name / "model.onnx"), full_check=True)
    matrices = 4 * LAYERS * sum(128 * n for n in (128, 64, 64, 128, 3 * 192))
    before = decoder.path.stat().st_size
    assert sizes["none"] < before - matrices // 2
    assert sizes["all"] < before - matrices // 4 * 3 + 60_000
