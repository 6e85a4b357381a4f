# SPDX-License-Identifier: Apache-2.0
"""What the SDK raises when the real server refuses, is gone, or is too slow."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.grpc as triton
from triton_rerank import (
    AsyncRerankClient,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    RerankClient,
    ServerError,
    ServerUnavailable,
)

from build_engines.triton_server import ServerOptions, TritonInstallation, TritonServer
from tests.server.raw_requests import executions
from tests.server.served import BERT, LIGHT, Served
from tests.server.texts import QUERY, words

# A failure that takes longer than this was not noticed but timed out.
QUICKLY_S = 15.0


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[RerankClient]:
    with RerankClient(server.grpc_url, model=BERT) as client:
        yield client


@contextlib.contextmanager
def taking_at_most(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


@pytest.mark.parametrize("query", ["", "   ", "\t\n", None, 7, b"bytes"])
def test_a_query_that_is_no_text_to_search_for_is_refused(client: RerankClient, query: Any) -> None:
    with pytest.raises(InvalidRequest, match="query"):
        client.rerank(query, ["document"])


@pytest.mark.parametrize("documents", [None, 7, "one string", [None], [7], ["fine", None], [{"body": "text"}]])
def test_documents_that_are_no_list_of_texts_are_refused(client: RerankClient, documents: Any) -> None:
    with pytest.raises(InvalidRequest, match="documents"):
        client.rerank(QUERY, documents)


def test_no_documents_give_no_hits(client: RerankClient) -> None:
    assert client.rerank(QUERY, []) == []
    assert client.score([]) == []


def test_mappings_come_back_as_they_were_given(client: RerankClient) -> None:
    documents: list[dict[str, Any]] = [{"text": "a panda", "id": 1}, {"text": "a train", "id": 2}]
    hits = client.rerank(QUERY, documents)
    assert sorted(hit.document["id"] for hit in hits) == [1, 2]
    assert all(hit.document is documents[hit.index] and hit.model_version == "1" for hit in hits)


def test_an_unknown_model_is_named(server: TritonServer) -> None:
    with RerankClient(server.grpc_url, model="no_such_reranker") as client:
        with pytest.raises(ModelNotFound, match="no_such_reranker"):
            client.rerank(QUERY, ["document"])
        assert client.is_ready() is False


def test_an_unknown_version_is_named(client: RerankClient) -> None:
    with pytest.raises(ModelNotFound, match="version 7"):
        client.rerank(QUERY, ["document"], model_version=7)
    assert client.is_ready(model_version=7) is False
    assert client.is_ready(model_version=1) is True
    assert len(client.rerank(QUERY, ["document"], model_version=1)) == 1


@pytest.mark.parametrize("step", ["tokenizer", "scorer"])
def test_a_part_of_a_reranker_is_not_taken_for_one(server: TritonServer, step: str) -> None:
    with (
        RerankClient(server.grpc_url, model=f"{BERT}_{step}") as client,
        pytest.raises(ServerError, match="not a reranker"),
    ):
        client.rerank(QUERY, ["document"])


def test_a_deadline_that_is_too_short_is_kept(server: TritonServer) -> None:
    documents = [words(400, seed=row) for row in range(16)]
    with RerankClient(server.grpc_url, model=LIGHT) as client:
        client.rerank(QUERY, ["so that only scoring is timed"])
        with taking_at_most(2.0), pytest.raises(DeadlineExceeded, match=r"timeout_s 0\.05"):
            client.rerank(QUERY, documents, timeout_s=0.05)
        assert len(client.rerank(QUERY, ["still", "answers"])) == 2


async def test_a_deadline_that_is_too_short_is_kept_by_the_asynchronous_client(server: TritonServer) -> None:
    documents = [words(400, seed=row) for row in range(16)]
    async with AsyncRerankClient(server.grpc_url, model=LIGHT) as client:
        await client.rerank(QUERY, ["so that only scoring is timed"])
        with taking_at_most(2.0), pytest.raises(DeadlineExceeded, match=r"timeout_s 0\.05"):
            await client.rerank(QUERY, documents, timeout_s=0.05)


@pytest.fixture
def doomed(served: Served, installation: TritonInstallation) -> Iterator[TritonServer]:
    """A server of the test's own."""
    options = ServerOptions(repository=served.repository, models=(LIGHT,), config_name="cpu")
    with TritonServer(options, installation) as server:
        yield server


def test_a_server_killed_in_the_middle_of_a_call_is_noticed_at_once(doomed: TritonServer) -> None:
    documents = [words(300, seed=row) for row in range(1000)]
    killed_at: list[float] = []

    def kill() -> None:
        with triton.InferenceServerClient(doomed.grpc_url) as observer:
            while executions(observer, f"{LIGHT}_scorer")[1] < 2:
                time.sleep(0.02)
        os.kill(doomed.pid, signal.SIGKILL)
        killed_at.append(time.monotonic())

    with RerankClient(doomed.grpc_url, model=LIGHT, timeout_s=120) as client:
        client.rerank(QUERY, ["first use"])
        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(ServerUnavailable, match=r"documents .* of 1000"):
            client.rerank(QUERY, documents)
        killer.join()
        assert time.monotonic() - killed_at[0] < QUICKLY_S
        with taking_at_most(QUICKLY_S), pytest.raises(ServerUnavailable):
            client.rerank(QUERY, ["nobody is there"])


def test_a_client_finds_its_server_again_after_a_restart(doomed: TritonServer) -> None:
    url = doomed.grpc_url
    with RerankClient(url, model=LIGHT) as client:
        before = client.score([(QUERY, "a panda")])
        doomed.stop()
        assert client.is_ready() is False
        with taking_at_most(QUICKLY_S), pytest.raises(ServerUnavailable, match=url):
            client.rerank(QUERY, ["nobody is there"])
        options = ServerOptions(
            repository=doomed.options.repository,
            models=(LIGHT,),
            config_name="cpu",
            grpc_port=int(url.rpartition(":")[2]),
        )
        with TritonServer(options):
            assert _score_once_back(client) == pytest.approx(before, abs=1e-4)


def _score_once_back(client: RerankClient) -> list[float]:
    deadline = time.monotonic() + QUICKLY_S
    while True:
        try:
            return client.score([(QUERY, "a panda")])
        except ServerUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
