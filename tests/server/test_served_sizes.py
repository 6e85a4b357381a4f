# SPDX-License-Identifier: Apache-2.0
"""Any number of documents of any length, from any number of callers."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from triton_rerank import AsyncRerankClient, InvalidRequest, RankedDocument, RerankClient

from build_engines.triton_server import TritonServer
from tests.server.raw_requests import pairs, refusal
from tests.server.references import Reference, references
from tests.server.served import ALL, BERT, FP32, LIGHT, XLM_R, Served
from tests.server.texts import QUERY, mixed, words

LONG_QUERY = mixed(5000, seed=11)


def numbered(count: int, length: int = 4) -> list[str]:
    return [f"{row} {words(1 + row % length, seed=row)}" for row in range(count)]


def assert_ranked(hits: list[RankedDocument[str]], documents: list[str]) -> None:
    assert sorted(hit.index for hit in hits) == list(range(len(documents)))
    assert all(hit.document == documents[hit.index] for hit in hits)
    assert [(-hit.score, hit.index) for hit in hits] == sorted((-hit.score, hit.index) for hit in hits)


@pytest.mark.parametrize("count", [1, 64, 65, 1000])
@pytest.mark.parametrize("name", [XLM_R, BERT])
def test_many_documents_come_back_in_order_with_the_scores_they_have_alone(
    server: TritonServer, name: str, count: int
) -> None:
    documents = numbered(count, length=30)
    with RerankClient(server.grpc_url, model=name) as client:
        hits = client.rerank(QUERY, documents)
        assert_ranked(hits, documents)
        for hit in hits[:: max(1, count // 12)]:
            assert client.score([(QUERY, hit.document)]) == pytest.approx([hit.score], abs=1e-4)
        assert client.rerank(QUERY, documents, top_n=3) == hits[:3]


def test_int8_scores_of_a_split_call_are_those_of_each_document_alone(server: TritonServer) -> None:
    documents = numbered(130)
    with RerankClient(server.grpc_url, model="light_int8") as client:
        hits = client.rerank(QUERY, documents)
        assert_ranked(hits, documents)
        for hit in hits[::13]:
            assert client.score([(QUERY, hit.document)]) == [hit.score]


@pytest.mark.parametrize("name", ALL)
def test_one_row_more_than_a_request_may_have_is_refused_with_the_limit(grpc: Any, name: str) -> None:
    status, message = refusal(grpc, name, pairs([QUERY], ["document"] * 65))
    assert status == "INVALID_ARGUMENT"
    assert "batch-size must be <= 64" in message
    assert name in message


@pytest.mark.parametrize("name", FP32)
def test_sixteen_clients_at_once_all_get_their_own_answers(server: TritonServer, name: str) -> None:
    calls = [(f"{words(5, seed=n)}?", numbered(3 + n, length=20)) for n in range(16)]

    def ask(call: tuple[str, list[str]]) -> list[float]:
        with RerankClient(server.grpc_url, model=name) as client:
            return client.score([(call[0], document) for document in call[1]])

    with ThreadPoolExecutor(16) as threads:
        together = list(threads.map(ask, calls))
    for call, scores in zip(calls[::3], together[::3], strict=True):
        assert ask(call) == pytest.approx(scores, abs=1e-4)


async def test_sixteen_calls_of_one_asynchronous_client_all_get_their_own_answers(server: TritonServer) -> None:
    calls = [(f"{words(5, seed=n)}?", numbered(60 + n, length=20)) for n in range(16)]
    async with AsyncRerankClient(server.grpc_url, model=XLM_R) as client:
        together = await asyncio.gather(*(client.rerank(query, documents) for query, documents in calls))
        for (query, documents), hits in list(zip(calls, together, strict=True))[::5]:
            assert_ranked(hits, documents)
            again = await client.score([(query, hit.document) for hit in hits])
            assert again == pytest.approx([hit.score for hit in hits], abs=1e-4)


@pytest.fixture(scope="module")
def reference(served: Served) -> dict[str, Reference]:
    return references(served)


@pytest.mark.parametrize("name", FP32)
def test_a_query_of_thousands_of_tokens_is_cut_and_said_to_be(
    server: TritonServer, reference: dict[str, Reference], name: str
) -> None:
    assert reference[name].tokens(LONG_QUERY, "short") > 5000
    documents = ["short", mixed(3000, seed=12)]
    with RerankClient(server.grpc_url, model=name) as client:
        hits = client.rerank(LONG_QUERY, documents)
        (fits,) = client.rerank(QUERY, ["short"])
    for hit in hits:
        assert math.isfinite(hit.score)
        assert hit.truncated is True
        assert hit.tokens == reference[name].tokens(LONG_QUERY, hit.document)
    assert fits.truncated is False
    assert fits.tokens == reference[name].tokens(QUERY, "short")


@pytest.mark.parametrize("name", ALL)
def test_blank_and_huge_documents_are_scored_and_kept_in_place(server: TritonServer, name: str) -> None:
    documents = ["", "   ", "\t\n", "\u200b", "\0", (words(50, seed=13) + " ") * 400, "plain"]
    assert len(documents[5]) > 100_000
    with RerankClient(server.grpc_url, model=name) as client:
        hits = client.rerank(QUERY, documents)
        assert_ranked(hits, documents)
        assert all(math.isfinite(hit.score) for hit in hits)
        assert [hit.index for hit in hits if hit.truncated] == [5]
        by_index = {hit.index: hit for hit in hits}
        assert by_index[0].score == pytest.approx(by_index[1].score, abs=1e-4), "spaces are no tokens"
        assert by_index[0].tokens < by_index[6].tokens


def test_a_document_above_the_limit_is_refused_with_its_row_and_the_limit(server: TritonServer) -> None:
    documents = ["first", "x" * 400_001]
    with RerankClient(server.grpc_url, model=LIGHT) as client:
        with pytest.raises(InvalidRequest, match="DOCUMENT in row 0 has 400001 bytes; at most 400000 are allowed"):
            client.rerank(QUERY, documents[::-1])
        assert len(client.rerank(QUERY, [documents[0], documents[1][1:]])) == 2
