# SPDX-License-Identifier: Apache-2.0
"""A file of pairs is read whole, or refused with the line that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from build_engines.errors import PairsError
from build_engines.pairs import SAMPLE, Candidates, read_pairs

GOOD: dict[str, Any] = {"query": "panda", "documents": ["a bear", "a bread"]}


def write(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_queries_documents_and_grades_are_read_in_order(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", GOOD, "", GOOD | {"query": "熊猫", "relevance": [0, 2.5], "id": 3})
    assert read_pairs(path) == [
        Candidates("panda", ("a bear", "a bread")),
        Candidates("熊猫", ("a bear", "a bread"), (0, 2.5)),
    ]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0c", "\n", "\r"])
def test_line_separators_inside_a_text_do_not_end_the_line(tmp_path: Path, separator: str) -> None:
    text = f"one{separator}two"
    (row,) = read_pairs(write(tmp_path / "pairs.jsonl", GOOD | {"documents": [text, "other"]}))
    assert row.documents[0] == text


def test_windows_line_ends_are_read(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_bytes(f"{json.dumps(GOOD)}\r\n\r\n{json.dumps(GOOD)}\r\n".encode())
    assert len(read_pairs(tmp_path / "pairs.jsonl")) == 2


def test_a_document_may_be_an_object_with_a_text_as_in_a_log_of_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", {"query": "panda", "documents": [{"id": 1, "text": "a bear"}]})
    assert read_pairs(path)[0].documents == ("a bear",)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "expected"),
        ("[]", "expected"),
        ("null", "expected"),
        ({"documents": ["a", "b"]}, "expected"),
        (GOOD | {"query": " \n"}, "query must be a text"),
        (GOOD | {"query": 3}, "query must be a text"),
        (GOOD | {"documents": []}, "documents must be a list of at least one text"),
        (GOOD | {"documents": "text"}, "documents must be a list of at least one text"),
        (GOOD | {"documents": ["a", None]}, "every document a text"),
        (GOOD | {"documents": ["a", {"body": "b"}]}, "every document a text"),
        (r'{"query": "panda", "documents": ["half a \ud83d"]}', "cannot be written as UTF-8: surrogates not allowed"),
        (GOOD | {"relevance": [1]}, "one number of at least 0 for each of 2 documents"),
        (GOOD | {"relevance": [1, -1]}, "one number of at least 0"),
        (GOOD | {"relevance": [1, "2"]}, "one number of at least 0"),
        (GOOD | {"relevance": 1}, "one number of at least 0"),
        (GOOD | {"relevance": [1, float("nan")]}, "one number of at least 0"),
    ],
    ids=str,
)
def test_a_wrong_line_is_named(tmp_path: Path, row: Any, says: str) -> None:
    path = write(tmp_path / "pairs.jsonl", GOOD, "", row)
    with pytest.raises(PairsError, match=says) as caught:
        read_pairs(path)
    assert f"{path}, line 3:" in str(caught.value)


def test_files_without_pairs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PairsError, match="holds no pairs"):
        read_pairs(write(tmp_path / "empty.jsonl", "", " "))
    with pytest.raises(PairsError, match="Cannot read pairs"):
        read_pairs(tmp_path / "missing.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(PairsError, match="Cannot read pairs"):
        read_pairs(tmp_path / "binary.jsonl")


def test_the_sample_has_a_grade_above_zero_for_every_query() -> None:
    rows = read_pairs(SAMPLE)
    assert len(rows) >= 10
    assert all(row.relevance is not None and max(row.relevance) > 0 for row in rows)
