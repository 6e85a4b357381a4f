# SPDX-License-Identifier: Apache-2.0
"""The search for layers that must stay, and the gates of the gpu target, on scores that the tests choose."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import kendalltau  # type: ignore[import-untyped]

from build_engines.errors import GateError
from build_engines.pairs import Candidates
from build_engines.table import Gates
from build_engines.verify_gpu import agreement
from tests.unit.chosen_scores import Bench, Change, Chosen, drawn
from tests.unit.gpu_builds import LOOSE, random_candidates
from tests.unit.tiny_models import TinyModels

# How much each layer adds when it is INT8, in units of the scores' spread, in the order of the graph.
LAYERS = {f"layer {index}": 0.01 * weight for index, weight in enumerate((3, 40, 1, 9, 80, 2, 20, 5, 4, 6))}
BY_SENSITIVITY = ["layer 4", "layer 1", "layer 6", "layer 3", "layer 9", "layer 7"]


def shift_at_most(allowed: float) -> Gates:
    return dataclasses.replace(LOOSE, max_score_shift=allowed)


@pytest.fixture
def bench(tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    given = random_candidates(10, seed=7, graded=True, documents=6)
    given[2] = dataclasses.replace(given[2], relevance=None)
    return Bench(tiny, tmp_path, given, monkeypatch)


def names(facts: dict[str, Any]) -> list[str]:
    return [candidate["name"] for candidate in facts["candidates"]]


def rest(back: int) -> list[str]:
    """The layers in the order of the graph, without the most sensitive ones."""
    return [name for name in LAYERS if name not in BY_SENSITIVITY[:back]]


# The sums of what is left in INT8: all 1.70, then 0.90, 0.50, 0.30 (3 back), 0.21 (4 back), 0.15 (5 back).
@pytest.mark.parametrize(
    ("allowed", "budget", "tried"),
    [
        (2.0, 0.5, []),
        (1.0, 0.5, [1]),
        (0.6, 0.5, [1, 2]),
        (0.25, 0.5, [1, 2, 4]),
        (0.16, 0.5, [1, 2, 4, 5]),
        (0.31, 0.3, [1, 2, 3]),
        (0.51, 0.2, [1, 2]),
    ],
)
def test_the_most_sensitive_layers_go_back_until_the_gates_are_passed(
    bench: Bench, allowed: float, budget: float, tried: list[int]
) -> None:
    facts, scorer = bench.verify(LAYERS, gates=shift_at_most(allowed), search_budget=budget)
    back = tried[-1] if tried else 0
    assert names(facts) == ["fp16", "int8", *(f"int8, {layers} layers back" for layers in tried)]
    assert facts["precision"] == "int8"
    assert facts["int8_layers"] == rest(back)
    assert set(facts["high_precision_layers"]) == set(BY_SENSITIVITY[:back])
    assert [candidate["ships"] for candidate in facts["candidates"]] == [False] * (1 + len(tried)) + [True]
    passed = [all(gate["passed"] for gate in candidate["gates"]) for candidate in facts["candidates"]]
    assert passed == [True] + [False] * len(tried) + [True]
    # Base, everything, then where that fails the layers one by one, and the search.
    alone = [[], *([name] for name in LAYERS)] if tried else []
    assert scorer.chosen == [[], list(LAYERS), *alone, *(rest(layers) for layers in tried)]
    assert list(facts["sensitivity"])[: len(BY_SENSITIVITY)] == (BY_SENSITIVITY if tried else [])
    if tried:
        assert facts["reason"].endswith(f"; with the {back} most sensitive layers back in base precision it passes")


@pytest.mark.parametrize(
    ("budget", "tried", "why"),
    [
        (0.0, [], "search_budget 0 allows no layer to go back"),
        (0.09, [], "search_budget 0.09 allows no layer to go back"),
        (0.1, [1], "still so with the most layers back that search_budget 0.1 allows: largest score shift / spread"),
        (0.7, [1, 2, 4, 7], "still so with the most layers back that search_budget 0.7 allows: largest score shift"),
        (0.3, [1, 2, 3], "still so with the most layers back that search_budget 0.3 allows: largest score shift"),
    ],
)
def test_without_a_choice_inside_the_gates_the_base_ships_or_nothing(
    bench: Bench, budget: float, tried: list[int], why: str
) -> None:
    facts, _ = bench.verify(LAYERS, gates=shift_at_most(0.01), search_budget=budget)
    assert names(facts) == ["fp16", "int8", *(f"int8, {layers} layers back" for layers in tried)]
    assert (facts["precision"], facts["int8_layers"], facts["high_precision_layers"]) == ("fp16", [], [])
    assert [candidate["ships"] for candidate in facts["candidates"]] == [True] + [False] * (1 + len(tried))
    assert "INT8 in every layer is outside its gates (largest score shift / spread 1." in facts["reason"]
    assert why in facts["reason"]
    (bench.out / "report.json").unlink()
    with pytest.raises(GateError) as caught:
        bench.verify(LAYERS, gates=shift_at_most(0.01), search_budget=budget, precision="int8")
    assert why in str(caught.value)
    assert 'or set precision = "auto" (fp16 then ships) in rerankers.toml.' in str(caught.value)
    assert not (bench.out / "report.json").exists()


def test_a_layer_without_a_finite_score_goes_back_first(bench: Bench) -> None:
    facts, _ = bench.verify(LAYERS | {"layer 8": math.nan}, gates=shift_at_most(2.0))
    assert facts["candidates"][1]["not_finite"] == 60
    assert facts["high_precision_layers"] == ["layer 8"]
    json.loads((bench.out / "report.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("base", "advice"),
    [
        ("fp16", 'set base_precision = "bf16", which cannot overflow, or build for the cpu target, which has FP32'),
        ("bf16", "widen base_gates if the checkpoint was trained in it, or build for the cpu target, which has FP32"),
    ],
)
def test_a_base_outside_its_gates_is_refused(bench: Bench, base: str, advice: str) -> None:
    expected = f"tiny_xlm_roberta: {base.upper()} is outside its gates: Kendall tau 1 (at least 1.01)"
    with pytest.raises(GateError) as caught:
        bench.verify(LAYERS, base_precision=base, base_gates=dataclasses.replace(LOOSE, kendall_tau=1.01))
    assert str(caught.value) == f"{expected}. In rerankers.toml {advice}."
    assert not list(bench.out.iterdir())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_base_that_overflows_is_refused(bench: Bench, value: float) -> None:
    with pytest.raises(GateError) as caught:
        bench.verify(LAYERS, lambda _, feed: np.where(drawn(feed) > 0.9, value, 0.0))
    lost = sum(int((drawn(request.arrays) > 0.9).sum()) for request in bench.verifier().requests)
    assert lost > 0
    assert f"FP16 overflows: {lost} scores are not finite. In rerankers.toml set base_precision" in str(caught.value)


BUCKETS = (32, 64, 128, 256, 512)


def neighbours(_scorer: Chosen, feed: dict[str, NDArray[np.int64]]) -> NDArray[np.float64]:
    """Any other row in the batch adds to a score."""
    return np.full(len(feed["input_ids"]), 1.0 if len(feed["input_ids"]) > 1 else 0.0)


def order(_scorer: Chosen, feed: dict[str, NDArray[np.int64]]) -> NDArray[np.float64]:
    """The first row is wrong where it is longer than the last."""
    lengths = feed["attention_mask"].sum(axis=1)
    return np.where((np.arange(len(lengths)) == 0) & (lengths[0] > lengths[-1]), 1.0, 0.0)


def crowd(_scorer: Chosen, feed: dict[str, NDArray[np.int64]]) -> NDArray[np.float64]:
    """The last row is wrong where it is longer than the first and fills its bucket best."""
    lengths, width = feed["attention_mask"].sum(axis=1), feed["input_ids"].shape[1]
    wrong = lengths[0] < lengths[-1] and width == min(b for b in BUCKETS if b >= lengths[-1])
    return np.where((np.arange(len(lengths)) == len(lengths) - 1) & wrong, 1.0, 0.0)


def padding(_scorer: Chosen, feed: dict[str, NDArray[np.int64]]) -> NDArray[np.float64]:
    """Every row is wrong where the whole batch is padded to a bucket more than it needs."""
    longest, width = int(feed["attention_mask"].sum(axis=1).max()), feed["input_ids"].shape[1]
    needed = min(bucket for bucket in BUCKETS if bucket >= longest)
    return np.full(len(feed["input_ids"]), 1.0 if width > needed else 0.0)


@pytest.mark.parametrize("effect", [neighbours, order, crowd, padding])
@pytest.mark.parametrize("int8_alone", [True, False])
def test_a_score_that_depends_on_its_place_is_outside_the_gates(bench: Bench, effect: Change, int8_alone: bool) -> None:
    spread = bench.spread

    def layout(scorer: Chosen, feed: dict[str, NDArray[np.int64]]) -> NDArray[np.float64]:
        return 0.06 * spread * effect(scorer, feed) * (scorer.int8 or not int8_alone)

    if not int8_alone:
        with pytest.raises(
            GateError, match=r"FP16 is outside its gates: neighbour, order or padding effect / spread 0\.06"
        ):
            bench.verify({"layer": 0.0}, layout)
        return
    facts, _ = bench.verify({"layer": 0.0}, layout)
    assert facts["precision"] == "fp16"
    assert "outside its gates (neighbour, order or padding effect / spread 0.06 (at most 0.05))" in facts["reason"]
    assert facts["candidates"][1]["layout_effect"] == pytest.approx(0.06 * spread, rel=0.01)
    assert facts["candidates"][0]["layout_effect"] < 0.001 * spread


def test_a_small_effect_of_the_place_is_rounding(bench: Bench) -> None:
    spread = bench.spread
    facts, _ = bench.verify({"layer": 0.0}, lambda scorer, feed: 0.04 * spread * neighbours(scorer, feed))
    assert facts["precision"] == "int8"


def test_one_pair_alone_has_no_spread_and_is_refused(bench: Bench) -> None:
    bench.candidates = [Candidates("panda", ("a bear",))]
    with pytest.raises(GateError, match=r"FP16 is outside its gates: largest score shift / spread inf"):
        bench.verify(LAYERS, base_gates=LOOSE)


def test_figures_equal_an_independent_computation(bench: Bench) -> None:
    rng = np.random.default_rng(3)
    fp32 = bench.fp32()
    scores = [row + rng.normal(0, 0.3, len(row)).astype(np.float32) for row in fp32]
    found = agreement(bench.verifier(), fp32, scores)
    assert found["kendall_tau"] == pytest.approx(
        np.mean([kendalltau(a, b)[0] for a, b in zip(fp32, scores, strict=True)])
    )
    same = [int(np.argmax(a)) == int(np.argmax(b)) for a, b in zip(fp32, scores, strict=True)]
    assert 0 < sum(same) < len(same)
    assert found["top1_agreement"] == pytest.approx(sum(same) / len(same))
    shifts = np.abs(np.concatenate(fp32) - np.concatenate(scores))
    assert found["mean_shift"] == pytest.approx(shifts.mean(), rel=1e-6)
    assert found["max_shift"] == pytest.approx(shifts.max(), rel=1e-6)
