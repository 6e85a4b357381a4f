# SPDX-License-Identifier: Apache-2.0
"""The tokenizer's model.py with requests merged into one batch, which a test through a server cannot force."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from build_engines.places import TOKENIZER_CODE
from build_engines.serving_code import pair_encoding


class Metric:
    def increment(self, value: float) -> None: ...

    def set(self, value: float) -> None: ...


class MetricFamily:
    COUNTER, GAUGE = range(2)

    def __init__(self, **_settings: Any) -> None: ...

    def Metric(self, labels: dict[str, str]) -> Metric:  # noqa: N802 - Triton's name
        return Metric()


class TritonError(Exception):
    INVALID_ARG, INTERNAL = range(2)

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def tensor(name: str, array: Any) -> SimpleNamespace:
    return SimpleNamespace(name=name, as_numpy=lambda: array)


def request(query: str, document: str) -> dict[str, SimpleNamespace]:
    texts = {"QUERY": query, "DOCUMENT": document}
    return {name: tensor(name, np.array([[text.encode()]], dtype=object)) for name, text in texts.items()}


@pytest.fixture
def model_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    utils = ModuleType("triton_python_backend_utils")
    utils.__dict__.update(
        MetricFamily=MetricFamily,
        TritonError=TritonError,
        Tensor=tensor,
        InferenceResponse=lambda output_tensors=(), error=None: SimpleNamespace(outputs=output_tensors, error=error),
        get_input_tensor_by_name=lambda request, name: request[name],
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    spec = importlib.util.spec_from_file_location("tokenizer_model", Path(TOKENIZER_CODE) / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(model_class: Any) -> Any:
    """A tokenizer that raises on every word but two."""
    tokenizer = Tokenizer(models.WordLevel({"a": 5, "b": 6}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    pairing = pair_encoding.Pairing((0,), (2,), (2,), 12, 16, (16,), 1, (0, 1, 2), "")
    model = model_class.TritonPythonModel()
    model._encoder = pair_encoding.PairEncoder(tokenizer, pairing, cache_bytes=1 << 20, max_text_bytes=100)
    model._metrics = model_class.CacheMetrics("tiny_tokenizer", "1")
    return model


def test_a_text_that_the_tokenizer_cannot_read_fails_its_own_request_alone(model: Any) -> None:
    answers = model.execute([request("a", "b"), request("a", "unheard-of"), request("b", "a b")])
    assert [answer.error is None for answer in answers] == [True, False, True]
    assert answers[1].error.code == TritonError.INTERNAL
    assert "cannot read a text of this request" in str(answers[1].error)
    ids = answers[2].outputs[0].as_numpy()
    assert ids[0, :6].tolist() == [0, 6, 2, 5, 6, 2]


def test_a_refused_request_leaves_its_batch_mates_alone(model: Any) -> None:
    answers = model.execute([request("  ", "b"), request("a", "b"), request("a", "b" * 101)])
    assert [answer.error is None for answer in answers] == [False, True, False]
    assert "QUERY in row 0 is empty or blank" in str(answers[0].error)
    assert "at most 100 are allowed" in str(answers[2].error)
    assert {answers[index].error.code for index in (0, 2)} == {TritonError.INVALID_ARG}
