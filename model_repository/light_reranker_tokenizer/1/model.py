# SPDX-License-Identifier: Apache-2.0
"""Triton model `<reranker>_tokenizer`: QUERY, DOCUMENT -> input_ids, attention_mask(, token_type_ids), TOKENS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray
from pair_encoding import EncodedPairs, PairEncoder, PairingError, TextError
from text_ids import TextIds


class TritonPythonModel:
    """One tokenizer instance: the requests of a batch are tokenised together and answered one by one."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the files of this version; Triton reports a PairingError as the reason why the model did not load."""
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        folder = Path(args["model_repository"]) / args["model_version"]
        try:
            self._encoder = PairEncoder.load(
                folder,
                cache_bytes=int(parameters["token_cache_bytes"]),
                max_text_bytes=int(parameters["max_text_bytes"]),
            )
        except PairingError as error:
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from error
        produced = {"token_type_ids"} if self._encoder.pairing.first_segment_middle is not None else set()
        declared = {output["name"] for output in config["output"]} & {"token_type_ids"}
        if produced != declared:
            raise pb_utils.TritonModelException(
                f"{args['model_name']}: config.pbtxt declares {declared or 'no token_type_ids'}, the built files give "
                f"{produced or 'none'}. Set segment_ids in rerankers.toml, then: python -m build_engines configs."
            )
        self._metrics = CacheMetrics(args["model_name"], args["model_version"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request: arrays, or an error that concerns this request alone."""
        answers: list[Any] = [None] * len(requests)
        accepted: list[tuple[int, list[bytes], list[bytes]]] = []
        texts: dict[bytes, str] = {}
        for index, request in enumerate(requests):
            try:
                queries, documents = _rows(request, "QUERY"), _rows(request, "DOCUMENT")
                texts |= self._encoder.request_texts(queries, documents)
                accepted.append((index, queries, documents))
            except TextError as error:
                answers[index] = _error(str(error), pb_utils.TritonError.INVALID_ARG)
        try:
            ids = self._encoder.text_ids(texts)
        except Exception:  # whatever the tokenizers library raises, it does not say for which text
            ids = None
        for index, queries, documents in accepted:
            answers[index] = self._answer(queries, documents, ids)
        self._metrics.publish(self._encoder)
        return answers

    def _answer(self, queries: list[bytes], documents: list[bytes], ids: dict[bytes, TextIds] | None) -> Any:
        try:
            if ids is None:
                return _response(self._encoder.encode(queries, documents))
            return _response(self._encoder.assemble(queries, documents, ids))
        except Exception as error:
            return _error(f"The tokenizer cannot read a text of this request: {error}", pb_utils.TritonError.INTERNAL)


class CacheMetrics:
    """The token cache on Triton's metrics endpoint. The families must outlive their metrics."""

    def __init__(self, model: str, version: str) -> None:
        kind = pb_utils.MetricFamily
        labels = {"model": model, "version": version}
        self._families = [
            kind(name="rerank_token_cache_hits_total", description="Texts found in the token cache", kind=kind.COUNTER),
            kind(name="rerank_token_cache_misses_total", description="Texts tokenised anew", kind=kind.COUNTER),
            kind(name="rerank_token_cache_bytes", description="Bytes held by the token cache", kind=kind.GAUGE),
        ]
        self._hits, self._misses, self._bytes = (family.Metric(labels=labels) for family in self._families)
        self._published_hits = 0
        self._published_misses = 0

    def publish(self, encoder: PairEncoder) -> None:
        """Add what happened since the last call."""
        cache = encoder.cache
        self._hits.increment(cache.hits - self._published_hits)
        self._misses.increment(cache.misses - self._published_misses)
        self._bytes.set(cache.size_bytes)
        self._published_hits, self._published_misses = cache.hits, cache.misses


def _rows(request: Any, name: str) -> list[bytes]:
    texts: NDArray[np.object_] = pb_utils.get_input_tensor_by_name(request, name).as_numpy()  # object[pairs, 1]
    rows: list[bytes] = texts.ravel().tolist()
    return rows


def _error(message: str, code: int) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


def _response(pairs: EncodedPairs) -> Any:
    arrays = pairs.arrays | {"TOKENS": pairs.tokens}
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(name, array) for name, array in arrays.items()])
