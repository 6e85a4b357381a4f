# SPDX-License-Identifier: Apache-2.0
"""What a caller gets when all is well: order, scores, splitting. Both clients, on a real socket."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import threading
from collections.abc import Iterator
from typing import Any, assert_type

import grpc
import pytest
import triton_rerank
from triton_rerank import RankedDocument, RerankClient

from tests.unit.scripted_triton import ScriptedTriton, connect, score_of, serve, tokens_of

QUERY = "what is a panda?"


@pytest.fixture
def script() -> Iterator[ScriptedTriton]:
    script = ScriptedTriton(max_batch_size=64)
    with serve(script):
        yield script


def some_documents(count: int) -> list[str]:
    chance = random.Random(count)
    return [f"{row} " + "语 word é " * chance.randrange(40) for row in range(count)]


@pytest.mark.parametrize("count", [1, 2, 64, 65, 128, 1000])
async def test_every_document_gets_its_own_score_whatever_the_splits(
    kind: str, script: ScriptedTriton, count: int
) -> None:
    documents = some_documents(count)
    async with connect(kind, script.url) as client:
        hits = await client.rerank(QUERY, documents)
    assert {hit.index: hit.score for hit in hits} == {i: score_of(QUERY, d) for i, d in enumerate(documents)}
    assert [hit.document for hit in hits] == [documents[hit.index] for hit in hits]
    assert [(-hit.score, hit.index) for hit in hits] == sorted((-hit.score, hit.index) for hit in hits)
    assert all(hit.tokens == tokens_of(QUERY, hit.document) for hit in hits)
    assert all(hit.truncated == (hit.tokens > 16) for hit in hits)
    assert {hit.model_version for hit in hits} == {"1"}


@pytest.mark.parametrize("count", [1, 64, 65, 1000])
async def test_requests_are_as_few_as_possible_and_balanced(kind: str, script: ScriptedTriton, count: int) -> None:
    async with connect(kind, script.url) as client:
        await client.rerank(QUERY, some_documents(count))
    sizes = [len(request.pairs) for request in script.received]
    assert len(sizes) == math.ceil(count / 64)
    assert max(sizes) - min(sizes) <= 1


async def test_documents_of_similar_length_share_a_request(kind: str, script: ScriptedTriton) -> None:
    documents = some_documents(300)
    async with connect(kind, script.url) as client:
        await client.rerank(QUERY, documents)
    spans = sorted(
        (min(lengths), max(lengths))
        for lengths in ([len(document.encode()) for _, document in request.pairs] for request in script.received)
    )
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


async def test_scores_come_back_in_the_order_of_the_pairs(kind: str, script: ScriptedTriton) -> None:
    pairs = [(f"query {row % 7}", document) for row, document in enumerate(some_documents(200))]
    async with connect(kind, script.url) as client:
        assert await client.score(pairs) == [score_of(*pair) for pair in pairs]
        assert await client.score([]) == []
        assert await client.score([["a list", "is a pair too"]]) == [score_of("a list", "is a pair too")]


@pytest.mark.parametrize("normalize", [False, True])
async def test_saturated_sigmoids_do_not_decide_the_order(kind: str, script: ScriptedTriton, normalize: bool) -> None:
    logits = [9.0, 8.5, 8.0, 17.0, 18.0, 40.0, 41.0]
    async with connect(kind, script.url) as client:
        hits = await client.rerank(QUERY, [f"logit:{logit}" for logit in logits], normalize=normalize)
    assert [hit.index for hit in hits] == [6, 5, 4, 3, 0, 1, 2]
    expected = [logits[hit.index] for hit in hits]
    if normalize:
        expected = [1 / (1 + math.exp(-logit)) for logit in expected]
    assert [hit.score for hit in hits] == pytest.approx(expected, rel=1e-12)


async def test_sigmoid_of_extreme_logits_is_a_number(kind: str, script: ScriptedTriton) -> None:
    pairs = [("q", f"logit:{logit}") for logit in (-1e30, -800.0, 0.0, 800.0, 1e30)]
    async with connect(kind, script.url) as client:
        assert await client.score(pairs, normalize=True) == [0.0, 0.0, 0.5, 1.0, 1.0]


async def test_ties_keep_the_order_given(kind: str, script: ScriptedTriton) -> None:
    documents = [f"logit:{value}" for value in [1, 2, 1, 2] * 40]
    async with connect(kind, script.url) as client:
        order = [hit.index for hit in await client.rerank(QUERY, documents)]
    assert order == [*(i for i in range(160) if i % 2), *(i for i in range(160) if i % 2 == 0)]


async def test_top_n_shortens_the_list_and_may_exceed_it(kind: str, script: ScriptedTriton) -> None:
    documents = some_documents(10)
    async with connect(kind, script.url) as client:
        everything = await client.rerank(QUERY, documents)
        assert await client.rerank(QUERY, documents, top_n=3) == everything[:3]
        assert await client.rerank(QUERY, documents, top_n=99) == everything


async def test_no_documents_means_no_request(kind: str, script: ScriptedTriton) -> None:
    async with connect(kind, script.url) as client:
        assert await client.rerank(QUERY, [], top_n=5) == []
        assert await client.score([]) == []
    assert script.config_calls == 0


async def test_blank_documents_and_odd_characters_are_scored_in_place(kind: str, script: ScriptedTriton) -> None:
    documents = ["", "   ", "\t\n", "\u200b", "nul \x00\x00", "🐼" * 50, "</s>", "a\r\nb", ""]
    async with connect(kind, script.url) as client:
        hits = await client.rerank(QUERY, documents)
        assert {hit.index: hit.score for hit in hits} == {i: score_of(QUERY, d) for i, d in enumerate(documents)}
        zero_width = await client.rerank("\u200b", ["x"])
    assert zero_width[0].score == score_of("\u200b", "x")


async def test_a_hit_gives_back_the_callers_own_object(kind: str, script: ScriptedTriton) -> None:
    documents: list[Any] = [{"body": f"text {row}", "id": row} for row in range(70)]
    documents.append("a plain string")
    async with connect(kind, script.url, text_key="body") as client:
        hits = await client.rerank(QUERY, tuple(documents))
    assert all(hit.document is documents[hit.index] for hit in hits)
    assert {hit.index: hit.score for hit in hits} == {
        i: score_of(QUERY, d if isinstance(d, str) else d["body"]) for i, d in enumerate(documents)
    }


async def test_truncated_is_unknown_when_the_server_does_not_say(kind: str, script: ScriptedTriton) -> None:
    script.max_length = None
    async with connect(kind, script.url) as client:
        hits = await client.rerank(QUERY, ["word " * 500, "b"])
    assert [hit.truncated for hit in hits] == [None, None]


async def test_the_config_is_read_once_per_version_and_again_after_a_failure(kind: str, script: ScriptedTriton) -> None:
    script.versions = ("1", "2")
    script.config_faults.append((grpc.StatusCode.INTERNAL, "no config today"))
    async with connect(kind, script.url) as client:
        with pytest.raises(triton_rerank.ServerError, match="no config today"):
            await client.rerank(QUERY, ["a"])
        for _ in range(3):
            await client.rerank(QUERY, ["a"])
        assert script.config_calls == 2
        for version in (1, "1", 2, "2"):
            hits = await client.rerank(QUERY, ["a"], model_version=version)
            assert hits[0].model_version == str(version)
        assert script.config_calls == 4


async def test_a_model_loaded_anew_with_a_smaller_batch_fails_one_call_at_most(
    kind: str, script: ScriptedTriton
) -> None:
    documents = some_documents(64)
    async with connect(kind, script.url) as client:
        await client.rerank(QUERY, documents)
        script.max_batch_size = 8
        with pytest.raises(triton_rerank.InvalidRequest, match="batch-size must be <= 8"):
            await client.rerank(QUERY, documents)
        assert len(await client.rerank(QUERY, documents)) == 64


async def test_a_roll_out_in_the_middle_of_a_call_never_mixes_versions(kind: str, script: ScriptedTriton) -> None:
    script.versions = ("9", "10")
    script.max_batch_size = 8

    def answer_as_the_older_version_at_first(response: Any) -> None:
        if len(script.received) <= 3:
            response.model_version = "9"
            scores = bytes(len(response.raw_output_contents[0]))
            response.raw_output_contents[0] = scores

    script.alter = answer_as_the_older_version_at_first
    documents = some_documents(64)
    async with connect(kind, script.url, max_concurrent_requests=1) as client:
        hits = await client.rerank(QUERY, documents)
    assert {hit.model_version for hit in hits} == {"10"}
    assert {hit.index: hit.score for hit in hits} == {i: score_of(QUERY, d) for i, d in enumerate(documents)}
    assert [request.version for request in script.received] == [""] * 8 + ["10"] * 3


@pytest.mark.parametrize("limit", [1, 3])
async def test_no_more_requests_than_allowed_are_in_flight(kind: str, script: ScriptedTriton, limit: int) -> None:
    script.max_batch_size, script.delay_s = 2, 0.02
    async with connect(kind, script.url, max_concurrent_requests=limit) as client:
        await client.rerank(QUERY, some_documents(24))
    assert script.most_in_flight == limit


async def test_many_calls_at_once_through_one_client_do_not_mix(kind: str, script: ScriptedTriton) -> None:
    script.max_batch_size = 8

    async def one(number: int) -> None:
        documents = some_documents(10 + number)
        hits = await client.rerank(f"query {number}", documents)
        expected = {i: score_of(f"query {number}", d) for i, d in enumerate(documents)}
        assert {hit.index: hit.score for hit in hits} == expected

    async with connect(kind, script.url) as client:
        await asyncio.gather(*(one(number) for number in range(40)))


def test_a_hit_has_the_type_of_the_callers_documents(script: ScriptedTriton) -> None:
    with RerankClient(script.url, model="m") as client:
        assert_type(client.rerank(QUERY, ["a"]), list[RankedDocument[str]])
        assert_type(client.rerank(QUERY, [{"text": "a", "id": 1}]), list[RankedDocument[dict[str, object]]])
        assert_type(client.score([("q", "d")]), list[float])


def test_importing_opens_nothing_and_all_is_what_is_public() -> None:
    public = {
        name
        for name, value in vars(triton_rerank).items()
        if not name.startswith("_") and type(value).__name__ not in {"module", "_Feature"}
    }
    assert public | {"__version__"} == set(triton_rerank.__all__)
    assert all(getattr(triton_rerank, name) is not None for name in triton_rerank.__all__)


def test_building_a_client_needs_no_server_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with RerankClient("127.0.0.1:9", model="m"):
        assert threading.active_count() == before
