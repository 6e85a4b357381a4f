# SPDX-License-Identifier: Apache-2.0
"""Rows are grouped into runs, scored, and put back; arrays from outside are refused before they reach the graph."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from build_engines.serving_code import graph_scoring
from tests.unit.tiny_models import TinyModels

LIMITS = graph_scoring.Limits(vocabulary=300, max_length=512)
Arrays = dict[str, NDArray[np.int64]]


def arrays(lengths: list[int], *, seed: int = 0, width: int | None = None, segments: bool = False) -> Arrays:
    rng = np.random.default_rng(seed)
    width = max(lengths) if width is None else width
    mask = (np.arange(width) < np.array(lengths)[:, None]).astype(np.int64)
    # Padding holds 7, not the pad id: what is not attended to must not matter.
    found = {"input_ids": np.where(mask == 1, rng.integers(5, 300, mask.shape), 7), "attention_mask": mask}
    if segments:
        found["token_type_ids"] = (np.arange(width) >= np.array(lengths)[:, None] // 3).astype(np.int64) * mask
    return found


def request(lengths: list[int], **settings: Any) -> graph_scoring.PaddedPairs:
    return graph_scoring.PaddedPairs.check(arrays(lengths, **settings), LIMITS)


def runs_of(lengths: list[int], tokens_per_run: int, threads: int) -> list[list[int]]:
    plan = graph_scoring.plan_runs(np.array(lengths), tokens_per_run=tokens_per_run, threads=threads)
    return [rows.tolist() for rows in plan]


def random_lengths(count: int = 300) -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(8, rng.integers(9, 513), rng.integers(1, 130)).tolist() for _ in range(count)]


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("budget", [0, 64, 512, 4096])
def test_every_row_runs_once_and_no_run_of_several_rows_exceeds_the_budget(budget: int, threads: int) -> None:
    for lengths in random_lengths():
        runs = runs_of(lengths, budget, threads)
        assert sorted(itertools.chain(*runs)) == list(range(len(lengths)))
        assert all(len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget for rows in runs)


def test_a_budget_of_zero_gives_every_row_a_run_of_its_own() -> None:
    assert runs_of([9, 30, 9, 512], 0, 2) == [[3], [1], [0], [2]]


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_every_thread_gets_a_run_where_no_row_is_longer_than_a_fair_share(threads: int) -> None:
    checked = 0
    for lengths in random_lengths():
        if len(lengths) >= threads and max(lengths) * threads <= sum(lengths):
            assert len(runs_of(lengths, 100_000, threads)) >= threads
            checked += 1
    assert checked > 100


def test_two_threads_both_get_a_run_however_lengths_differ() -> None:
    for lengths in [*random_lengths(), [512, 5], [512, *[5] * 63], [5, 5]]:
        assert len(runs_of(lengths, 100_000, 2)) >= min(2, len(lengths))


def test_long_rows_come_first_and_equal_ones_keep_their_order() -> None:
    assert list(itertools.chain(*runs_of([20, 40, 20, 40], 512, 1))) == [1, 3, 0, 2]


def test_short_rows_are_not_padded_to_the_long_ones_of_a_mixed_batch() -> None:
    lengths = [20, 500] * 32
    run = sum(len(rows) * max(lengths[row] for row in rows) for rows in runs_of(lengths, 512, 2))
    assert run <= 1.3 * sum(lengths)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attention_mask": np.ones((2, 9), np.int64)}, "Shapes differ"),
        ({"token_type_ids": np.zeros((1, 8), np.int64)}, "Shapes differ"),
        ({"attention_mask": np.array([[1] * 8, [0] * 4 + [1] * 4])}, "then 0 to the end of the row"),
        ({"attention_mask": np.array([[1] * 8, [1, 0] * 4])}, "then 0 to the end of the row"),
        ({"attention_mask": np.array([[1] * 8, [0] * 8])}, "1 for at least one token of each row"),
        ({"attention_mask": np.array([[1] * 8, [2, 2] + [0] * 6])}, "attention_mask must be 1"),
        ({"attention_mask": np.array([[1] * 8, [3] * 8])}, "attention_mask must be 1"),
        ({"attention_mask": np.array([[1] * 8, [-1] * 8])}, "attention_mask must be 1"),
        ({"input_ids": np.array([[5] * 8, [5] * 7 + [300]])}, "reach from 5 to 300; allowed is 0 to 299"),
        ({"input_ids": np.array([[5] * 8, [5] * 7 + [-1]])}, "reach from -1 to 5; allowed is 0 to 299"),
        ({"token_type_ids": np.full((2, 8), 2)}, "token_type_ids must be 0 or 1"),
        ({"token_type_ids": np.full((2, 8), -1)}, "token_type_ids must be 0 or 1"),
    ],
)
def test_arrays_that_the_graph_cannot_score_are_refused(change: Arrays, says: str) -> None:
    good = arrays([8, 8], segments=True)
    graph_scoring.PaddedPairs.check(good, LIMITS)
    with pytest.raises(graph_scoring.InputError, match=says):
        graph_scoring.PaddedPairs.check(good | change, LIMITS)


def test_rows_longer_than_the_model_are_refused_but_padding_is_not() -> None:
    assert request([512, 9], width=600).lengths.tolist() == [512, 9]
    with pytest.raises(graph_scoring.InputError, match="513 tokens; at most 512"):
        request([513, 9], width=600)


def test_rows_without_any_column_are_refused() -> None:
    empty = np.zeros((2, 0), np.int64)
    with pytest.raises(graph_scoring.InputError, match="attention_mask"):
        graph_scoring.PaddedPairs.check({"input_ids": empty, "attention_mask": empty}, LIMITS)


def one_by_one(graph: Path, requests: list[graph_scoring.PaddedPairs]) -> list[NDArray[np.float32]]:
    """Score each row alone, cut to its length, in a session with ONNX Runtime's own settings."""
    session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
    found = []
    for pairs in requests:
        rows = [
            session.run(None, {name: a[row : row + 1, :length] for name, a in pairs.arrays.items()})[0]
            for row, length in enumerate(pairs.lengths)
        ]
        found.append(np.concatenate(rows))
    return found


