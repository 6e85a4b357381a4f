# SPDX-License-Identifier: Apache-2.0
"""Retrieval sets on this disk: passages, queries, relevance and BM25 candidates.

A set is a folder below $TRITON_RERANK_DATA with corpus.jsonl {id,text}, queries.jsonl {id,text}, qrels.tsv (query,
document, grade), run.*.tsv (query, document, rank, score) and hard.qids.txt, each plain or .gz.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RetrievalSet:
    """Texts and grades by id; `candidates` holds document ids, best first; `hard` are queries that BM25 gets wrong."""

    corpus: dict[str, str]
    queries: dict[str, str]
    relevance: dict[str, dict[str, float]]
    candidates: dict[str, list[str]]
    hard: list[str]


def data_folder() -> Path:
    """Return $TRITON_RERANK_DATA; exit with what to do where it is not set."""
    folder = os.environ.get("TRITON_RERANK_DATA")
    if not folder:
        sys.exit(f"Set TRITON_RERANK_DATA to a folder of retrieval sets. {__doc__}")
    return Path(folder)


def read_set(folder: Path) -> RetrievalSet:
    """Read one set; raises OSError or ValueError where it is not as described above."""
    relevance: dict[str, dict[str, float]] = {}
    for query, document, grade in _rows(folder, "qrels.tsv"):
        relevance.setdefault(query, {})[document] = float(grade)
    candidates: dict[str, list[str]] = {}
    for query, document, *_ in _rows(folder, "run.*.tsv"):
        candidates.setdefault(query, []).append(document)
    return RetrievalSet(
        corpus=_texts(folder, "corpus.jsonl"),
        queries=_texts(folder, "queries.jsonl"),
        relevance=relevance,
        candidates=candidates,
        hard=[row[0] for row in _rows(folder, "hard.qids.txt")],
    )


def _lines(folder: Path, pattern: str) -> Iterator[str]:
    path = next(iter(sorted([*folder.glob(pattern), *folder.glob(f"{pattern}.gz")])), None)
    if path is None:
        raise FileNotFoundError(f"no {pattern} in {folder}")
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as stream:
        yield from stream


def _texts(folder: Path, name: str) -> dict[str, str]:
    rows = (json.loads(line) for line in _lines(folder, name))
    return {row["id"]: row["text"] for row in rows}


def _rows(folder: Path, pattern: str) -> Iterator[list[str]]:
    return (line.split() for line in _lines(folder, pattern) if line.strip())
