# SPDX-License-Identifier: Apache-2.0
"""The two clients. Only `await`, and how the requests of one call are gathered, differ."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from grpc.aio import UsageError

from ._call import READY_TIMEOUT_S, BaseClient, Call
from ._checks import check_timeout_s, version_name
from ._connection import AsyncConnection, Connection, InferenceServerException
from ._endpoint import remaining_s
from ._gather import Cancellation, gather_in_tasks, gather_in_threads
from ._rank import final_scores, rank
from ._retry import Deadline
from ._split import split_rows
from ._types import DocumentT, RankedDocument
from ._wire import NO_ROWS, Answer, ModelLimits, Scored, infer_inputs, outdated, put_together, read_answer, read_limits

T = TypeVar("T")


# Neither class has a docstring of its own, so that `help` shows that of BaseClient.
class RerankClient(BaseClient):
    _connection: Connection | None = None

    def rerank(
        self,
        query: str,
        documents: Sequence[DocumentT],
        *,
        top_n: int | None = None,
        normalize: bool = False,
        model_version: str | int | None = None,
        timeout_s: float | None = None,
    ) -> list[RankedDocument[DocumentT]]:
        """Order documents by how well they answer the query.

        Args:
            query: A string that is not blank.
            documents: Strings, or mappings that hold their text under the client's `text_key`; they may
                be blank, and may be none at all.
            top_n: Return only this many.
            normalize: Return sigmoids of the raw logits; the order is that of the raw logits either way.
            model_version: The version to ask; None lets the server choose.
            timeout_s: Seconds for the whole call; None takes the client's.

        Returns:
            Best first, ties in the order given.

        Raises:
            InvalidRequest: An argument is not as described, or the server refused it.
            ModelNotFound, AuthenticationError, ServerUnavailable, Overloaded, DeadlineExceeded, ServerError:
                See `triton_rerank.RerankError`. There is never a partial list.
        """
        call = self._rerank_call(query, documents, top_n, model_version, timeout_s)
        return rank(documents, self._scored(call), top_n=top_n, normalize=normalize)

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        normalize: bool = False,
        model_version: str | int | None = None,
        timeout_s: float | None = None,
    ) -> list[float]:
        """Score (query, document) pairs; one score per pair, in the order given. Raises like `rerank`."""
        call = self._score_call(pairs, model_version, timeout_s)
        return final_scores(self._scored(call), normalize=normalize)

    def is_ready(self, *, model_version: str | int | None = None, timeout_s: float = READY_TIMEOUT_S) -> bool:
        """Whether the model answers requests now; False also when the server is down or does not know it.

        Raises:
            InvalidRequest: An argument is not as described.
            AuthenticationError, ServerError: The server did not take the question.
        """
        version, seconds = version_name(model_version), check_timeout_s(timeout_s)
        try:
            return self._open().is_model_ready(version, seconds)
        except InferenceServerException as cause:
            return not self._means_not_ready(cause, version)

    def close(self) -> None:
        """Close the connection; calls under way in other threads fail. Closing twice is fine."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Connection:
        with self._lock:
            self._check_open()
            if self._connection is None:
                self._connection = Connection(self._endpoint)
            return self._connection

    def _scored(self, call: Call) -> Scored:
        connection = self._open()
        if not call.rows.documents:
            return NO_ROWS
        limits = self._limits(connection, call)
        requests = split_rows(call.rows.lengths_bytes(), limits.max_batch_size)
        answers = self._answers(connection, call, requests, call.version)
        newest, older = outdated(answers)
        if older:
            answers += self._answers(connection, call, older, newest)
        return put_together(answers, call.rows, limits, newest)

    def _limits(self, connection: Connection, call: Call) -> ModelLimits:
        limits = self._limits_by_version.get(call.version)
        if limits is None:
            where = self._where("reading the model's config", call.version, call.deadline)
            config = self._retrying(
                lambda left_s: connection.model_config(call.version, left_s), call.deadline, where, Cancellation()
            )
            limits = self._limits_by_version[call.version] = read_limits(config, where)
        return limits

    def _answers(
        self, connection: Connection, call: Call, requests: Sequence[tuple[int, ...]], version: str
    ) -> list[Answer]:
        def send(rows: tuple[int, ...], cancellation: Cancellation) -> Answer:
            where = self._where(f"scoring {call.rows.naming(rows)}", version, call.deadline)
            inputs = infer_inputs(call.rows, rows)
            result = self._retrying(
                lambda left_s: connection.infer(inputs, version, left_s, cancellation),
                call.deadline,
                where,
                cancellation,
            )
            return read_answer(result, call.rows, rows, where)

        return gather_in_threads(send, requests, self._max_concurrent_requests)

    def _retrying(self, attempt: Callable[[float], T], deadline: Deadline, where: str, cancellation: Cancellation) -> T:
        retries = 0
        while True:
            try:
                return attempt(remaining_s(deadline, where))
            except InferenceServerException as cause:
                failure = self._failure(cause, where, retries)
            except ValueError:  # what gRPC raises on a closed channel
                self._check_open()
                raise
            delay_s = self._delay_s(failure, retries, deadline)
            if delay_s is None or cancellation.sleep(delay_s):
                raise failure
            retries += 1


