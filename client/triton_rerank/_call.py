# SPDX-License-Identifier: Apache-2.0
"""What both clients do around the network: check a call before it, decide about failures after it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from ._checks import (
    check_count,
    check_timeout_s,
    check_top_n,
    encode_documents,
    encode_pairs,
    encode_query,
    version_name,
)
from ._connection import InferenceServerException
from ._endpoint import build_endpoint
from ._errors import DeadlineExceeded, InvalidRequest, ModelNotFound, RerankError, ServerUnavailable
from ._retry import Deadline, RetryPolicy, jitter
from ._types import Keepalive, Tls
from ._wire import ModelLimits, Rows

# A probe that takes longer than this is an answer too.
READY_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Call:
    """A checked call: its rows, the version asked for ("" for the server's choice) and its one deadline."""

    rows: Rows
    version: str
    deadline: Deadline


class BaseClient:
    """Scores (query, document) pairs with one served reranker.

    Building a client connects to nothing; the first call does. Any number of threads may share a
    RerankClient; an AsyncRerankClient belongs to the event loop of its first call.

    Args:
        url: `host:port` of Triton's gRPC service.
        model: Name of the served reranker.
        text_key: Where a document that is a mapping holds its text.
        timeout_s: Seconds a whole call may take, unless the call says otherwise.
        max_retries: How often a request is sent again while the server is unavailable or overloaded.
        max_concurrent_requests: Requests of one call in flight; a call of more than the model's
            `max_batch_size` documents becomes several requests. Two keep a scorer busy; more make other
            callers wait, and are still scored when the call ends early.
        headers: Metadata for every request.
        bearer_token: Sent as `authorization: Bearer ...`; use it with `tls`.
        tls: Encrypt the connection; None is plaintext.
        keepalive: Ping idle connections; None does not.

    Raises:
        InvalidRequest: An argument is not as described.
    """

    def __init__(  # noqa: PLR0913  each is a setting of its own; a bag would only hide their names
        self,
        url: str,
        *,
        model: str,
        text_key: str = "text",
        timeout_s: float = 30.0,
        max_retries: int = 5,
        max_concurrent_requests: int = 2,
        headers: Mapping[str, str] | None = None,
        bearer_token: str | None = None,
        tls: Tls | None = None,
        keepalive: Keepalive | None = None,
    ) -> None:
        self._endpoint = build_endpoint(
            url, model=model, headers=headers, bearer_token=bearer_token, tls=tls, keepalive=keepalive
        )
        if not isinstance(text_key, str):
            raise InvalidRequest(f"text_key must be a string, got a {type(text_key).__name__}.")
        self._text_key = text_key
        self._timeout_s = check_timeout_s(timeout_s)
        self._retry = RetryPolicy(check_count(max_retries, "max_retries", 0, "0 means one attempt"))
        self._max_concurrent_requests = check_count(
            max_concurrent_requests, "max_concurrent_requests", 1, "1 sends one request after the other"
        )
        # Calls that start together may each ask the server once; a lock would make them wait for each
        # other's retries while the server is down.
        self._limits_by_version: dict[str, ModelLimits] = {}
        self._closed = False
        self._lock = threading.Lock()  # held to open and to close, never while waiting for the server

    def __repr__(self) -> str:
        tls = "" if self._endpoint.tls is None else ", tls=Tls(...)"
        return f"{type(self).__name__}({self._endpoint.url!r}, model={self._endpoint.model!r}{tls})"

    def _rerank_call(
        self, query: object, documents: object, top_n: object, model_version: object, timeout_s: object
    ) -> Call:
        check_top_n(top_n)
        rows = Rows("documents", [encode_query(query)], encode_documents(documents, self._text_key))
        return self._call(rows, model_version, timeout_s)

    def _score_call(self, pairs: object, model_version: object, timeout_s: object) -> Call:
        return self._call(Rows("pairs", *encode_pairs(pairs)), model_version, timeout_s)

    def _call(self, rows: Rows, model_version: object, timeout_s: object) -> Call:
        seconds = self._timeout_s if timeout_s is None else check_timeout_s(timeout_s)
        return Call(rows, version_name(model_version), Deadline.after(seconds))

    def _where(self, doing: str, version: str, deadline: Deadline) -> str:
        return f"{self._endpoint.where(doing, version)}, timeout_s {deadline.timeout_s:g}"

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> InvalidRequest:
        return InvalidRequest(f"this client is closed: {self!r}. Build a new one.")

    def _failure(self, cause: InferenceServerException, where: str, retries: int) -> RerankError:
        """What to raise for a failed attempt, if it was the last one."""
        if self._closed:
            return self._closed_error()
        attempts = f", {retries + 1} attempts" if retries else ""
        failure = self._endpoint.failure(cause, where + attempts)
        if isinstance(failure, (InvalidRequest, ModelNotFound)):
            # The model may have been loaded anew with other limits: ask again before the next call.
            self._limits_by_version.clear()
        return failure

    def _delay_s(self, failure: RerankError, retries: int, deadline: Deadline) -> float | None:
        """Seconds until the next attempt, or None to raise `failure`."""
        return self._retry.delay_s(failure, retries, deadline.remaining_s(), jitter())

    def _means_not_ready(self, cause: InferenceServerException, version: str) -> bool:
        """Raises what is wrong with the question itself, such as refused credentials."""
        failure = self._failure(cause, self._endpoint.where("asking whether the model is ready", version), 0)
        if isinstance(failure, (ServerUnavailable, ModelNotFound, DeadlineExceeded)):
            return True
        raise failure
