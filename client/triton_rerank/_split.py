# SPDX-License-Identifier: Apache-2.0
"""Rows -> requests. Triton merges requests but never splits one, so the client does. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# More spans than this make an error message harder to read, not more precise.
_SPANS_SHOWN = 8


def split_rows(lengths_bytes: Sequence[int], max_batch_size: int) -> list[tuple[int, ...]]:
    """Cut rows into the fewest requests of at most `max_batch_size`, similar lengths together.

    Rows of one request are padded to its longest, so sorting by length saves padding. Sizes differ by at
    most one row. The longest rows come first: started last, they alone would decide when the call ends.

    Returns:
        Row numbers of each request; together they hold every row once.
    """
    rows = sorted(range(len(lengths_bytes)), key=lambda row: (-lengths_bytes[row], row))
    count = -(-len(rows) // max_batch_size)
    return [tuple(rows[len(rows) * part // count : len(rows) * (part + 1) // count]) for part in range(count)]


def row_spans(rows: Iterable[int]) -> str:
    """Name rows compactly: `0-3, 7, 9-12`; the tail of a long list becomes `...`."""
    spans: list[list[int]] = []
    for row in sorted(rows):
        if spans and row == spans[-1][1] + 1:
            spans[-1][1] = row
        else:
            spans.append([row, row])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    shown = texts[:_SPANS_SHOWN]
    return ", ".join(shown if len(shown) == len(texts) else [*shown, "..."])