class AsyncRerankClient(BaseClient):
    _connection: AsyncConnection | None = None

    async def rerank(
        self,
        query: str,
        documents: Sequence[DocumentT],
        *,
        top_n: int | None = None,
        normalize: bool = False,
        model_version: str | int | None = None,
        timeout_s: float | None = None,
    ) -> list[RankedDocument[DocumentT]]:
        """See RerankClient.rerank."""
        call = self._rerank_call(query, documents, top_n, model_version, timeout_s)
        return rank(documents, await self._scored(call), top_n=top_n, normalize=normalize)

    async def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        normalize: bool = False,
        model_version: str | int | None = None,
        timeout_s: float | None = None,
    ) -> list[float]:
        """See RerankClient.score."""
        call = self._score_call(pairs, model_version, timeout_s)
        return final_scores(await self._scored(call), normalize=normalize)

    async def is_ready(self, *, model_version: str | int | None = None, timeout_s: float = READY_TIMEOUT_S) -> bool:
        """See RerankClient.is_ready."""
        version, seconds = version_name(model_version), check_timeout_s(timeout_s)
        try:
            return await self._open().is_model_ready(version, seconds)
        except InferenceServerException as cause:
            return not self._means_not_ready(cause, version)

    async def close(self) -> None:
        """See RerankClient.close."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _open(self) -> AsyncConnection:
        self._check_open()
        if self._connection is None:
            self._connection = AsyncConnection(self._endpoint)
        return self._connection

    async def _scored(self, call: Call) -> Scored:
        connection = self._open()
        if not call.rows.documents:
            return NO_ROWS
        limits = await self._limits(connection, call)
        requests = split_rows(call.rows.lengths_bytes(), limits.max_batch_size)
        answers = await self._answers(connection, call, requests, call.version)
        newest, older = outdated(answers)
        if older:
            answers += await self._answers(connection, call, older, newest)
        return put_together(answers, call.rows, limits, newest)

    async def _limits(self, connection: AsyncConnection, call: Call) -> ModelLimits:
        limits = self._limits_by_version.get(call.version)
        if limits is None:
            where = self._where("reading the model's config", call.version, call.deadline)
            config = await self._retrying(
                lambda left_s: connection.model_config(call.version, left_s), call.deadline, where
            )
            limits = self._limits_by_version[call.version] = read_limits(config, where)
        return limits

    async def _answers(
        self, connection: AsyncConnection, call: Call, requests: Sequence[tuple[int, ...]], version: str
    ) -> list[Answer]:
        async def send(rows: tuple[int, ...]) -> Answer:
            where = self._where(f"scoring {call.rows.naming(rows)}", version, call.deadline)
            inputs = infer_inputs(call.rows, rows)
            result = await self._retrying(
                lambda left_s: connection.infer(inputs, version, left_s), call.deadline, where
            )
            return read_answer(result, call.rows, rows, where)

        return await gather_in_tasks(send, requests, self._max_concurrent_requests)

    async def _retrying(self, attempt: Callable[[float], Awaitable[T]], deadline: Deadline, where: str) -> T:
        retries = 0
        while True:
            try:
                return await attempt(remaining_s(deadline, where))
            except InferenceServerException as cause:
                failure = self._failure(cause, where, retries)
            except UsageError:  # what gRPC raises on a closed channel
                self._check_open()
                raise
            except asyncio.CancelledError:
                # Closing cancels the calls under way, though nobody cancelled their tasks.
                task = asyncio.current_task()
                if task is None or not task.cancelling():
                    self._check_open()
                raise
            delay_s = self._delay_s(failure, retries, deadline)
            if delay_s is None:
                raise failure
            await asyncio.sleep(delay_s)
            retries += 1
