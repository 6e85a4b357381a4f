# SPDX-License-Identifier: Apache-2.0
"""What is refused before anything is sent, and with which words. Both clients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from triton_rerank import InvalidRequest, Keepalive, RerankClient, RerankError

from tests.unit.scripted_triton import ScriptedTriton, connect, serve

GOOD = ["a document"]
SURROGATE = "broken \ud83d text"


@pytest.fixture(scope="module")
def script() -> Iterator[ScriptedTriton]:
    script = ScriptedTriton()
    with serve(script):
        yield script


@pytest.mark.parametrize(
    ("query", "documents", "says"),
    [
        (None, GOOD, "query must be a string, got None (NoneType)"),
        (7, GOOD, "query must be a string, got 7 (int)"),
        (b"bytes", GOOD, "query must be a string, got b'bytes' (bytes)"),
        (["a query"], GOOD, "query must be a string"),
        ("", GOOD, "query is blank"),
        (" \t\n\u3000", GOOD, "query is blank"),
        (SURROGATE, GOOD, "query cannot be sent as UTF-8: character 7 is the lone surrogate U+D83D"),
        ("q", "one document", "documents must be a list of strings or mappings, got one string"),
        ("q", None, "documents must be a list or tuple"),
        ("q", 3, "got 3 (int)"),
        ("q", b"bytes", "documents must be a list or tuple"),
        ("q", {"text": "a"}, "documents must be a list or tuple"),
        ("q", {"a", "b"}, "(set); try list(...)"),
        ("q", (d for d in GOOD), "(generator); try list(...)"),
        ("q", ["a", None], "documents[1] must be a string, or a mapping with the key 'text', got None"),
        ("q", ["a", 3.5], "documents[1] must be a string"),
        ("q", ["a", b"b"], "documents[1] must be a string"),
        ("q", ["a", ["b"]], "documents[1] must be a string"),
        ("q", ["a", {"title": "b", "body": "c"}], "documents[1] has no key 'text'; its keys are: ['title', 'body']"),
        ("q", ["a", {SURROGATE: "b"}], "documents[1] has no key 'text'"),
        ("q", ["a", {}], "documents[1] has no key 'text'; its keys are: []"),
        ("q", ["a", {"text": None}], "documents[1]['text'] must be a string, got None"),
        ("q", ["a", {"text": SURROGATE}], "documents[1]['text'] cannot be sent as UTF-8"),
        ("q", ["a", "b", SURROGATE], "documents[2] cannot be sent as UTF-8: character 7"),
    ],
)
async def test_bad_texts_are_refused(kind: str, script: ScriptedTriton, query: Any, documents: Any, says: str) -> None:
    async with connect(kind, script.url) as client:
        await refused(client.rerank(query, documents), says)
    assert script.config_calls == 0


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ("ab", "pairs must be a list of (query, document) tuples, got one string"),
        (None, "pairs must be a list or tuple"),
        (["ab"], "pairs[0] must be a (query, document) tuple of two strings, got 'ab'"),
        ([("q", "d"), ("q", "d", "e")], "pairs[1] must be"),
        ([("q", None)], "the document of pairs[0] must be a string, got None"),
        ([("q", {"text": "d"})], "the document of pairs[0] must be a string"),
        ([(" ", "d")], "the query of pairs[0] is blank"),
        ([("q", SURROGATE)], "the document of pairs[0] cannot be sent as UTF-8"),
    ],
)
async def test_bad_pairs_are_refused(kind: str, script: ScriptedTriton, pairs: Any, says: str) -> None:
    async with connect(kind, script.url) as client:
        await refused(client.score(pairs), says)
    assert script.config_calls == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"top_n": 0}, "top_n must be a whole number of at least 1, got 0 (int)"),
        ({"top_n": -1}, "top_n"),
        ({"top_n": True}, "got True (bool)"),
        ({"top_n": 2.0}, "got 2.0 (float)"),
        ({"top_n": "3"}, "got '3' (str)"),
        ({"timeout_s": 0}, "timeout_s must be a finite number of seconds above 0"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"timeout_s": math.inf}, "timeout_s"),
        ({"timeout_s": math.nan}, "timeout_s"),
        ({"timeout_s": "5"}, "timeout_s"),
        ({"timeout_s": True}, "timeout_s"),
        ({"model_version": 0}, "model_version must be a whole number from 1"),
        ({"model_version": "latest"}, "got 'latest' (str)"),
        ({"model_version": ""}, "model_version"),
        ({"model_version": True}, "model_version"),
        ({"model_version": 1.0}, "model_version"),
    ],
)
async def test_bad_settings_of_a_call_are_refused(
    kind: str, script: ScriptedTriton, settings: dict[str, Any], says: str
) -> None:
    async with connect(kind, script.url) as client:
        await refused(client.rerank("q", GOOD, **settings), says)
        await refused(client.rerank("q", [], **settings), says)
    assert script.config_calls == 0


async def refused(call: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await call
    assert says in str(caught.value)
    assert isinstance(caught.value, ValueError)
    str(caught.value).encode()  # a message must be printable even where the text was not


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"url": "http://localhost:8001"}, "leave out any http://"),
        ({"url": "localhost"}, "host:port"),
        ({"url": ""}, "host:port"),
        ({"url": None}, "host:port"),
        ({"url": "a b:8001"}, "host:port"),
        ({"model": ""}, "model must be the name"),
        ({"model": None}, "model must be the name"),
        ({"text_key": 3}, "text_key"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"max_retries": -1}, "max_retries must be a whole number of at least 0"),
        ({"max_concurrent_requests": 0}, "max_concurrent_requests must be a whole number of at least 1"),
        ({"headers": {"bad name": "v"}}, "the name 'bad name'"),
        ({"headers": {"grpc-timeout": "1S"}}, "must not begin with grpc-"),
        ({"headers": {"x-bin": "v"}}, "must not end in -bin"),
        ({"headers": [("a", "b")]}, "headers must map names to values"),
        ({"bearer_token": ""}, "bearer_token"),
        ({"bearer_token": "t", "headers": {"Authorization": "Basic x"}}, "not both"),
    ],
)
def test_a_client_cannot_be_built_wrong(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RerankClient(**{"url": "localhost:8001", "model": "m", **settings})
    assert says in str(caught.value)


@pytest.mark.parametrize("settings", [{"time_s": 0.0}, {"timeout_s": math.inf}])
def test_keepalive_cannot_be_built_wrong(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="keepalive"):
        Keepalive(**settings)


@pytest.mark.parametrize("url", ["localhost:8001", "127.0.0.1:1", "[::1]:8001", "triton.example.com:443", "a-b:80"])
def test_usual_urls_are_taken(url: str) -> None:
    RerankClient(url, model="m").close()


async def test_the_whole_tree_is_caught_by_its_root(kind: str, script: ScriptedTriton) -> None:
    async with connect(kind, script.url) as client:
        with pytest.raises(RerankError):
            await client.rerank("", GOOD)


async def test_a_huge_wrong_argument_gives_a_short_message(kind: str, script: ScriptedTriton) -> None:
    async with connect(kind, script.url) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.rerank(SimpleNamespace(text="x" * 10**6), GOOD)
    assert len(str(caught.value)) < 300
