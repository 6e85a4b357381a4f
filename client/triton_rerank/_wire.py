# SPDX-License-Identifier: Apache-2.0
"""The tensor contract: texts -> request tensors, answers -> checked arrays. No connection in sight.

| tensor | type | shape | meaning |
|---|---|---|---|
| QUERY, DOCUMENT | BYTES | [rows, 1] | the texts of one (query, document) pair per row, UTF-8 |
| SCORE | FP32 | [rows, 1] | the raw logit of the pair |
| TOKENS | INT32 | [rows, 1] | tokens of the pair before truncation |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton

from ._errors import ServerError, error
from ._split import row_spans


@dataclass(frozen=True, slots=True)
class Rows:
    """The (query, document) pairs of one call, as UTF-8.

    Attributes:
        noun: What the caller calls a row, for messages: `documents` or `pairs`.
        queries: One per row, or a single one that belongs to every row.
        documents: One per row.
    """

    noun: str
    queries: Sequence[bytes]
    documents: Sequence[bytes]

    def query(self, row: int) -> bytes:
        """The query of a row."""
        return self.queries[row if len(self.queries) > 1 else 0]

    def lengths_bytes(self) -> list[int]:
        """Length of each row, by which rows are put together."""
        return [len(self.query(row)) + len(document) for row, document in enumerate(self.documents)]

    def naming(self, rows: Sequence[int]) -> str:
        """How messages name some of the rows."""
        return f"{self.noun} {row_spans(rows)} ({len(rows)} of {len(self.documents)})"


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the config of a served reranker says.

    Attributes:
        max_batch_size: Rows a request may have.
        max_length: Tokens of a pair that are read; None when the config does not say.
    """

    max_batch_size: int
    max_length: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for some rows of a call.

    Attributes:
        rows: Row numbers within the call.
        scores: float32[rows], finite.
        tokens: int32[rows].
        model_version: The version that scored them.
    """

    rows: tuple[int, ...]
    scores: npt.NDArray[np.float32]
    tokens: npt.NDArray[np.int32]
    model_version: str


@dataclass(frozen=True, slots=True)
class Scored:
    """All rows of a call in the caller's order.

    Attributes:
        scores: float32[rows], raw logits.
        tokens: int32[rows].
        max_length: See ModelLimits.
        model_version: The one version that scored every row.
    """

    scores: npt.NDArray[np.float32]
    tokens: npt.NDArray[np.int32]
    max_length: int | None
    model_version: str


NO_ROWS = Scored(np.zeros(0, np.float32), np.zeros(0, np.int32), None, "")


def infer_inputs(rows: Rows, chosen: Sequence[int]) -> list[Any]:
    """The two request tensors for the chosen rows, as `tritonclient.grpc.InferInput`."""
    return [
        _bytes_input("QUERY", [rows.query(row) for row in chosen]),
        _bytes_input("DOCUMENT", [rows.documents[row] for row in chosen]),
    ]


def read_limits(config: Any, where: str) -> ModelLimits:
    """Read a ModelConfig message.

    Raises:
        ServerError: The model is not a reranker, does not batch, or states no usable max_length.
    """
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    if not (inputs >= {"QUERY", "DOCUMENT"} and outputs >= {"SCORE", "TOKENS"}):
        raise error(
            ServerError,
            f"the model is not a reranker: it maps {sorted(inputs)} to {sorted(outputs)}, "
            "a reranker maps QUERY and DOCUMENT to SCORE and TOKENS",
            where,
        )
    if config.max_batch_size < 1:
        raise error(ServerError, f"the model does not batch: its max_batch_size is {config.max_batch_size}", where)
    if "max_length" not in config.parameters:
        return ModelLimits(config.max_batch_size, None)
    text = config.parameters["max_length"].string_value
    if not (text.isascii() and text.isdigit()):
        raise error(ServerError, f"the model's parameter max_length must be a number of tokens, got {text!r}", where)
    return ModelLimits(config.max_batch_size, int(text))


def read_answer(result: Any, rows: Rows, chosen: tuple[int, ...], where: str) -> Answer:
    """Check a `tritonclient.grpc.InferResult` and take its arrays.

    Raises:
        ServerError: A tensor is missing or has another type or shape, or a score is not finite.
    """
    scores = _column(result, "SCORE", np.float32, len(chosen), where)
    tokens = _column(result, "TOKENS", np.int32, len(chosen), where)
    bad = [row for row, finite in zip(chosen, np.isfinite(scores), strict=True) if not finite]
    if bad:
        raise error(ServerError, f"the scores of {rows.naming(bad)} are not finite numbers", where)
    return Answer(chosen, scores, tokens, str(result.get_response().model_version))


def outdated(answers: Sequence[Answer]) -> tuple[str, list[tuple[int, ...]]]:
    """The newest version among the answers, and the rows of every answer that an older one gave.

    A roll-out in the middle of a call lets two versions answer it, and their scores cannot be compared.
    """
    newest = max((answer.model_version for answer in answers), key=lambda version: (len(version), version))
    return newest, [answer.rows for answer in answers if answer.model_version != newest]


def put_together(answers: Iterable[Answer], rows: Rows, limits: ModelLimits, model_version: str) -> Scored:
    """Scatter the answers back into the caller's order; of two for one row the later counts."""
    scores = np.full(len(rows.documents), np.nan, dtype=np.float32)
    tokens = np.zeros(len(rows.documents), dtype=np.int32)
    for answer in answers:
        scores[list(answer.rows)] = answer.scores
        tokens[list(answer.rows)] = answer.tokens
    return Scored(scores, tokens, limits.max_length, model_version)


def _bytes_input(name: str, texts: list[bytes]) -> Any:
    # dtype object: numpy's own bytes type drops trailing NUL characters.
    column = np.array(texts, dtype=np.object_).reshape(-1, 1)
    tensor = triton.InferInput(name, list(column.shape), "BYTES")
    tensor.set_data_from_numpy(column)
    return tensor


def _column(result: Any, name: str, dtype: type[np.generic], count: int, where: str) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] | None = result.as_numpy(name)
    except ValueError as cause:
        raise error(ServerError, f"the tensor {name} cannot be read: {cause}", where) from cause
    expected = f"{np.dtype(dtype).name}[{count}, 1]"
    if array is None:
        raise error(ServerError, f"the answer lacks the tensor {name} {expected}", where)
    if array.dtype != dtype or array.shape != (count, 1):
        given = f"{array.dtype.name}{list(array.shape)}"
        raise error(ServerError, f"the tensor {name} must be {expected}, got {given}", where)
    return array[:, 0]