RAGGED = ([12], [300, 5, 41], [64] * 9, [512, 6], [33, 32, 31, 7, 8, 200])


@pytest.mark.parametrize("family", ["bert", "xlm_roberta"])
@pytest.mark.parametrize(("threads", "budget"), [(1, 512), (2, 512), (2, 0), (4, 4096)])
def test_ragged_requests_together_score_like_each_row_alone(
    tiny: TinyModels, family: str, threads: int, budget: int
) -> None:
    graph, segments = tiny.graph(family), family == "bert"
    requests = [request(lengths, seed=i, width=512, segments=segments) for i, lengths in enumerate(RAGGED)]
    scorer = graph_scoring.GraphScorer(graph, threads=threads, tokens_per_run=budget)
    found = scorer.score(requests)
    assert [scores.shape for scores in found] == [(len(lengths), 1) for lengths in RAGGED]
    expected = one_by_one(graph, requests)
    assert np.concatenate(expected).std() > 0.1
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_requests_padded_to_different_widths_score_together(tiny: TinyModels) -> None:
    graph = tiny.graph("xlm_roberta")
    requests = [request([9, 20], width=32), request([9, 40], width=64, seed=1), request([6], width=6, seed=2)]
    found = graph_scoring.GraphScorer(graph, threads=1, tokens_per_run=512).score(requests)
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(one_by_one(graph, requests)), atol=1e-4)


def test_scores_follow_their_rows_when_rows_and_requests_change_places(tiny: TinyModels) -> None:
    scorer = graph_scoring.GraphScorer(tiny.graph("bert"), threads=2, tokens_per_run=512)
    first, second = request([40, 7, 90, 13], segments=True), request([25, 60], seed=1, segments=True)
    straight = scorer.score([first, second])
    order = [2, 0, 3, 1]
    mixed = graph_scoring.PaddedPairs.check({name: a[order] for name, a in first.arrays.items()}, LIMITS)
    swapped = scorer.score([second, mixed])
    np.testing.assert_allclose(swapped[0], straight[1], atol=1e-5)
    np.testing.assert_allclose(swapped[1], straight[0][order], atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "xlm_roberta"])
def test_int8_scores_are_the_same_bits_alone_and_in_a_crowd(tiny: TinyModels, family: str) -> None:
    scorer = graph_scoring.GraphScorer(tiny.int8_graph(family), threads=2, tokens_per_run=0)
    lengths = [40, 7, 300, 13, 40, 512, 5, 90]
    crowd = arrays(lengths, segments=family == "bert")
    together = scorer.score([graph_scoring.PaddedPairs.check(crowd, LIMITS)])[0]
    assert together.std() > 0.1
    for row, length in enumerate(lengths):
        for width in (length, 512):
            alone = {name: a[row : row + 1, :width] for name, a in crowd.items()}
            score = scorer.score([graph_scoring.PaddedPairs.check(alone, LIMITS)])[0]
            assert score.tobytes() == together[row : row + 1].tobytes()


def test_real_and_run_tokens_of_the_last_call_are_counted(tiny: TinyModels) -> None:
    scorer = graph_scoring.GraphScorer(tiny.graph("bert"), threads=1, tokens_per_run=100)
    scorer.score([request([40, 30], segments=True), request([20], segments=True)])
    assert scorer.real_tokens == 90
    assert scorer.run_tokens == 40 + 40 + 20


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1), ("9900000 100000", 8)],
)
def test_threads_are_the_affinity_cut_to_the_containers_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, threads: int
) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n", encoding="ascii")
    monkeypatch.setattr(graph_scoring, "Path", lambda _: tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert graph_scoring.available_threads() == threads


def test_threads_are_the_affinity_where_there_is_no_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(graph_scoring, "Path", lambda _: tmp_path / "no such file")
    own = os.sched_getaffinity(0)
    assert graph_scoring.available_threads() == len(own)
    os.sched_setaffinity(0, {min(own)})
    try:
        assert graph_scoring.available_threads() == 1
    finally:
        os.sched_setaffinity(0, own)
