# SPDX-License-Identifier: Apache-2.0
"""Requests reach the right profile of a plan, padded and in batches it takes, and the scores come back in order.

In the place of a GPU stands a runner that, like an engine, refuses shapes outside its active profile and overwrites the
scores it gave before. tests/gpu runs real plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from build_engines.errors import EngineError
from build_engines.plan_scoring import WARM_UP_RUNS, PlanScorer, check_profiles
from build_engines.serving_code import graph_scoring

PLAN = Path("model.plan")
BUCKETS = (8, 16, 64)
MAX_BATCH = 4
Arrays = dict[str, NDArray[np.int64]]


class PretendedRunner:
    """Scores a row by its ids, their places and its segments; padding that is not masked changes the score."""

    def __init__(self) -> None:
        self.profile = 0
        self.active = True
        self.profiles: list[int] = []
        self.shapes: list[tuple[int, int]] = []
        self.feeds: list[Arrays] = []
        self.seconds: list[float] = []
        self._scores = np.zeros((MAX_BATCH, 1), np.float32)

    def open(self, plan: Path, buckets: Sequence[int], max_batch: int) -> PretendedRunner:
        assert (plan, tuple(buckets), max_batch) == (PLAN, BUCKETS, MAX_BATCH)
        return self

    def set_profile(self, index: int) -> None:
        self.profile = index
        self.profiles.append(index)

    def infer(self, feed_dict: Arrays) -> dict[str, NDArray[np.float32]]:
        (shape,) = {array.shape for array in feed_dict.values()}
        assert 1 <= shape[0] <= MAX_BATCH
        assert shape[1] == BUCKETS[self.profile]
        assert {array.dtype for array in feed_dict.values()} == {np.dtype(np.int64)}
        self.shapes.append((shape[0], shape[1]))
        self.feeds.append(feed_dict)
        self._scores[: shape[0], 0] = scores_of(feed_dict)
        return {"SCORE": self._scores[: shape[0]]}

    def last_inference_time(self) -> float:
        return self.seconds[len(self.feeds) - 1]

    def activate(self) -> None:
        self.active = True

    def deactivate(self) -> None:
        self.active = False


def scores_of(arrays: Arrays) -> NDArray[np.float32]:
    places = np.arange(1, arrays["input_ids"].shape[1] + 1)
    terms = arrays["input_ids"] * places + 1000 * arrays["token_type_ids"] * places
    return np.asarray((terms * arrays["attention_mask"]).sum(axis=1), dtype=np.float32)


def request(lengths: list[int], width: int, seed: int = 0) -> graph_scoring.PaddedPairs:
    """Rows of random ids on the left of `width` columns; the padding holds 1, as XLM-R's does."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(width) < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.where(mask == 1, rng.integers(5, 300, mask.shape), 1)
    arrays = {"input_ids": ids, "attention_mask": mask, "token_type_ids": rng.integers(0, 2, mask.shape) * mask}
    return graph_scoring.PaddedPairs(arrays, np.array(lengths))


@pytest.fixture
def runner() -> PretendedRunner:
    return PretendedRunner()


@pytest.fixture
def scorer(runner: PretendedRunner) -> PlanScorer:
    return PlanScorer(PLAN, BUCKETS, MAX_BATCH, open_plan=runner.open)


@pytest.mark.parametrize(
    ("lengths", "width", "bucket"),
    [([3], 3, 8), ([8, 2], 8, 8), ([9], 9, 16), ([5, 16], 64, 16), ([17, 4], 17, 64), ([64], 64, 64), ([6], 100, 8)],
)
def test_a_request_is_cut_or_padded_to_the_smallest_bucket_that_holds_its_longest_row(
    scorer: PlanScorer, runner: PretendedRunner, lengths: list[int], width: int, bucket: int
) -> None:
    pairs = request(lengths, width)
    (found,) = scorer.score([pairs])
    assert runner.shapes == [(len(lengths), bucket)]
    assert found[:, 0].tolist() == scores_of(pairs.arrays).tolist()
    shared = min(width, bucket)
    for name, array in runner.feeds[0].items():
        assert np.array_equal(array[:, :shared], pairs.arrays[name][:, :shared])
        assert not array[:, shared:].any()


