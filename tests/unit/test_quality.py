# SPDX-License-Identifier: Apache-2.0
"""Measures of ranking equal those of SciPy, scikit-learn and the formula done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import bootstrap, kendalltau  # type: ignore[import-untyped]
from sklearn.metrics import ndcg_score  # type: ignore[import-untyped]

from build_engines.quality import bootstrap_interval, kendall_tau, ndcg_at_10, rank_order, reciprocal_rank


def test_ranks_go_from_the_highest_score_and_ties_keep_their_order() -> None:
    assert rank_order([0.5, 2.0, 0.5, -1.0, 2.0]).tolist() == [1, 4, 0, 2, 3]
    assert rank_order(np.zeros(300, np.float32)).tolist() == list(range(300))


@pytest.mark.parametrize("documents", [2, 5, 10, 11, 40])
def test_ndcg_equals_scikit_learn_with_exponential_gain(documents: int) -> None:
    rng = np.random.default_rng(documents)
    for _ in range(100):
        grades = rng.integers(0, 4, documents)
        scores = rng.normal(size=documents)
        expected = ndcg_score([2.0**grades - 1], [scores], k=10) if grades.any() else 0.0
        assert ndcg_at_10(scores, grades.tolist()) == pytest.approx(expected, abs=1e-9)


def test_ndcg_by_hand() -> None:
    # Ranked: grade 1 first, then 0, then 3; gains 1, 0, 7.
    found = ndcg_at_10([0.3, 0.9, 0.5], [3, 1, 0])
    assert found == pytest.approx((1 + 7 / math.log2(4)) / (7 + 1 / math.log2(3)))


def test_ndcg_counts_relevant_documents_that_are_no_candidates() -> None:
    assert ndcg_at_10([2.0, 1.0], [1, 0], all_relevant=[1, 1]) == pytest.approx(1 / (1 + 1 / math.log2(3)))


def test_ndcg_sees_the_first_ten_alone() -> None:
    scores = [float(-row) for row in range(20)]
    assert ndcg_at_10(scores, [0] * 10 + [1] * 10) == 0.0
    assert ndcg_at_10(scores, [0] * 20) == 0.0


def test_the_reciprocal_rank_is_that_of_the_first_relevant_document_among_ten() -> None:
    assert reciprocal_rank([0.1, 0.9, 0.5, 0.7], [1, 0, 2, 0]) == 1 / 3
    assert reciprocal_rank([1.0, 1.0, 1.0], [0, 1, 1]) == 1 / 2  # ties keep their order
    falling = [float(-row) for row in range(12)]
    assert reciprocal_rank(falling, [0] * 9 + [1] * 3) == 1 / 10
    assert reciprocal_rank(falling, [0] * 10 + [1] * 2) == 0.0
    assert reciprocal_rank([1.0], [0]) == 0.0


@pytest.mark.parametrize("queries", [12, 200])
def test_the_interval_of_a_mean_equals_that_of_scipys_bootstrap(queries: int) -> None:
    differences = np.random.default_rng(queries).exponential(size=queries) - 0.7
    expected = bootstrap(
        (differences,), np.mean, confidence_level=0.95, n_resamples=20_000, method="percentile", random_state=1
    ).confidence_interval
    low, high = bootstrap_interval(differences)
    width = expected.high - expected.low
    assert low == pytest.approx(expected.low, abs=0.06 * width)
    assert high == pytest.approx(expected.high, abs=0.06 * width)
    assert bootstrap_interval(differences) == (low, high), "the seed is fixed"


def test_the_interval_of_equal_differences_is_their_value() -> None:
    assert bootstrap_interval(np.full(7, 0.25)) == (0.25, 0.25)


@pytest.mark.parametrize("levels", [3, 1000])
def test_kendall_equals_scipy_with_and_without_ties(levels: int) -> None:
    rng = np.random.default_rng(levels)
    for _ in range(100):
        a, b = rng.integers(0, levels, (2, 12)).astype(np.float64)
        assert kendall_tau(a, b) == pytest.approx(kendalltau(a, b).statistic, abs=1e-9)


def test_kendall_of_constant_lists() -> None:
    assert kendall_tau([1, 1, 1], [5, 5, 5]) == 1.0
    assert kendall_tau([1, 1, 1], [1, 2, 3]) == 0.0
    assert kendall_tau([1], [2]) == 1.0
