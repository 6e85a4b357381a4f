# SPDX-License-Identifier: Apache-2.0
"""What a caller gets when something goes wrong: the kind, the text, the retries, the one deadline."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import grpc
import pytest
from triton_rerank import (
    AuthenticationError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RerankClient,
    RerankError,
    ServerError,
    ServerUnavailable,
)
from triton_rerank._errors import BY_STATUS
from tritonclient.utils import InferenceServerException

from tests.unit.scripted_triton import NOT_READY, QUEUE_FULL, ScriptedTriton, connect, score_of, serve

QUERY = "what is a panda?"
DOCUMENTS = [f"document {row}" for row in range(10)]


async def failure(client: Any, *args: Any, **settings: Any) -> RerankError:
    with pytest.raises(RerankError) as caught:
        await client.rerank(*(args or (QUERY, DOCUMENTS)), **settings)
    return caught.value


def test_every_grpc_status_has_its_exception() -> None:
    assert set(BY_STATUS) == set(grpc.StatusCode)


@pytest.mark.parametrize("status", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
async def test_a_status_on_the_wire_becomes_its_exception(
    kind: str, script: ScriptedTriton, status: grpc.StatusCode
) -> None:
    script.fault_for = lambda pairs: (status, "the server's own words")
    async with connect(kind, script.url, max_retries=0) as client:
        error = await failure(client)
    assert type(error) is BY_STATUS[status]
    assert isinstance(error.__cause__, InferenceServerException)
    for part in ("the server's own words", script.url, "model 'm'", "scoring documents", type(error).advice):
        assert part in str(error)
    assert "\n" not in str(error)


async def test_unknown_models_and_versions_are_not_found(kind: str, script: ScriptedTriton) -> None:
    async with connect(kind, script.url, model="nobody") as client:
        error = await failure(client)
        assert isinstance(error, ModelNotFound)
        assert "unknown model: 'nobody'" in str(error)
        assert not await client.is_ready()
    async with connect(kind, script.url) as client:
        error = await failure(client, model_version=7)
        assert isinstance(error, ModelNotFound)
        assert "version 7" in str(error)
        assert not await client.is_ready(model_version=7)
        assert await client.is_ready(model_version=1)
        assert await client.is_ready()
        script.ready = False
        assert not await client.is_ready()


async def test_a_version_that_goes_away_after_the_config_was_read_is_not_found(
    kind: str, script: ScriptedTriton
) -> None:
    async with connect(kind, script.url) as client:
        await client.rerank(QUERY, DOCUMENTS, model_version=1)
        script.versions = ("2",)
        assert isinstance(await failure(client, model_version=1), ModelNotFound)


async def test_a_server_that_is_down_is_unavailable_and_found_again_when_it_is_back(kind: str) -> None:
    script = ScriptedTriton()
    with serve(script):
        port = int(script.url.rpartition(":")[2])
    async with connect(kind, script.url, max_retries=1, timeout_s=10) as client:
        error = await failure(client)
        assert type(error) is ServerUnavailable
        assert "2 attempts" in str(error)
        assert not await client.is_ready()
        with serve(script, port=port):
            end_s = time.monotonic() + 10
            while not await client.is_ready() and time.monotonic() < end_s:
                await asyncio.sleep(0.05)
            assert len(await client.rerank(QUERY, DOCUMENTS)) == 10


async def test_a_server_that_dies_in_the_middle_of_a_call_is_unavailable(kind: str) -> None:
    script = ScriptedTriton(closed_gate=True)
    with serve(script) as server:
        async with connect(kind, script.url, max_retries=1, timeout_s=20) as client:
            call = asyncio.ensure_future(failure(client))
            while script.in_flight < 3:
                await asyncio.sleep(0.01)
            server.stop(grace=None)
            error = await call
    assert type(error) is ServerUnavailable
    assert "documents" in str(error)


@pytest.mark.parametrize("fault", [QUEUE_FULL, NOT_READY, (grpc.StatusCode.UNAVAILABLE, "Request timeout expired")])
async def test_unavailable_then_well_is_a_success(kind: str, script: ScriptedTriton, fault: Any) -> None:
    script.config_faults.append(fault)
    script.infer_faults.extend([fault, fault])
    async with connect(kind, script.url, max_retries=2) as client:
        hits = await client.rerank(QUERY, DOCUMENTS)
    assert {hit.index: hit.score for hit in hits} == {i: score_of(QUERY, d) for i, d in enumerate(DOCUMENTS)}
    assert len(script.received) == 3 + 2


async def test_a_full_queue_is_overload_and_a_missing_model_is_not(kind: str, script: ScriptedTriton) -> None:
    async with connect(kind, script.url, max_retries=1) as client:
        script.fault_for = lambda pairs: QUEUE_FULL
        assert type(await failure(client)) is Overloaded
        script.fault_for = lambda pairs: NOT_READY
        assert type(await failure(client)) is ServerUnavailable


@pytest.mark.parametrize("status", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL])
async def test_what_cannot_get_better_is_sent_once(kind: str, script: ScriptedTriton, status: Any) -> None:
    script.fault_for = lambda pairs: (status, "no")
    async with connect(kind, script.url, max_retries=5) as client:
        await failure(client, QUERY, ["one"])
    assert len(script.received) == 1


async def test_a_failing_request_names_its_documents_and_the_others_are_cancelled(
    kind: str, script: ScriptedTriton
) -> None:
    documents = ["x" * (100 - row) for row in range(12)]  # longest first: requests are rows 0-3, 4-7, 8-11
    script.closed_gate, script.fail_when_in_flight = True, 3
    script.fault_for = lambda pairs: (grpc.StatusCode.INTERNAL, "bad row") if (QUERY, documents[5]) in pairs else None
    async with connect(kind, script.url, timeout_s=20, max_concurrent_requests=3) as client:
        error = await failure(client, QUERY, documents)
    assert type(error) is ServerError
    assert "documents 4-7 (4 of 12)" in str(error)
    end_s = time.monotonic() + 10
    while script.cancelled < 2 and time.monotonic() < end_s:
        await asyncio.sleep(0.01)
    assert script.cancelled == 2


async def test_a_slow_server_ends_in_the_deadline(kind: str, script: ScriptedTriton) -> None:
    script.delay_s = 30
    async with connect(kind, script.url, timeout_s=30) as client:
        started_s = time.monotonic()
        error = await failure(client, timeout_s=0.3)
        assert time.monotonic() - started_s < 5
    assert isinstance(error, DeadlineExceeded)
    assert isinstance(error, TimeoutError)
    assert "timeout_s 0.3" in str(error)


async def test_many_splits_share_one_deadline(kind: str, script: ScriptedTriton) -> None:
    script.max_batch_size, script.delay_s = 1, 0.2
    async with connect(kind, script.url, max_concurrent_requests=2) as client:
        started_s = time.monotonic()
        error = await failure(client, QUERY, ["d"] * 200, timeout_s=1.0)  # 20 s of work
        assert time.monotonic() - started_s < 5
    assert isinstance(error, DeadlineExceeded)
    remaining = [request.remaining_s for request in script.received if request.remaining_s is not None]
    assert max(remaining) <= 1.05
    assert min(remaining) < 0.7


async def test_retries_end_before_the_deadline(kind: str, script: ScriptedTriton) -> None:
    script.fault_for = lambda pairs: QUEUE_FULL
    async with connect(kind, script.url, max_retries=10**6) as client:
        started_s = time.monotonic()
        error = await failure(client, QUERY, ["d"], timeout_s=0.5)
        assert time.monotonic() - started_s < 5
    assert isinstance(error, (Overloaded, DeadlineExceeded))


@pytest.mark.parametrize(
    ("alter", "says"),
    [
        (lambda response: response.outputs.pop(0), "SCORE"),
        (lambda response: response.raw_output_contents.pop(1), "TOKENS"),
        (lambda response: response.outputs[0].ClearField("shape"), "SCORE"),
        (lambda response: setattr(response.outputs[0], "datatype", "INT32"), "SCORE must be float32"),
        (lambda response: response.outputs[1].shape.append(1), "TOKENS must be int32"),
        (
            lambda response: response.raw_output_contents.__setitem__(0, b"\0\0\xc0\x7f" * 4),
            "documents 0-3 (4 of 4) are not finite",
        ),
        (
            lambda response: response.raw_output_contents.__setitem__(0, b"\0\0\x80\xff" * 4),
            "documents 0-3 (4 of 4) are not finite",
        ),
    ],
)
async def test_an_answer_outside_the_contract_is_a_server_error(
    kind: str, script: ScriptedTriton, alter: Any, says: str
) -> None:
    script.alter = alter
    async with connect(kind, script.url) as client:
        error = await failure(client, QUERY, ["a", "b", "c", "d"])
    assert type(error) is ServerError
    assert says in str(error)
    assert script.url in str(error)


@pytest.mark.parametrize(
    ("alter", "says"),
    [
        (lambda config: config.ClearField("input"), "not a reranker"),
        (lambda config: setattr(config.output[0], "name", "logits"), "not a reranker"),
        (lambda config: setattr(config, "max_batch_size", 0), "does not batch"),
        (lambda config: setattr(config.parameters["max_length"], "string_value", "many"), "'many'"),
    ],
)
async def test_a_model_that_is_no_reranker_is_a_server_error(
    kind: str, script: ScriptedTriton, alter: Any, says: str
) -> None:
    script.alter_config = alter
    async with connect(kind, script.url) as client:
        error = await failure(client)
    assert type(error) is ServerError
    assert says in str(error)


async def test_a_closed_client_says_so(kind: str, script: ScriptedTriton) -> None:
    async with connect(kind, script.url) as client:
        await client.rerank(QUERY, DOCUMENTS)
        await client.close()
        await client.close()
        error = await failure(client)
    assert isinstance(error, InvalidRequest)
    assert "closed" in str(error)


async def test_closing_ends_the_calls_under_way(kind: str, script: ScriptedTriton) -> None:
    script.closed_gate = True
    async with connect(kind, script.url) as client:
        call = asyncio.ensure_future(failure(client))
        while script.in_flight < 3:
            await asyncio.sleep(0.01)
        await client.close()
        assert "closed" in str(await asyncio.wait_for(call, 10))


async def test_cancelling_the_task_cancels_the_requests(script: ScriptedTriton) -> None:
    script.closed_gate = True
    async with connect("async", script.url) as client:
        call = asyncio.ensure_future(client.rerank(QUERY, DOCUMENTS))
        while script.in_flight < 3:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        end_s = time.monotonic() + 10
        while script.in_flight and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
    assert (script.in_flight, script.cancelled) == (0, 3)


def test_a_failed_call_leaves_no_thread_behind(script: ScriptedTriton) -> None:
    script.fault_for = lambda pairs: (grpc.StatusCode.INTERNAL, "no")
    with RerankClient(script.url, model="m") as client, pytest.raises(ServerError):
        client.rerank(QUERY, DOCUMENTS)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("triton-rerank")]


async def test_refused_credentials_do_not_read_as_not_ready(kind: str, script: ScriptedTriton) -> None:
    script.config_faults.append((grpc.StatusCode.UNAUTHENTICATED, "who are you"))
    async with connect(kind, script.url) as client:
        assert isinstance(await failure(client), AuthenticationError)
