# SPDX-License-Identifier: Apache-2.0
"""The only place that talks through tritonclient, which has no types: one class to call, one to await."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import grpc
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from ._endpoint import Endpoint
from ._gather import Cancellation

__all__ = ["AsyncConnection", "Connection", "InferenceServerException"]

# tritonclient's own limits; they have to be repeated because any option of ours replaces its whole list.
_MESSAGE_BYTES = 2**31 - 1
# gRPC waits up to two minutes before it tries a lost server again. A reranker that restarted should be
# found sooner, and one attempt every few seconds is no load.
_RECONNECT_MS = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 3000))


class Connection:
    """A channel for any number of threads."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._model = endpoint.model
        self._headers = endpoint.headers
        options, credentials = _channel(endpoint)
        self._triton = triton.InferenceServerClient(endpoint.url, creds=credentials, channel_args=options)
        # async_infer keeps its call in an attribute before it attaches the callback: two threads inside it
        # at once could swap their answers.
        self._starting = threading.Lock()

    def model_config(self, version: str, timeout_s: float) -> Any:
        """The ModelConfig message."""
        return self._triton.get_model_config(
            self._model, version, headers=self._headers, client_timeout=timeout_s
        ).config

    def is_model_ready(self, version: str, timeout_s: float) -> bool:
        """Whether the model, or this version of it, answers requests."""
        return bool(self._triton.is_model_ready(self._model, version, headers=self._headers, client_timeout=timeout_s))

    def infer(self, inputs: Sequence[Any], version: str, timeout_s: float, cancellation: Cancellation) -> Any:
        """The InferResult; raises InferenceServerException, with status CANCELLED once cancelled."""
        answer: Future[Any] = Future()

        def deliver(result: Any, error: Exception | None) -> None:
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)

        with self._starting:
            call = self._triton.async_infer(
                self._model, inputs, deliver, version, headers=self._headers, client_timeout=timeout_s
            )
        with cancellation.covering(call.cancel):
            return answer.result()

    def close(self) -> None:
        """Close the channel; calls under way end with CANCELLED."""
        self._triton.close()


class AsyncConnection:
    """A channel of one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._model = endpoint.model
        self._headers = endpoint.headers
        options, credentials = _channel(endpoint)
        self._triton = triton_aio.InferenceServerClient(endpoint.url, creds=credentials, channel_args=options)

    async def model_config(self, version: str, timeout_s: float) -> Any:
        """See Connection."""
        response = await self._triton.get_model_config(
            self._model, version, headers=self._headers, client_timeout=timeout_s
        )
        return response.config

    async def is_model_ready(self, version: str, timeout_s: float) -> bool:
        """See Connection."""
        return bool(
            await self._triton.is_model_ready(self._model, version, headers=self._headers, client_timeout=timeout_s)
        )

    async def infer(self, inputs: Sequence[Any], version: str, timeout_s: float) -> Any:
        """See Connection; a cancelled task cancels its request."""
        return await self._triton.infer(self._model, inputs, version, headers=self._headers, client_timeout=timeout_s)

    async def close(self) -> None:
        """See Connection."""
        await self._triton.close()


def _channel(endpoint: Endpoint) -> tuple[list[tuple[str, int]], grpc.ChannelCredentials | None]:
    options = [
        ("grpc.max_send_message_length", _MESSAGE_BYTES),
        ("grpc.max_receive_message_length", _MESSAGE_BYTES),
        *_RECONNECT_MS,
    ]
    if endpoint.keepalive is not None:
        options += [
            ("grpc.keepalive_time_ms", round(endpoint.keepalive.time_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(endpoint.keepalive.timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", int(endpoint.keepalive.without_calls)),
        ]
    return options, endpoint.credentials()
