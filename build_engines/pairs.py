# SPDX-License-Identifier: Apache-2.0
"""Real queries with their candidate documents, one JSON object a line: what `verify` compares precisions on.

    {"query": "...", "documents": ["...", "..."], "relevance": [1, 0]}

`relevance` is optional, one grade per document; with it nDCG@10 is computed. Otherwise it is the format that
`triton-rerank batch` reads, in which a document may also be an object with a `text`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_engines.errors import PairsError

SAMPLE = Path(__file__).with_name("sample.jsonl")


@dataclass(frozen=True, slots=True)
class Candidates:
    """A query, its candidate documents in the order given, and their grades if they are known."""

    query: str
    documents: tuple[str, ...]
    relevance: tuple[float, ...] | None = None


def read_pairs(path: Path) -> list[Candidates]:
    """Read a JSONL file; raise PairsError naming the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would also split inside texts
    except (OSError, UnicodeDecodeError) as error:
        raise PairsError(f"Cannot read pairs from {path}: {error}") from error
    rows = [_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise PairsError(f"{path} holds no pairs; give one JSON object a line with query and documents.")
    return rows


def _row(line: str, place: str) -> Candidates:
    try:
        row: Any = json.loads(line)
        query, documents, relevance = row["query"], row["documents"], row.get("relevance")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PairsError(f'{place}: expected {{"query": "...", "documents": ["..."]}}, got {line[:80]!r}.') from error
    if not isinstance(documents, list) or not documents:
        raise PairsError(f"{place}: documents must be a list of at least one text.")
    documents = [document.get("text") if isinstance(document, dict) else document for document in documents]
    if not all(isinstance(text, str) for text in (query, *documents)) or not query.strip():
        raise PairsError(f"{place}: query must be a text that is not blank, and every document a text.")
    try:
        "".join((query, *documents)).encode()
    except UnicodeEncodeError as error:  # JSON can name half of a surrogate pair
        raise PairsError(
            f"{place}: a text cannot be written as UTF-8: {error.reason} ({error.object[error.start : error.end]!r})."
        ) from error
    if relevance is None:
        return Candidates(query, tuple(documents))
    grades = (
        [g for g in relevance if isinstance(g, int | float) and 0 <= g < math.inf]
        if isinstance(relevance, list)
        else []
    )
    if len(grades) != len(documents):
        raise PairsError(
            f"{place}: relevance must hold one number of at least 0 for each of {len(documents)} documents."
        )
    return Candidates(query, tuple(documents), tuple(grades))
