# SPDX-License-Identifier: Apache-2.0
"""The pure parts: how rows are split and named, and when a request is sent again."""

from __future__ import annotations

import pytest
from triton_rerank import InvalidRequest, ServerUnavailable
from triton_rerank._retry import RetryPolicy
from triton_rerank._split import row_spans, split_rows


def test_backoff_doubles_is_capped_and_never_passes_the_deadline() -> None:
    policy = RetryPolicy(max_retries=10**9)
    error = ServerUnavailable("down")
    assert [policy.delay_s(error, retries, 1e9, 1.0) for retries in range(4)] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert policy.delay_s(error, 10**6, 1e9, 1.0) == 5.0
    assert policy.delay_s(error, 3, 1e9, 0.0) == 0.0
    assert policy.delay_s(error, 3, 0.5, 1.0) is None
    assert policy.delay_s(InvalidRequest("no"), 0, 1e9, 0.5) is None
    assert RetryPolicy(0).delay_s(error, 0, 1e9, 0.5) is None


@pytest.mark.parametrize(("rows", "limit", "sizes"), [(0, 4, []), (4, 4, [4]), (5, 4, [2, 3]), (9, 4, [3, 3, 3])])
def test_rows_are_cut_into_the_fewest_balanced_requests(rows: int, limit: int, sizes: list[int]) -> None:
    requests = split_rows([7 * row % 5 for row in range(rows)], limit)
    assert [len(request) for request in requests] == sizes
    assert sorted(row for request in requests for row in request) == list(range(rows))


def test_the_longest_rows_are_sent_first() -> None:
    assert split_rows([1, 30, 2, 20], 2) == [(1, 3), (2, 0)]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([3, 1, 2, 9], "1-3, 9"),
        (range(0, 40, 2), "0, 2, 4, 6, 8, 10, 12, 14, ..."),
    ],
)
def test_rows_are_named_compactly(rows: list[int], text: str) -> None:
    assert row_spans(rows) == text
