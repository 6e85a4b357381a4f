# SPDX-License-Identifier: Apache-2.0
"""One graph with a switch at each product scores as the twin of a graph quantised with just that choice does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from build_engines.low_precision import twin
from build_engines.quantize import attention_products, linear_layers, quantize_for_tensorrt
from build_engines.serving_code import graph_scoring
from build_engines.switched import SwitchedScorer, sensitivities, write_switched
from build_engines.table import BasePrecision
from tests.unit.small_graphs import ATTENTION, LINEAR, arrays, encoder, in_numpy, rounding_to, run, weights
from tests.unit.test_build_export import batch
from tests.unit.tiny_models import TinyModels

PRODUCTS = (*LINEAR, *ATTENTION)
BASES: tuple[BasePrecision, ...] = ("fp16", "bf16")
CHOICES = ((), ("down",), ("query", "up"), tuple(LINEAR), tuple(ATTENTION), PRODUCTS)
# A share of what rounding itself does: only the order of additions may differ.
SAME = 0.02


def small_ranges() -> dict[str, float]:
    found = in_numpy(weights(), arrays())
    found["key_turned"] = found["key"]
    names = {activation for activation, _ in LINEAR.values()} | {name for pair in ATTENTION.values() for name in pair}
    return {name: float(np.abs(found[name]).max()) for name in names}


def small(folder: Path, base: BasePrecision, **ranges: float) -> SwitchedScorer:
    """Open the small graph with a switch at each of its products."""
    onnx.save(encoder(weights()), folder / "model.onnx")
    write_switched(folder / "model.onnx", small_ranges() | ranges, PRODUCTS, base, folder / "switched.onnx")
    return SwitchedScorer(folder / "switched.onnx", PRODUCTS)


def padded(feed: dict[str, Any]) -> graph_scoring.PaddedPairs:
    return graph_scoring.PaddedPairs(feed, feed["attention_mask"].sum(axis=1))


def scores(scorer: SwitchedScorer, feed: dict[str, Any]) -> NDArray[np.float32]:
    (found,) = scorer.score([padded(feed)])
    return found


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("int8", CHOICES, ids=len)
def test_any_choice_scores_as_numpy_does(tmp_path: Path, base: BasePrecision, int8: Collection[str]) -> None:
    scorer = small(tmp_path, base)
    scorer.choose(int8)
    expected = in_numpy(weights(), arrays(), rounding_to(base), small_ranges(), int8)["SCORE"]
    off = np.abs(in_numpy(weights(), arrays())["SCORE"] - expected).max()
    np.testing.assert_allclose(scores(scorer, arrays()), expected, atol=off * SAME)


def other_way(model: onnx.ModelProto, base: BasePrecision, ranges: dict[str, float], int8: Sequence[str]) -> Any:
    """The same choice as `convert` makes it, without switches."""
    return twin(quantize_for_tensorrt(model, ranges, int8) if int8 else model, base)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("family", ["bert", "xlm_roberta", "bi_encoder"])
def test_any_choice_scores_as_the_graph_that_has_no_other(
    tiny: TinyModels, tmp_path: Path, family: str, base: BasePrecision
) -> None:
    path, feed = tiny.graph(family), batch([40, 7, 23, 4, 31], family)
    graph = onnx.load(path).graph
    linear = [node.name for node in linear_layers(graph)]
    nodes = [*linear, *(node.name for node in attention_products(graph))]
    read = {node.name: list(node.input) for node in graph.node}
    names = sorted({read[name][0] for name in linear} | {n for name in nodes[12:] for n in read[name]})
    ranges = {name: float(np.abs(value).max()) for name, value in run(onnx.load(path), feed, names).items()}
    write_switched(path, ranges, nodes, base, tmp_path / "switched.onnx")
    scorer = SwitchedScorer(tmp_path / "switched.onnx", nodes)
    exact = run(onnx.load(path), feed)["SCORE"]
    seen = []
    for int8 in ([], linear, nodes, linear[::2]):
        scorer.choose(int8)
        expected = run(other_way(onnx.load(path), base, ranges, int8), feed)["SCORE"]
        seen.append(scores(scorer, feed))
        np.testing.assert_allclose(seen[-1], expected, atol=0.25 * float(np.abs(expected - exact).max()))
    assert len({found.tobytes() for found in seen}) == 4


def test_a_choice_is_kept_until_the_next(tmp_path: Path) -> None:
    scorer = small(tmp_path, "fp16")
    first = scores(scorer, arrays())
    scorer.choose(("down",))
    second = scores(scorer, arrays())
    np.testing.assert_array_equal(scores(scorer, arrays()), second)
    assert np.abs(first - second).max() > 0
    scorer.choose(())
    np.testing.assert_array_equal(scores(scorer, arrays()), first)


def test_switches_are_inputs_that_scoring_does_not_ask_for(tmp_path: Path) -> None:
    scorer = small(tmp_path, "bf16")
    assert scorer.input_names == {"input_ids", "attention_mask"}
    graph = onnx.load(tmp_path / "switched.onnx").graph
    assert [node.name for node in graph.input] == [
        *("input_ids", "attention_mask"),
        *(f"int8:{name}" for name in PRODUCTS),
    ]
    onnx.checker.check_model(onnx.load(tmp_path / "switched.onnx"), full_check=True)


def test_without_switches_it_is_the_twin(tmp_path: Path) -> None:
    onnx.save(encoder(weights()), tmp_path / "model.onnx")
    write_switched(tmp_path / "model.onnx", {}, (), "fp16", tmp_path / "switched.onnx")
    expected = in_numpy(weights(), arrays(), rounding_to("fp16"))["SCORE"]
    off = np.abs(in_numpy(weights(), arrays())["SCORE"] - expected).max()
    found = scores(SwitchedScorer(tmp_path / "switched.onnx", ()), arrays())
    np.testing.assert_allclose(found, expected, atol=off * SAME)


@pytest.mark.parametrize("absurd", ["gelu", "context"])
def test_the_layer_that_int8_hurts_most_comes_first(tmp_path: Path, absurd: str) -> None:
    # A range a thousand times too large leaves nothing of the values.
    scorer = small(tmp_path, "fp16", **{absurd: 1000 * small_ranges()[absurd]})
    sample = [padded(arrays(seed=seed, lengths=(9, 5, 4))) for seed in range(4)]
    steps: list[None] = []
    found = sensitivities(scorer, sample, lambda: steps.append(None))
    (worst,) = (name for name, (activation, _) in LINEAR.items() if activation == absurd)
    assert next(iter(found)) == worst
    assert set(found) == set(PRODUCTS)
    assert len(steps) == len(PRODUCTS)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    ranges = small_ranges() | {absurd: 1000 * small_ranges()[absurd]}
    for name, value in found.items():
        shifts = [
            np.abs(
                in_numpy(weights(), request.arrays, rounding_to("fp16"), ranges, [name])["SCORE"]
                - in_numpy(weights(), request.arrays, rounding_to("fp16"))["SCORE"]
            )
            for request in sample
        ]
        np.testing.assert_allclose(value, np.concatenate(shifts).mean(), rtol=0.05, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "xlm_roberta"])
def test_padding_rows_by_hand_scores_them_as_ever(tiny: TinyModels, tmp_path: Path, family: str) -> None:
    path, feed = tiny.graph(family), batch([9, 5, 7, 12], family)
    nodes = [node.name for node in linear_layers(onnx.load(path).graph)]
    ranges = {node.input[0]: 6.0 for node in linear_layers(onnx.load(path).graph)}
    write_switched(path, ranges, nodes, "fp16", tmp_path / "switched.onnx")
    scorer = SwitchedScorer(tmp_path / "switched.onnx", nodes)
    expected = scores(scorer, feed)[:, 0]
    spread = float(expected.std())
    assert spread > 0.05
    request = padded(feed)
    for length in (12, 32):
        found = scorer.run_padded([(request, row) for row in (2, 0, 3, 1)], length)
        assert found.shape == (4,)
        np.testing.assert_allclose(found, expected[[2, 0, 3, 1]], atol=0.02 * spread)
