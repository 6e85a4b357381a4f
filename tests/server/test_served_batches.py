# SPDX-License-Identifier: Apache-2.0
"""Requests of many callers are scored together, and each still gets its own answer or its own error."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from triton_rerank import AsyncRerankClient, RerankClient
from tritonclient.utils import InferenceServerException

from build_engines.triton_server import TritonServer
from tests.server.metrics_page import read_metrics
from tests.server.raw_requests import arrays, executions, pairs, scores, scores_at_once
from tests.server.served import BERT, INT8, LIGHT, XLM_R
from tests.server.texts import QUERY, mixed, words

_CROWD = 8
_ATTEMPTS = 10
_seeds = itertools.count()


def _long_work() -> list[Any]:
    """Keep a tokenizer busy for long enough that what is sent right after it waits and is taken together.

    New texts every time: those it has seen take no time at all.
    """
    return pairs([QUERY], [mixed(6_000, seed=next(_seeds)) for _ in range(14)])


@pytest.mark.parametrize("name", [XLM_R, BERT, INT8])
@pytest.mark.parametrize(("query", "document"), [(QUERY, b"\xff"), (b"caf\xe9", "d"), (" \n", "d")])
def test_a_bad_request_in_a_merged_batch_is_the_only_one_refused(
    grpc: Any, name: str, query: str | bytes, document: str | bytes
) -> None:
    good = [pairs([QUERY], [words(3 + n, seed=n)]) for n in range(_CROWD - 1)]
    alone = [scores(grpc, name, request) for request in good]
    crowd = [*good[:4], pairs([query], [document]), *good[4:]]
    answers = _merged(grpc, name, f"{name}_tokenizer", _long_work, crowd)
    refused = answers.pop(4)
    assert isinstance(refused, InferenceServerException)
    assert refused.status() == "StatusCode.INVALID_ARGUMENT"
    assert "in row 0" in refused.message()
    assert answers == [pytest.approx(expected, abs=0 if name == INT8 else 1e-4) for expected in alone]


def test_bad_arrays_in_a_merged_batch_are_the_only_ones_refused(grpc: Any) -> None:
    name = f"{BERT}_scorer"
    work = arrays(*([[value] * 512] * 64 for value in (7, 1, 0)))
    good = [arrays([[2, *[7] * n, 3]], [[1] * (n + 2)], [[0] * (n + 2)]) for n in range(_CROWD - 1)]
    alone = [scores(grpc, name, request) for request in good]
    crowd = [*good[:4], arrays([[0, 2, 3]], [[0, 1, 1]], [[0, 0, 0]]), *good[4:]]
    answers = _merged(grpc, name, name, lambda: work, crowd)
    refused = answers.pop(4)
    assert isinstance(refused, InferenceServerException)
    assert "row 0 is [0 1 1]" in refused.message()
    assert answers == [pytest.approx(expected, abs=1e-4) for expected in alone]


async def test_single_documents_of_64_callers_are_scored_in_batches(grpc: Any, server: TritonServer) -> None:
    documents = [words(25 + row % 20, seed=row) for row in range(64)]
    async with AsyncRerankClient(server.grpc_url, model=LIGHT) as client:
        alone = [await client.rerank(QUERY, [document]) for document in documents]
        assert {40 <= hits[0].tokens <= 60 for hits in alone} == {True}
        before = executions(grpc, f"{LIGHT}_scorer")
        together = await asyncio.gather(*(client.rerank(QUERY, [document]) for document in documents))
    rows, runs = (after - earlier for after, earlier in zip(executions(grpc, f"{LIGHT}_scorer"), before, strict=True))
    assert rows == 64
    assert rows / runs >= 4
    assert [hits[0].score for hits in together] == pytest.approx([hits[0].score for hits in alone], abs=1e-4)


def test_little_is_lost_to_padding_when_short_and_long_documents_come_together(server: TritonServer) -> None:
    documents = [words(400 if row % 2 else 10, seed=row) for row in range(64)]
    before = read_metrics(server)
    with RerankClient(server.grpc_url, model=LIGHT) as client:
        hits = client.rerank("what is a giant panda", documents)
    tokens = sorted(hit.tokens for hit in hits)
    assert tokens[31] < 25
    assert tokens[32] > 390
    grown = read_metrics(server).minus(before)
    real = grown.of("rerank_real_tokens_total", f"{LIGHT}_scorer")
    assert real == sum(tokens)
    assert 1 <= grown.of("rerank_run_tokens_total", f"{LIGHT}_scorer") / real <= 1.3


def test_int8_runs_no_padding_at_all(server: TritonServer) -> None:
    before = read_metrics(server)
    with RerankClient(server.grpc_url, model=INT8) as client:
        hits = client.rerank(QUERY, [words(5 + 7 * row, seed=row) for row in range(16)])
    grown = read_metrics(server).minus(before)
    for metric in ("rerank_real_tokens_total", "rerank_run_tokens_total"):
        assert grown.of(metric, f"{INT8}_scorer") == sum(hit.tokens for hit in hits)


def _merged(grpc: Any, name: str, step: str, make_work: Callable[[], list[Any]], crowd: list[list[Any]]) -> list[Any]:
    """Send `crowd` while `step` is busy with what `make_work` makes, until it has taken it in three batches at most.

    Triton prepares up to two batches while one is executed, so that the first of the crowd may go ahead of the rest.
    """
    for _ in range(_ATTEMPTS):
        work = make_work()
        _, before = executions(grpc, step)
        first, *answers = scores_at_once(grpc, [(name, work), *((name, request) for request in crowd)])
        assert isinstance(first, list), first
        _, after = executions(grpc, step)
        if after - before <= 4:
            return answers
    raise AssertionError(f"{step} never took {len(crowd)} requests that waited for it in a few batches")
