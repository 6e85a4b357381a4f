# SPDX-License-Identifier: Apache-2.0
"""A KServe v2 server on a real socket that does what a test tells it to, and both clients behind one face."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
from triton_rerank import AsyncRerankClient, RerankClient
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

Fault = tuple[grpc.StatusCode, str]

QUEUE_FULL: Fault = (grpc.StatusCode.UNAVAILABLE, "[request id: <id_unknown>] Exceeds maximum queue size")
NOT_READY: Fault = (grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'm' version 1 is not at ready state")


def score_of(query: str, document: str) -> float:
    """The scripted score: the number after `logit:`, else one computed from both texts, exact in float32."""
    if document.startswith("logit:"):
        return float(document.removeprefix("logit:"))
    return float(zlib.crc32(f"{query}\0{document}".encode()) % 4001 - 2000) / 64


def tokens_of(query: str, document: str) -> int:
    return len(query.split()) + len(document.split()) + 4


@dataclass
class Received:
    """One request as the server saw it."""

    pairs: list[tuple[str, str]]
    version: str
    metadata: dict[str, str]
    remaining_s: float | None


@dataclass
class ScriptedTriton:
    """What the server serves and how it misbehaves; tests change the fields at any time."""

    model: str = "m"
    versions: tuple[str, ...] = ("1",)
    max_batch_size: int = 4
    max_length: str | None = "16"
    ready: bool = True
    config_faults: deque[Fault] = field(default_factory=deque)
    infer_faults: deque[Fault] = field(default_factory=deque)
    fault_for: Callable[[list[tuple[str, str]]], Fault | None] = lambda pairs: None
    fail_when_in_flight: int = 0  # a request that is to fail does so once this many have been under way
    delay_s: float = 0.0
    gate: threading.Event = field(default_factory=threading.Event)
    closed_gate: bool = False  # requests wait for the gate, or for their caller to go
    alter: Callable[[Any], None] = lambda response: None
    alter_config: Callable[[Any], None] = lambda config: None
    received: list[Received] = field(default_factory=list)
    config_calls: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    cancelled: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def rows_received(self) -> list[tuple[str, str]]:
        return [pair for request in self.received for pair in request.pairs]


class _Service(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, script: ScriptedTriton) -> None:
        self.script = script

    def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        known = request.name == self.script.model and request.version in ("", *self.script.versions)
        return service_pb2.ModelReadyResponse(ready=known and self.script.ready)

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        script = self.script
        script.config_calls += 1
        if script.config_faults:
            _abort(context, script.config_faults.popleft())
        self._check_known(request.name, request.version, context)
        config = model_config_pb2.ModelConfig(name=script.model, max_batch_size=script.max_batch_size)
        for name in ("QUERY", "DOCUMENT"):
            config.input.add(name=name, data_type=model_config_pb2.TYPE_STRING, dims=[1])
        config.output.add(name="SCORE", data_type=model_config_pb2.TYPE_FP32, dims=[1])
        config.output.add(name="TOKENS", data_type=model_config_pb2.TYPE_INT32, dims=[1])
        if script.max_length is not None:
            config.parameters["max_length"].string_value = script.max_length
        script.alter_config(config)
        return service_pb2.ModelConfigResponse(config=config)

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        script = self.script
        self._check_known(request.model_name, request.model_version, context)
        pairs = _pairs(request)
        if len(pairs) > script.max_batch_size:
            text = f"inference request batch-size must be <= {script.max_batch_size} for 'm'"
            _abort(context, (grpc.StatusCode.INVALID_ARGUMENT, text))
        with script.lock:
            metadata = {key: str(value) for key, value in context.invocation_metadata()}
            script.received.append(Received(pairs, request.model_version, metadata, context.time_remaining()))
            script.in_flight += 1
            script.most_in_flight = max(script.most_in_flight, script.in_flight)
            fault = script.infer_faults.popleft() if script.infer_faults else script.fault_for(pairs)
        try:
            if fault is None:
                self._take_time(context)
            while fault is not None and script.most_in_flight < script.fail_when_in_flight:
                time.sleep(0.002)
        finally:
            with script.lock:
                script.in_flight -= 1
        if fault is not None:
            _abort(context, fault)
        response = _response(pairs, request.model_version or script.versions[-1])
        script.alter(response)
        return response

    def _take_time(self, context: Any) -> None:
        end_s = time.monotonic() + self.script.delay_s
        while time.monotonic() < end_s or (self.script.closed_gate and not self.script.gate.is_set()):
            if not context.is_active():
                with self.script.lock:
                    self.script.cancelled += 1
                _abort(context, (grpc.StatusCode.CANCELLED, "the caller has gone"))
            time.sleep(0.002)

    def _check_known(self, name: str, version: str, context: Any) -> None:
        if name != self.script.model:
            _abort(context, (grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found"))
        if version not in ("", *self.script.versions):
            text = f"Request for unknown model: '{name}' version {version} is not found"
            _abort(context, (grpc.StatusCode.NOT_FOUND, text))


def _abort(context: Any, fault: Fault) -> NoReturn:
    context.abort(*fault)
    raise AssertionError("abort always raises")


def _pairs(request: Any) -> list[tuple[str, str]]:
    columns = {}
    for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True):
        assert (tensor.datatype, list(tensor.shape)[1:]) == ("BYTES", [1])
        columns[tensor.name] = _texts(content)
        assert len(columns[tensor.name]) == tensor.shape[0]
    assert sorted(columns) == ["DOCUMENT", "QUERY"]
    return list(zip(columns["QUERY"], columns["DOCUMENT"], strict=True))


def _texts(content: bytes) -> list[str]:
    texts = []
    while content:
        (length,) = struct.unpack("<I", content[:4])
        texts.append(content[4 : 4 + length].decode())
        content = content[4 + length :]
    return texts


def _response(pairs: list[tuple[str, str]], version: str) -> Any:
    response = service_pb2.ModelInferResponse(model_name="m", model_version=version)
    count = len(pairs)
    for name, datatype, numbers in (
        ("SCORE", "FP32", struct.pack(f"<{count}f", *(score_of(*pair) for pair in pairs))),
        ("TOKENS", "INT32", struct.pack(f"<{count}i", *(tokens_of(*pair) for pair in pairs))),
    ):
        response.outputs.add(name=name, datatype=datatype, shape=[count, 1])
        response.raw_output_contents.append(numbers)
    return response


@contextmanager
def serve(
    script: ScriptedTriton, *, credentials: grpc.ServerCredentials | None = None, port: int = 0
) -> Iterator[grpc.Server]:
    """Serve on 127.0.0.1; the url is put into the script."""
    # Two servers must not share a port: a test for a dead server would reach the other one.
    options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(max_workers=32), options=options)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Service(script), server)
    address = f"127.0.0.1:{port}"
    bound = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    script.url = f"127.0.0.1:{bound}"
    server.start()
    try:
        yield server
    finally:
        script.gate.set()
        server.stop(grace=None).wait(5)


class Awaited:
    """RerankClient with the face of AsyncRerankClient, so that one test runs both."""

    def __init__(self, client: RerankClient) -> None:
        self._client = client

    async def rerank(self, *args: Any, **settings: Any) -> Any:
        return await asyncio.to_thread(self._client.rerank, *args, **settings)

    async def score(self, *args: Any, **settings: Any) -> Any:
        return await asyncio.to_thread(self._client.score, *args, **settings)

    async def is_ready(self, **settings: Any) -> bool:
        return await asyncio.to_thread(self._client.is_ready, **settings)

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)

    def __repr__(self) -> str:
        return repr(self._client)


@asynccontextmanager
async def connect(kind: str, url: str, *, model: str = "m", **settings: Any) -> AsyncIterator[Any]:
    """A client of either kind, `sync` or `async`, with more requests in flight than by default for tests to see."""
    settings = {"max_concurrent_requests": 8} | settings
    if kind == "async":
        async with AsyncRerankClient(url, model=model, **settings) as client:
            yield client
    else:
        with RerankClient(url, model=model, **settings) as blocking:
            yield Awaited(blocking)
