# SPDX-License-Identifier: Apache-2.0
"""What verification reports is what independent code computes, and its gates decide what ships."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from scipy.stats import kendalltau  # type: ignore[import-untyped]

import build_engines.verify
from build_engines.errors import GateError, PairsError
from build_engines.pairs import Candidates
from build_engines.table import Gates, Precision
from build_engines.verify import Gate, Verifier, verify
from tests.unit.random_texts import random_text
from tests.unit.tiny_models import TinyModels

IMPOSSIBLE = Gates(ndcg_drop=0.0, top1_agreement=1.01, kendall_tau=1.01, max_score_shift=0.0)
LOOSE = Gates(ndcg_drop=1.0, top1_agreement=0.0, kendall_tau=0.0, max_score_shift=100.0)
Run = Callable[..., dict[str, Any]]
Scores = list[NDArray[np.float64]]


def queries(*, graded: bool) -> list[Candidates]:
    rng = random.Random(21)
    rows = []
    for query in range(12):
        documents = tuple(random_text(rng, longest=60) for _ in range(8))
        grades = tuple(float(rng.randrange(3)) for _ in documents)
        # The last query has no relevant document and does not count.
        relevance = (grades if query < 11 else (0.0,) * 8) if graded else None
        rows.append(Candidates(f"query {query} {random_text(rng, longest=8)}", documents, relevance))
    return rows


@pytest.fixture
def run(tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Verify the tiny XLM-R with its INT8 graph, as if that were five times as fast."""

    def verified(precision: Precision, gates: Gates, *, graded: bool = True, speedup: float = 5.0) -> dict[str, Any]:
        model = tiny.model("xlm_roberta")
        reranker = dataclasses.replace(model.reranker, precision=precision, gates=gates)
        monkeypatch.setattr(Verifier, "speedup", lambda *_: speedup)
        vocabulary = int(model.checkpoint.config["vocab_size"])
        verifier = Verifier(reranker, model.pairing, vocabulary, queries(graded=graded))
        int8 = None if precision == "fp32" else tiny.int8_graph("xlm_roberta")
        facts = verify(verifier, tiny.graph("xlm_roberta"), int8, tmp_path, lambda: None)
        assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == facts
        return facts

    return verified


def own_scores(tiny: TinyModels, graph: Path) -> Scores:
    """Score every pair alone, in ids of the checkpoint's own tokenizer."""
    model, session = tiny.model("xlm_roberta"), ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
    found = []
    for query in queries(graded=True):
        rows = []
        for document in query.documents:
            q, d = (model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (query.query, document))
            ids = np.array([[0, *q, 2, 2, *d[: 508 - len(q)], 2]])
            rows.append(session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0][0, 0])
        found.append(np.array(rows, dtype=np.float64))
    return found


def mean_ndcg(scores: Scores) -> float:
    values = []
    for row, query in zip(scores, queries(graded=True), strict=True):
        grades = query.relevance or ()
        if not any(grades):
            continue
        ranked = [grades[i] for i in sorted(range(len(grades)), key=lambda i: (-row[i], i))]
        dcg, ideal = (
            sum((2**grade - 1) / math.log2(rank + 2) for rank, grade in enumerate(order[:10]))
            for order in (ranked, sorted(grades, reverse=True))
        )
        values.append(dcg / ideal)
    return float(np.mean(values))


def found_by(facts: dict[str, Any], name: str) -> float:
    (gate,) = [gate for gate in facts["gates"] if gate["name"] == name]
    return float(gate["found"])


def test_figures_equal_an_independent_computation(tiny: TinyModels, run: Run) -> None:
    facts = run("auto", LOOSE)
    fp32, int8 = (own_scores(tiny, graph("xlm_roberta")) for graph in (tiny.graph, tiny.int8_graph))
    assert (facts["queries"], facts["pairs"]) == (12, 96)
    assert facts["fp32_ndcg_at_10"] == pytest.approx(mean_ndcg(fp32), abs=1e-6)
    assert facts["int8_ndcg_at_10"] == pytest.approx(mean_ndcg(int8), abs=1e-6)
    assert found_by(facts, "nDCG@10 drop") == pytest.approx(mean_ndcg(fp32) - mean_ndcg(int8), abs=1e-6)
    taus = [kendalltau(a, b).statistic for a, b in zip(fp32, int8, strict=True)]
    assert found_by(facts, "Kendall tau") == pytest.approx(np.mean(taus), abs=1e-6)
    shifts = np.abs(np.concatenate(fp32) - np.concatenate(int8))
    spread = np.concatenate(fp32).std()
    assert found_by(facts, "largest score shift / spread") == pytest.approx(shifts.max() / spread, rel=1e-3)
    assert facts["int8_mean_shift"] == pytest.approx(shifts.mean(), rel=1e-3)
    assert 0 <= facts["fp32_neighbour_effect"] < 1e-4
    assert facts["int8_neighbour_effect"] == 0.0


