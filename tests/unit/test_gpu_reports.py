# SPDX-License-Identifier: Apache-2.0
"""What a gpu build leaves of its verification: report.md for people, reference.npz for the GPU that finishes it."""

from __future__ import annotations

import dataclasses
import json
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import ndcg_score  # type: ignore[import-untyped]

from build_engines.pairs import Candidates
from build_engines.report import as_markdown
from build_engines.verify import RANDOM_ORDERS, Verifier
from build_engines.verify_plan import read_reference
from tests.unit.chosen_scores import Bench
from tests.unit.gpu_builds import LOOSE, random_candidates
from tests.unit.tiny_models import TinyModels

LAYERS = {"layer 0": 0.05, "layer 1": 0.5, "layer 2": 0.1, "layer 3": 0.02}


@pytest.fixture
def bench(tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    given = random_candidates(10, seed=7, graded=True, documents=6)
    given[2] = dataclasses.replace(given[2], relevance=None)
    given[5] = dataclasses.replace(given[5], relevance=(0.0,) * 6)
    given[6] = Candidates(given[6].query, given[6].documents[:1], (2.0,))
    return Bench(tiny, tmp_path, given, monkeypatch)


def tables(report: str) -> list[list[list[str]]]:
    """Return the cells of each table, by the rules of Markdown: it starts after a blank line, below it is a rule."""
    found = []
    for block in report.split("\n\n"):
        lines = block.strip().splitlines()
        if len(lines) > 1 and lines[0].startswith("|"):
            rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
            assert set(rows[1]) == {"---"}
            assert len({len(row) for row in rows}) == 1
            found.append([rows[0], *rows[2:]])
    return found


def test_the_report_has_a_row_for_each_precision_and_marks_the_layers_that_stayed(bench: Bench) -> None:
    gates = dataclasses.replace(LOOSE, max_score_shift=0.2)
    facts, _ = bench.verify(LAYERS, gates=gates, search_budget=0.5)
    report = (bench.out / "report.md").read_text(encoding="utf-8")
    assert json.loads((bench.out / "report.json").read_text(encoding="utf-8")) == facts
    assert report.startswith("# tiny_xlm_roberta: INT8 ships\n\ntiny_xlm_roberta: INT8 in every layer is outside")
    assert "\n10 queries, 55 pairs, each beside FP32 on the same pairs." in report
    precisions, layers = tables(report)
    assert [row[0] for row in precisions[1:]] == ["fp32", "fp16", "int8", "**int8, 1 layers back** (ships)"]
    outside = "largest score shift / spread"
    assert [row[-1] for row in precisions[1:]] == ["", "no", outside, "no"]
    columns = {name: [row[place] for row in precisions[1:]] for place, name in enumerate(precisions[0])}
    # The scores of FP16 are FP32's here; INT8 moves each score by the sum of its layers.
    assert columns["nDCG@10"][:2] == [f"{facts['fp32_ndcg_at_10']:.4g}"] * 2
    shifts = [f"{share * bench.spread:.3g}" for share in (0.67, 0.17)]
    assert [f"{float(cell):.3g}" for cell in columns["largest shift"][2:]] == shifts
    assert [f"{float(cell):.3g}" for cell in columns["mean shift"][2:]] == shifts
    assert (columns["Kendall tau"][:2], columns["same top 1"][:2]) == (["", "1"], ["", "1"])
    assert columns["not finite"] == ["", "0", "0", "0"]
    assert layers == [
        ["layer", "change"],
        *([name, f"{share * bench.spread:.4g}"] for name, share in (("**layer 1**", 0.5), ("layer 2", 0.1))),
        *([name, f"{share * bench.spread:.4g}"] for name, share in (("layer 0", 0.05), ("layer 3", 0.02))),
    ]


def test_without_a_search_the_report_has_no_layers() -> None:
    facts: dict[str, Any] = {"precision": "fp16", "reason": "because", "queries": 2, "pairs": 3}
    facts |= {"fp32_ndcg_at_10": None, "candidates": [], "sensitivity": {}, "high_precision_layers": []}
    ((head, *rows),) = tables(as_markdown("tiny", facts))
    assert rows == [["fp32", *[""] * (len(head) - 1)]]


@pytest.mark.parametrize("family", ["xlm_roberta", "bert"])
def test_the_reference_holds_the_same_requests_scores_and_grades(bench: Bench, family: str) -> None:
    bench.family = family
    bench.verify({})
    verifier = bench.verifier()
    reference = read_reference(bench.out / "reference.npz")
    assert len(reference.requests) == len(bench.candidates)
    for found, expected in zip(reference.requests, verifier.requests, strict=True):
        assert set(found.arrays) == set(expected.arrays)
        assert found.lengths.tolist() == expected.lengths.tolist()
        longest = int(expected.lengths.max())
        inside = expected.arrays["attention_mask"][:, :longest]
        assert found.arrays["attention_mask"].tolist() == inside.tolist()
        for name, array in expected.arrays.items():
            assert found.arrays[name].dtype == np.int64
            # What is masked may hold anything.
            assert (found.arrays[name] * inside).tolist() == (array[:, :longest] * inside).tolist()
    for scores, wanted in zip(reference.fp32, bench.fp32(), strict=True):
        np.testing.assert_allclose(scores, wanted, atol=1e-5)
    assert reference.grades == [None if c.relevance is None else list(c.relevance) for c in bench.candidates]


def test_the_reference_and_the_verifier_rate_scores_alike(bench: Bench) -> None:
    bench.verify({})
    reference = read_reference(bench.out / "reference.npz")
    rng = np.random.default_rng(1)
    scores = [rng.normal(size=len(c.documents)).astype(np.float32) for c in bench.candidates]
    graded = [
        (s, c.relevance) for s, c in zip(scores, bench.candidates, strict=True) if c.relevance and any(c.relevance)
    ]
    assert len(graded) == 8
    single = [1.0 for s, _ in graded if len(s) == 1]  # scikit-learn takes at least two documents
    expected = [ndcg_score([2 ** np.array(g) - 1], [s], k=10) for s, g in graded if len(s) > 1] + single
    assert reference.ndcg(scores) == pytest.approx(np.mean(expected))
    assert bench.verifier().ndcg(scores) == pytest.approx(np.mean(expected))
    bench.candidates = [dataclasses.replace(c, relevance=None) for c in bench.candidates]
    bench.verify({})
    assert read_reference(bench.out / "reference.npz").ndcg(scores) is None


def of_every_order(grades: tuple[float, ...]) -> list[float]:
    """The nDCG of every order that there is."""
    gains = 2 ** np.array(grades) - 1
    return [float(ndcg_score([gains], [list(order)], k=10)) for order in permutations(range(len(grades)))]


GRADES = [(1.0, 0.0), (0.0, 0.0, 3.0), (2.0, 0.0, 1.0), (0.0, 1.0, 1.0, 0.0), (1.0, 0.0, 0.0, 0.0, 2.0)]


def chance_verifier(bench: Bench, grades: list[tuple[float, ...] | None]) -> Verifier:
    bench.candidates = [Candidates(f"query {i}", ("text",) * len(g or (0, 0)), g) for i, g in enumerate(grades)]
    return bench.verifier()


@pytest.mark.parametrize("best", [True, False])
def test_the_lead_over_chance_is_that_over_the_mean_of_all_orders(bench: Bench, best: bool) -> None:
    grades = GRADES * 40
    sign = 1 if best else -1
    scores = [np.array(g, dtype=np.float32) * sign for g in grades]
    lead = chance_verifier(bench, list(grades)).lead_over_chance(scores)
    assert lead is not None
    choose = max if best else min
    exact = [choose(of_every_order(g)) - np.mean(of_every_order(g)) for g in GRADES]
    drawn = np.mean([np.var(of_every_order(g)) for g in GRADES]) / RANDOM_ORDERS
    assert lead[0] == pytest.approx(np.mean(exact), abs=4 * np.sqrt(drawn / len(grades)))
    assert lead[1] == pytest.approx(np.sqrt((np.var(exact) + drawn) / len(grades)), rel=0.15)


def test_a_random_order_has_no_lead(bench: Bench) -> None:
    rng = np.random.default_rng(5)
    grades = GRADES * 40
    lead = chance_verifier(bench, list(grades)).lead_over_chance(
        [rng.normal(size=len(g)).astype(np.float32) for g in grades]
    )
    assert lead is not None
    assert abs(lead[0]) < 3 * lead[1]
    assert 0 < lead[1] < 0.03


def test_queries_that_tell_nothing_do_not_count(bench: Bench) -> None:
    telling: list[tuple[float, ...] | None] = [(1.0, 0.0)] * 7
    silent: list[tuple[float, ...] | None] = [None, (0.0, 0.0), (1.0, 1.0)] * 5
    scores = [np.array([1.0, 0.0], dtype=np.float32)] * 23
    assert chance_verifier(bench, telling + silent).lead_over_chance(scores[:22]) is None
    lead = chance_verifier(bench, [*telling, (1.0, 0.0), *silent]).lead_over_chance(scores)
    assert lead is not None
    # Two orders: 1, and 1 / log2(3).
    assert lead[0] == pytest.approx((1 - 1 / np.log2(3)) / 2, abs=0.05)
