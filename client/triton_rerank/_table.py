# SPDX-License-Identifier: Apache-2.0
"""A ranking as text: an aligned table for people, JSON for programs. Pure."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from typing import Any

from ._types import RankedDocument

# A document shown in less than this says nothing; a narrower terminal wraps instead.
_LEAST_DOCUMENT_COLUMNS = 16


def table(hits: Sequence[RankedDocument[str]], columns: int) -> str:
    """Rank, score, index and the beginning of each document, in lines of at most `columns`."""
    rows = [(str(place), f"{hit.score:.4f}", str(hit.index)) for place, hit in enumerate(hits, 1)]
    heads = ("rank", "score", "index")
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(3)]
    room = max(columns - sum(widths) - 3 * 2, _LEAST_DOCUMENT_COLUMNS)
    lines = [_line(heads, widths, "document")]
    lines += [_line(row, widths, shortened(hit.document, room)) for row, hit in zip(rows, hits, strict=True)]
    return "\n".join(lines)


def as_json(hits: Sequence[RankedDocument[str]], model: str) -> str:
    """One object; escaped to ASCII, so that no terminal or pipe can spoil it."""
    results: list[dict[str, Any]] = [
        {
            "rank": place,
            "index": hit.index,
            "score": hit.score,
            "tokens": hit.tokens,
            "truncated": hit.truncated,
            "document": hit.document,
        }
        for place, hit in enumerate(hits, 1)
    ]
    version = hits[0].model_version if hits else None
    return json.dumps({"model": model, "model_version": version, "results": results}, indent=2)


def shortened(text: str, columns: int) -> str:
    """The beginning of a text on one line of at most `columns` terminal cells."""
    # Far fewer characters than these fill the line; a document may have millions.
    head = text[: 4 * columns]
    # Control characters could redraw the terminal.
    clean = " ".join("".join(character if character.isprintable() else " " for character in head).split())
    if len(head) == len(text) and sum(map(_cells, clean)) <= columns:
        return clean
    kept, used = "", 1  # one cell for the ellipsis
    for character in clean:
        used += _cells(character)
        if used > columns:
            break
        kept += character
    return f"{kept.rstrip()}…"


def _line(cells: Sequence[str], widths: Sequence[int], document: str) -> str:
    aligned = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join((*aligned, document)).rstrip()


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
