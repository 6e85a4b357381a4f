# SPDX-License-Identifier: Apache-2.0
"""Where a batch job stands is read off its output; there is no other state."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ._batch_rows import InputRow, RowId, is_failure, row_id_of
from ._errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Done:
    """What earlier runs wrote: complete lines, failures among them, their end, and the last row's id."""

    lines: int
    failed: int
    end_bytes: int
    last_id: RowId


@contextmanager
def open_output(path: Path, *, overwrite: bool) -> Iterator[tuple[BinaryIO, Done]]:
    """Open the output for appending, locked, without a torn last line.

    Raises:
        InvalidRequest: Another job writes it, or it is not the output of a batch job.
        OSError: It cannot be opened.
    """
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as output:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            raise InvalidRequest(
                f"another job is writing {str(path)!r}; wait for it or choose another file."
            ) from cause
        if overwrite:
            output.truncate(0)
        done = _read_done(output, path)
        output.truncate(done.end_bytes)
        output.seek(done.end_bytes)
        yield output, done


def rows_after(source: BinaryIO, done: Done) -> Iterator[InputRow]:
    """The rows of the input that are not done yet.

    Raises:
        InvalidRequest: The output cannot be of this input.
    """
    end_bytes = line = 0
    for text in source:
        line += 1
        end_bytes += len(text)
        row = InputRow(line, text, end_bytes)
        if line == done.lines and done.last_id != row_id_of(row):
            raise InvalidRequest(
                f"line {line} of the input has the id {row_id_of(row)!r}, line {line} of the output {done.last_id!r}: "
                "the output belongs to another input. Choose another file, or start anew with --overwrite."
            )
        if line > done.lines:
            yield row
    if line < done.lines:
        raise InvalidRequest(
            f"the output has {done.lines} lines, the input only {line}: the output belongs to another input. "
            "Choose another file, or start anew with --overwrite."
        )


def _read_done(output: BinaryIO, path: Path) -> Done:
    lines = failures = end_bytes = 0
    last = b""
    for text in output:
        if not text.endswith(b"\n"):
            break  # torn when an earlier run was killed
        lines += 1
        failures += is_failure(text)
        end_bytes += len(text)
        last = text
    if not lines:
        # Nothing complete: a torn first line of ours begins like this, anything else is somebody's file.
        output.seek(0)
        if not b'{"line": 1'.startswith(output.read(10)):
            raise _foreign(path, 1)
        return Done(0, 0, 0, None)
    try:
        fields = json.loads(last)
        number, last_id = fields["line"], fields.get("id")
    except (ValueError, TypeError, KeyError) as cause:
        raise _foreign(path, lines) from cause
    if number != lines:
        raise _foreign(path, lines)
    return Done(lines, failures, end_bytes, last_id)


def _foreign(path: Path, line: int) -> InvalidRequest:
    return InvalidRequest(
        f"{str(path)!r} is not the output of this job: its line {line} is not the result of row {line}. "
        "Choose another file, or start anew with --overwrite."
    )