@pytest.mark.parametrize(
    ("pairs", "batches"), [(1, [1]), (3, [3]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (11, [4, 4, 3])]
)
def test_more_pairs_than_a_batch_takes_run_in_several_and_keep_their_order(
    scorer: PlanScorer, runner: PretendedRunner, pairs: int, batches: list[int]
) -> None:
    rows = request([5 + row % 4 for row in range(pairs)], 8)
    (found,) = scorer.score([rows])
    assert [batch for batch, _ in runner.shapes] == batches
    assert found.dtype == np.float32
    assert found.shape == (pairs, 1)
    assert found[:, 0].tolist() == scores_of(rows.arrays).tolist()


def test_each_request_has_its_own_bucket_and_gets_its_own_scores(scorer: PlanScorer, runner: PretendedRunner) -> None:
    requests = [request([40, 7], 64, 1), request([4] * 6, 8, 2), request([6, 6], 8, 3), request([12], 16, 4)]
    found = scorer.score(requests)
    assert runner.shapes == [(2, 64), (4, 8), (2, 8), (2, 8), (1, 16)]
    assert [scores[:, 0].tolist() for scores in found] == [scores_of(pairs.arrays).tolist() for pairs in requests]


def test_the_profile_changes_only_with_the_bucket(scorer: PlanScorer, runner: PretendedRunner) -> None:
    scorer.score([request([4] * 9, 8), request([8], 8), request([60], 64), request([64], 64), request([2], 8)])
    assert runner.profiles == [0, 2, 0]


def test_scores_given_before_are_not_overwritten_by_later_ones(scorer: PlanScorer) -> None:
    (first,) = scorer.score([request([5, 6], 8, 1)])
    kept = first.copy()
    scorer.score([request([7, 8], 8, 2)])
    assert np.array_equal(first, kept)


def test_a_row_longer_than_the_last_bucket_is_refused(scorer: PlanScorer) -> None:
    with pytest.raises(EngineError, match="A row has 65 tokens; the plan's longest bucket has 64"):
        scorer.score([request([3, 65], 65)])


def test_the_time_of_a_batch_is_the_median_of_the_runs_after_the_warm_up(
    scorer: PlanScorer, runner: PretendedRunner
) -> None:
    runner.seconds = [50.0] * WARM_UP_RUNS + [0.3, 0.1, 40.0, 0.2, 0.1]
    pairs = request([5, 14], 16)
    assert scorer.seconds_per_batch(pairs, bucket=64, batch=3, runs=5) == 0.2
    assert runner.shapes == [(3, 64)] * (WARM_UP_RUNS + 5)
    assert np.array_equal(runner.feeds[0]["input_ids"][:, :16], pairs.arrays["input_ids"][[0, 1, 0]])


def test_leaving_the_scorer_frees_the_gpu(runner: PretendedRunner) -> None:
    with PlanScorer(PLAN, BUCKETS, MAX_BATCH, open_plan=runner.open):
        assert runner.active
    assert not runner.active


@pytest.mark.parametrize(
    "profiles",
    [[(4, 8), (4, 16)], [(4, 8), (4, 16), (4, 32)], [(8, 8), (8, 16), (8, 64)], [(4, 16), (4, 8), (4, 64)]],
)
def test_a_plan_for_other_buckets_or_batches_is_refused(profiles: list[tuple[int, int]]) -> None:
    check_profiles(PLAN, engine_of([(4, 8), (4, 16), (4, 64)]), BUCKETS, MAX_BATCH)
    with pytest.raises(EngineError, match=r"rerankers.toml says \[\(4, 8\), \(4, 16\), \(4, 64\)\]. Build it again"):
        check_profiles(PLAN, engine_of(profiles), BUCKETS, MAX_BATCH)


def engine_of(largest: list[tuple[int, int]]) -> SimpleNamespace:
    """What TensorRT's engine says of its profiles: the smallest, the usual and the largest shape of an input."""
    shapes = [((1, length), (2, length), (batch, length)) for batch, length in largest]
    return SimpleNamespace(
        num_optimization_profiles=len(shapes),
        get_tensor_profile_shape=lambda name, index: shapes[index] if name == "input_ids" else None,
    )
