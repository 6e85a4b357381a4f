# SPDX-License-Identifier: Apache-2.0
"""Requests as any Triton client could send them, wrong ones included."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

# Nothing in these tests takes this long; a server that no longer answers shall fail them, not hang them.
TIMEOUT_S = 60.0

Answer: TypeAlias = list[float] | InferenceServerException


def tensor(name: str, values: npt.ArrayLike, datatype: str) -> Any:
    """An input of any name, type and shape."""
    kinds: dict[str, type[Any]] = {"BYTES": np.object_, "INT64": np.int64, "INT32": np.int32, "FP32": np.float32}
    array = np.array(values, dtype=kinds[datatype])
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def column(name: str, texts: Sequence[str | bytes]) -> Any:
    """Texts in the shape that the contract asks for, [rows, 1]."""
    rows = np.empty((len(texts), 1), dtype=np.object_)
    for row, text in enumerate(texts):
        rows[row, 0] = text.encode() if isinstance(text, str) else text
    return tensor(name, rows, "BYTES")


def pairs(queries: Sequence[str | bytes], documents: Sequence[str | bytes]) -> list[Any]:
    """The inputs of a reranker; one query stands for every row."""
    if len(queries) == 1:
        queries = [queries[0]] * len(documents)
    return [column("QUERY", queries), column("DOCUMENT", documents)]


def arrays(ids: npt.ArrayLike, mask: npt.ArrayLike, types: npt.ArrayLike | None = None) -> list[Any]:
    """The inputs of a scorer."""
    made = [tensor("input_ids", ids, "INT64"), tensor("attention_mask", mask, "INT64")]
    return made if types is None else [*made, tensor("token_type_ids", types, "INT64")]


def scores(client: Any, model: str, inputs: Sequence[Any], version: str = "") -> list[float]:
    """Send one request and return its scores, float32 as they came."""
    return _scores(client.infer(model, inputs, version, client_timeout=TIMEOUT_S))


def refusal(client: Any, model: str, inputs: Sequence[Any], version: str = "") -> tuple[str, str]:
    """The gRPC status and the message of a request that must not succeed."""
    try:
        found = scores(client, model, inputs, version)
    except InferenceServerException as error:
        return str(error.status()).removeprefix("StatusCode."), str(error.message())
    raise AssertionError(f"{model} answered {found}")


def scores_at_once(client: Any, requests: Sequence[tuple[str, Sequence[Any]]]) -> list[Answer]:
    """Send all requests without waiting for any; return scores or the error of each."""
    answers: list[Answer | None] = [None] * len(requests)
    missing = threading.Semaphore(0)

    def keep(index: int, result: Any, error: InferenceServerException | None) -> None:
        answers[index] = _scores(result) if error is None else error
        missing.release()

    for index, (model, inputs) in enumerate(requests):
        client.async_infer(
            model, inputs, lambda result, error, i=index: keep(i, result, error), client_timeout=TIMEOUT_S
        )
    for _ in requests:
        assert missing.acquire(timeout=TIMEOUT_S + 5), "a request was never answered"
    return [answer for answer in answers if answer is not None]


def executions(client: Any, model: str) -> tuple[int, int]:
    """Rows scored so far, and executions that this took."""
    (found,) = client.get_inference_statistics(model).model_stats
    return int(found.inference_count), int(found.execution_count)


def _scores(result: Any) -> list[float]:
    array = result.as_numpy("SCORE")
    assert array.dtype == np.float32
    assert array.ndim == 2
    assert array.shape[1] == 1
    return [float(score) for score in array[:, 0]]
