# SPDX-License-Identifier: Apache-2.0
"""Several requests at once: all answers, or the first failure with the rest cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


class Cancellation:
    """Stops everything one synchronous call has under way, from whichever thread."""

    def __init__(self) -> None:
        self._fired = threading.Event()
        self._lock = threading.Lock()
        self._cancels: list[Callable[[], None]] = []

    def fire(self) -> None:
        """Cancel what is covered now and what will be."""
        with self._lock:
            self._fired.set()
            cancels = list(self._cancels)
        for cancel in cancels:
            cancel()

    @contextmanager
    def covering(self, cancel: Callable[[], None]) -> Iterator[None]:
        """Call `cancel` when fired, before or during the block, or when the block is interrupted."""
        with self._lock:
            self._cancels.append(cancel)
            fired = self._fired.is_set()
        if fired:
            cancel()
        try:
            yield
        except BaseException:
            cancel()
            raise
        finally:
            with self._lock:
                self._cancels.remove(cancel)

    def sleep(self, delay_s: float) -> bool:
        """Wait; True when fired meanwhile."""
        return self._fired.wait(delay_s)


def gather_in_threads(
    send: Callable[[RequestT, Cancellation], AnswerT], requests: Sequence[RequestT], limit: int
) -> list[AnswerT]:
    """Answers in the order of the requests, at most `limit` in flight."""
    cancellation = Cancellation()
    if len(requests) == 1:
        return [send(requests[0], cancellation)]
    workers = min(limit, len(requests))
    with ThreadPoolExecutor(workers, thread_name_prefix="triton-rerank") as pool:
        futures = [pool.submit(send, request, cancellation) for request in requests]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            cancellation.fire()
            raise
        return [future.result() for future in futures]


async def gather_in_tasks(
    send: Callable[[RequestT], Awaitable[AnswerT]], requests: Sequence[RequestT], limit: int
) -> list[AnswerT]:
    """Answers in the order of the requests, at most `limit` in flight."""
    slots = asyncio.Semaphore(limit)

    async def send_in_turn(request: RequestT) -> AnswerT:
        async with slots:
            return await send(request)

    tasks = [asyncio.ensure_future(send_in_turn(request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
