# SPDX-License-Identifier: Apache-2.0
"""Rerank every row of a JSON Lines file in bounded memory, resumable after any interruption."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from ._batch_files import open_output, rows_after
from ._batch_rows import InputRow, RowId, RowResult, failed, query_and_documents, read_fields, scored
from ._checks import check_count, check_top_n, version_name
from ._client import AsyncRerankClient
from ._errors import (
    AuthenticationError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    RerankError,
    ServerError,
    ServerUnavailable,
)
from ._progress import Progress

# Rows read ahead of the oldest unfinished one, per row in flight: a slow row then holds up only the writing.
_READ_AHEAD = 4


@dataclass(frozen=True, slots=True)
class BatchJob:
    """What to rerank and how.

    Attributes:
        source: The input, one row a line.
        target: The output; when it exists the job goes on after its last complete line.
        overwrite: Start anew instead.
        concurrency: Rows in flight.
        stop_after: Stop when this many rows in a row fail because of the server.
        top_n, normalize, model_version: As in `RerankClient.rerank`.

    Raises:
        InvalidRequest: A number is out of range.
    """

    source: Path
    target: Path
    overwrite: bool = False
    concurrency: int = 8
    stop_after: int = 20
    top_n: int | None = None
    normalize: bool = False
    model_version: str | None = None

    def __post_init__(self) -> None:
        # Every row would fail for these, and the output would fill with failures.
        check_top_n(self.top_n)
        version_name(self.model_version)
        check_count(self.concurrency, "concurrency", 1, "1 scores one row after the other")
        check_count(self.stop_after, "stop_after", 1, "1 stops at the first row the server fails")


@dataclass(frozen=True, slots=True)
class Summary:
    """The whole output, earlier runs included: lines, failures among them, and where this run started."""

    rows: int
    failed: int
    resumed_after: int


async def run_batch(client: AsyncRerankClient, job: BatchJob, stream: TextIO) -> Summary:
    """Run the job and report progress on `stream`.

    Raises:
        InvalidRequest: The files do not fit each other.
        ModelNotFound, AuthenticationError: No row could be scored; nothing is written for the row at hand.
        ServerUnavailable: The server failed for `stop_after` rows in a row, or for the last ones; those rows
            are not written, so that the same job resumes with them.
        OSError: A file cannot be read or written.
    """
    if job.target.exists() and job.source.exists() and job.target.samefile(job.source):
        raise InvalidRequest(f"the output would overwrite the input {str(job.source)!r}; choose another file.")
    with job.source.open("rb") as source, open_output(job.target, overwrite=job.overwrite) as (output, done):
        size_bytes = job.source.stat().st_size if source.seekable() else None
        rows = rows_after(source, done)
        first = next(rows, None)
        if first is None:
            return Summary(done.lines, done.failed, done.lines)
        progress = Progress(stream, size_bytes, first.end_bytes - len(first.text))
        sink = _Sink(output, progress, job.stop_after)
        try:
            await _score_rows(client, job, first, rows, sink)
        finally:
            progress.close()
        return Summary(done.lines + sink.rows, done.failed + sink.failed, done.lines)


class _Sink:
    """Writes results in order, but holds back failures that may be the server's until a row succeeds."""

    def __init__(self, output: BinaryIO, progress: Progress, stop_after: int) -> None:
        self._output = output
        self._progress = progress
        self._stop_after = stop_after
        self._held: list[RowResult] = []
        self.rows = self.failed = 0

    def take(self, result: RowResult) -> None:
        if isinstance(result.error, (ServerUnavailable, DeadlineExceeded, ServerError)):
            self._held.append(result)
            if len(self._held) >= self._stop_after:
                raise self._stopped()
            return
        self._write_held()
        self._write(result)

    def finish(self) -> None:
        if self._held and isinstance(self._held[-1].error, ServerUnavailable):
            raise self._stopped()
        self._write_held()

    def _stopped(self) -> ServerUnavailable:
        first, last = self._held[0].row.line, self._held[-1].row.line
        stopped = ServerUnavailable(
            f"stopped before line {first}: rows {first} to {last} all failed because of the server, and were not "
            f"written. Run the same command again to resume. The last one: {self._held[-1].error}"
        )
        stopped.__cause__ = self._held[-1].error
        return stopped

    def _write_held(self) -> None:
        for result in self._held:
            self._write(result)
        self._held.clear()

    def _write(self, result: RowResult) -> None:
        self._output.write(result.text)
        # A killed job then loses only rows that were under way.
        self._output.flush()
        self.rows += 1
        self.failed += result.error is not None
        self._progress.advance(result.row.end_bytes, failed=result.error is not None)


async def _score_rows(
    client: AsyncRerankClient, job: BatchJob, first: InputRow, rest: Iterable[InputRow], sink: _Sink
) -> None:
    slots = asyncio.Semaphore(job.concurrency)
    window: deque[asyncio.Task[RowResult]] = deque()

    async def score_in_turn(row: InputRow) -> RowResult:
        async with slots:
            return await _score_row(client, job, row)

    try:
        window.append(asyncio.ensure_future(score_in_turn(first)))
        for row in rest:
            if len(window) >= job.concurrency * _READ_AHEAD:
                sink.take(await window.popleft())
            window.append(asyncio.ensure_future(score_in_turn(row)))
        while window:
            sink.take(await window.popleft())
        sink.finish()
    finally:
        for task in window:
            task.cancel()
        await asyncio.gather(*window, return_exceptions=True)


async def _score_row(client: AsyncRerankClient, job: BatchJob, row: InputRow) -> RowResult:
    row_id: RowId = None
    try:
        fields = read_fields(row)
        row_id = fields.get("id")
        query, documents = query_and_documents(fields)
        hits = await client.rerank(
            query, documents, top_n=job.top_n, normalize=job.normalize, model_version=job.model_version
        )
    except (ModelNotFound, AuthenticationError):
        raise  # no row can do better
    except RerankError as error:
        return failed(row, row_id, error)
    return scored(row, row_id, hits)