def test_top_1_agreement_stands_in_where_no_relevance_is_known(tiny: TinyModels, run: Run) -> None:
    facts = run("auto", LOOSE, graded=False)
    fp32, int8 = (own_scores(tiny, graph("xlm_roberta")) for graph in (tiny.graph, tiny.int8_graph))
    same = [a.argmax() == b.argmax() for a, b in zip(fp32, int8, strict=True)]
    assert facts["fp32_ndcg_at_10"] is None
    assert found_by(facts, "top-1 agreement") == pytest.approx(np.mean(same))
    assert not any(gate["name"] == "nDCG@10 drop" for gate in facts["gates"])


def test_int8_ships_inside_its_gates(run: Run) -> None:
    facts = run("auto", LOOSE)
    assert facts["precision"] == "int8"
    assert "5.00 x as fast as FP32 and inside its gates" in facts["reason"]
    assert all(gate["passed"] for gate in facts["gates"])


def test_int8_outside_its_gates_is_refused_where_it_was_asked_for(run: Run, tmp_path: Path) -> None:
    with pytest.raises(GateError) as caught:
        run("int8", IMPOSSIBLE)
    message = str(caught.value)
    assert "tiny_xlm_roberta: INT8 is outside its gates" in message
    assert "Kendall tau" in message
    assert "(at least 1.01)" in message
    assert 'set precision = "auto"' in message
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize("graded", [True, False])
def test_auto_ships_fp32_outside_the_gates_and_says_why(run: Run, graded: bool) -> None:
    facts = run("auto", IMPOSSIBLE, graded=graded)
    assert facts["precision"] == "fp32"
    assert facts["reason"].startswith("INT8 is outside its gates: largest score shift")
    assert ("top-1 agreement" in facts["reason"]) == (not graded)


def test_auto_ships_fp32_where_int8_is_hardly_faster(run: Run) -> None:
    facts = run("auto", LOOSE, speedup=1.05)
    assert (facts["precision"], facts["reason"]) == ("fp32", "INT8 passes its gates but is only 1.05 x as fast")
    assert run("int8", LOOSE, speedup=0.5)["precision"] == "int8"


def test_fp32_is_verified_alone(run: Run) -> None:
    facts = run("fp32", IMPOSSIBLE)
    assert (facts["precision"], facts["reason"]) == ("fp32", "precision is set to fp32")
    assert "gates" not in facts


def test_a_score_that_depends_on_its_neighbours_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Verifier, "largest_neighbour_effect", lambda *_: 1e-3)
    with pytest.raises(GateError, match=r"a neighbour in the batch changes an FP32 score by 1\.00e-03"):
        run("auto", LOOSE)


def test_the_neighbour_effect_is_seen(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("xlm_roberta")
    verifier = Verifier(model.reranker, model.pairing, 335, queries(graded=False))
    # INT8 in runs of several rows takes its activation scales from all of them.
    monkeypatch.setattr(build_engines.verify, "TOKENS_PER_RUN", 4096)
    scorer = verifier.open(tiny.int8_graph("xlm_roberta"), "fp32")
    assert verifier.largest_neighbour_effect(scorer) > 1e-4


@pytest.mark.parametrize(
    ("found", "allowed", "at_least", "passed"),
    [
        (0.5, 0.5, True, True),
        (0.49, 0.5, True, False),
        (0.5, 0.5, False, True),
        (0.51, 0.5, False, False),
        (-1.0, 0.0, False, True),
        (math.nan, 0.0, True, False),
        (math.nan, 1.0, False, False),
    ],
)
def test_a_gate_passes_at_its_bound_and_never_for_nan(
    found: float, allowed: float, at_least: bool, passed: bool
) -> None:
    assert Gate("figure", found, allowed, at_least).passed is passed


def test_a_query_that_cannot_be_encoded_is_named(tiny: TinyModels) -> None:
    model = tiny.model("xlm_roberta")
    rows = [Candidates("the query", ("a" * 2_000_000, "b"))]
    with pytest.raises(PairsError, match="The query 'the query' cannot be scored: DOCUMENT in row 0"):
        Verifier(model.reranker, model.pairing, 335, rows)
