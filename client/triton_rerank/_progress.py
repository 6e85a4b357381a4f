# SPDX-License-Identifier: Apache-2.0
"""How far a long job is: a bar on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

# A log that is read tomorrow needs no more; an eye on a terminal sees no more.
_LINE_EVERY_S = 10.0
_BAR_EVERY_S = 0.1
_BAR_CHARACTERS = 24


class Progress:
    """Reports rows, rate, failures and the time left.

    Args:
        stream: Where to write; a terminal gets a bar.
        total_bytes: Size of the input, by which the time left is estimated; None when it is not known.
        start_bytes: Where in the input this run starts.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        stream: TextIO,
        total_bytes: int | None,
        start_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._interactive = stream.isatty()
        self._total_bytes = total_bytes
        self._start_bytes = self._done_bytes = start_bytes
        self._clock = clock
        self._started_s = self._shown_s = clock()
        self._rows = self._failed = 0
        self._width = 0

    def advance(self, done_bytes: int, *, failed: bool) -> None:
        """Count one more row, which ends at this byte of the input."""
        self._rows += 1
        self._failed += failed
        self._done_bytes = done_bytes
        now_s = self._clock()
        if now_s - self._shown_s >= (_BAR_EVERY_S if self._interactive else _LINE_EVERY_S):
            self._shown_s = now_s
            self._show()

    def close(self) -> None:
        """End the bar, so that what follows starts on a line of its own."""
        if self._interactive and self._width:
            self._show()
            self._stream.write("\n")
            self._stream.flush()

    def text(self) -> str:
        """`1234 rows, 85.2 rows/s, 3 failed, 0:12:05 left`."""
        elapsed_s = max(self._clock() - self._started_s, 1e-9)
        parts = [f"{self._rows} rows", f"{self._rows / elapsed_s:.1f} rows/s", f"{self._failed} failed"]
        read_bytes = self._done_bytes - self._start_bytes
        if self._total_bytes is not None and read_bytes > 0:
            left_s = round(elapsed_s * max(self._total_bytes - self._done_bytes, 0) / read_bytes)
            parts.append(f"{left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02} left")
        return ", ".join(parts)

    def _show(self) -> None:
        text = self.text()
        if self._total_bytes:
            part = min(self._done_bytes / self._total_bytes, 1.0)
            bar = "#" * int(part * _BAR_CHARACTERS)
            text = f"[{bar:-<{_BAR_CHARACTERS}}] {part:4.0%} {text}" if self._interactive else f"{part:.0%}: {text}"
        if self._interactive:
            # Blanks cover what a longer line left behind.
            self._stream.write(f"\r{text:<{self._width}}")
            self._width = len(text)
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()
