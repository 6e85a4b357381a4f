# SPDX-License-Identifier: Apache-2.0
"""The two JSON Lines formats of the batch job: rows in, results out. Pure.

    {"query": "what is a panda?", "documents": ["a bear", "a car"], "id": "optional"}

    {"line": 1, "id": "optional", "model_version": "1", "results": [{"index": 0, "score": 7.1, "tokens": 9}, ...]}
    {"line": 2, "error": {"type": "InvalidRequest", "message": "..."}}

Line n of the output is the result of line n of the input; that is what makes a job resumable.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ._errors import InvalidRequest, RerankError
from ._types import RankedDocument

RowId = str | int | float | None


@dataclass(frozen=True, slots=True)
class InputRow:
    """One line of the input as read; `line` counts from 1, `end_bytes` is where the next line starts."""

    line: int
    text: bytes
    end_bytes: int


@dataclass(frozen=True, slots=True)
class RowResult:
    """What became of a row: `error` is None when it was scored; `text` is its output line."""

    row: InputRow
    text: bytes
    error: RerankError | None


def read_fields(row: InputRow) -> dict[str, Any]:
    """The JSON object of a row.

    Raises:
        InvalidRequest: The line is no JSON object, or its id is neither a string nor a number.
    """
    try:
        fields = json.loads(row.text, parse_constant=_refuse_constant)
    except RecursionError as cause:
        raise InvalidRequest("the line is nested too deeply to be a row.") from cause
    except ValueError as cause:
        raise InvalidRequest(f"the line is not JSON in UTF-8: {cause}.") from cause
    if not isinstance(fields, dict):
        raise InvalidRequest('the line must be an object such as {"query": "...", "documents": ["..."]}.')
    row_id = fields.get("id")
    finite = not isinstance(row_id, float) or math.isfinite(row_id)
    if isinstance(row_id, bool) or not isinstance(row_id, str | int | float | None) or not finite:
        raise InvalidRequest("id must be a string or a finite number.")
    return fields


def query_and_documents(fields: dict[str, Any]) -> tuple[Any, list[Any]]:
    """What to rerank; the client checks the texts themselves. Raises InvalidRequest."""
    missing = [name for name in ("query", "documents") if name not in fields]
    if missing:
        raise InvalidRequest(f"the row has no {' and no '.join(missing)}.")
    if not isinstance(fields["documents"], list):
        raise InvalidRequest("documents must be a list of strings or of objects with a text.")
    return fields["query"], fields["documents"]


def row_id_of(row: InputRow) -> RowId:
    """The id of a row, None when it has none or cannot be read."""
    try:
        row_id: RowId = read_fields(row).get("id")
    except InvalidRequest:
        return None
    return row_id


def scored(row: InputRow, row_id: RowId, hits: Sequence[RankedDocument[Any]]) -> RowResult:
    """The result of a row that was scored."""
    results = [{"index": hit.index, "score": hit.score, "tokens": hit.tokens} for hit in hits]
    version = hits[0].model_version if hits else None
    return RowResult(row, _output_line(row, row_id, {"model_version": version, "results": results}), None)


def failed(row: InputRow, row_id: RowId, error: RerankError) -> RowResult:
    """The result of a row that was not."""
    told = {"type": type(error).__name__, "message": str(error)}
    return RowResult(row, _output_line(row, row_id, {"error": told}), error)


def is_failure(output_line: bytes) -> bool:
    """Whether a line of output reports an error; inside a string the quotes would be escaped."""
    return b'"error": {"type": ' in output_line


def _output_line(row: InputRow, row_id: RowId, outcome: dict[str, Any]) -> bytes:
    named = {} if row_id is None else {"id": row_id}
    return json.dumps({"line": row.line, **named, **outcome}).encode() + b"\n"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
