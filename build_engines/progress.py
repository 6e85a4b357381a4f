# SPDX-License-Identifier: Apache-2.0
"""A bar for work that takes minutes; nothing where the output is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[], None]
# What a step is given to report with: (what, of what, how many) -> advance.
Bars = Callable[[str, str, int], AbstractContextManager[Advance]]


def bars(console: Console) -> Bars:
    """Return what draws a step's bars on a console."""

    @contextmanager
    def draw(what: str, unit: str, total: int) -> Iterator[Advance]:
        progress = Progress(
            TextColumn(f"{what:9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        with progress:
            task = progress.add_task(what, total=total)
            yield lambda: progress.advance(task)

    return draw


@contextmanager
def no_bars(_what: str, _unit: str, _total: int) -> Iterator[Advance]:
    """Report to nobody."""
    yield lambda: None
