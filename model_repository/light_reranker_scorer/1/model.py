# SPDX-License-Identifier: Apache-2.0
"""Triton model `<reranker>_scorer` on the CPU: input_ids, attention_mask(, token_type_ids) -> SCORE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from graph_scoring import GraphScorer, InputError, Limits, PaddedPairs, SelfTestError, available_threads


class TritonPythonModel:
    """One scorer instance: the rows of all requests in a batch are scored together and answered one by one."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the graph of this version; its manifest says which limits and precision it has."""
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        folder = Path(args["model_repository"]) / args["model_version"]
        try:
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise pb_utils.TritonModelException(
                f"{args['model_name']}: {error}. Build it: python -m build_engines build NAME --target cpu."
            ) from error
        for name, built in manifest["files"].items():
            if name.startswith("model."):  # the manifest also names the tokenizer's files
                _check_size(folder / name, built["bytes"])
        self._limits = Limits(manifest["vocabulary"], manifest["max_length"])
        # Dynamic INT8 takes its activation scales from all rows of a run; one row a run keeps a pair's score its own.
        tokens_per_run = 0 if manifest["precision"] == "int8" else int(parameters["tokens_per_run"])
        threads = int(parameters["threads"]) or available_threads()
        self._scorer = GraphScorer(folder / "model.onnx", threads=threads, tokens_per_run=tokens_per_run)
        declared = {entry["name"] for entry in config["input"]}
        if declared != self._scorer.input_names:
            raise pb_utils.TritonModelException(
                f"{args['model_name']}: the graph takes {sorted(self._scorer.input_names)}, the config declares "
                f"{sorted(declared)}. Set segment_ids in rerankers.toml, then: python -m build_engines configs."
            )
        try:
            _check_verdict(manifest.get("verdict"))
            if "self_test" in manifest["report"]:
                self._scorer.check(manifest["report"]["self_test"])
        except SelfTestError as error:
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from error
        self._metrics = TokenMetrics(args["model_name"], args["model_version"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request: scores, or an error that concerns this request alone."""
        answers: list[Any] = [None] * len(requests)
        accepted: list[tuple[int, PaddedPairs]] = []
        for index, request in enumerate(requests):
            arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            try:
                accepted.append((index, PaddedPairs.check(arrays, self._limits)))
            except InputError as error:
                answers[index] = _error(str(error), pb_utils.TritonError.INVALID_ARG)
        if accepted:
            for (index, _), answer in zip(accepted, self._score([pairs for _, pairs in accepted]), strict=True):
                answers[index] = answer
            self._metrics.publish(self._scorer)
        return answers

    def _score(self, requests: list[PaddedPairs]) -> list[Any]:
        try:
            return [_response(rows) for rows in self._scorer.score(requests)]
        except Exception as error:  # onnxruntime does not say for which rows
            if len(requests) > 1:
                return [self._score([pairs])[0] for pairs in requests]
            return [_error(f"The graph cannot score this request: {error}", pb_utils.TritonError.INTERNAL)]


class TokenMetrics:
    """Tokens scored and tokens run, on Triton's metrics endpoint; their ratio is what padding costs."""

    def __init__(self, model: str, version: str) -> None:
        kind = pb_utils.MetricFamily
        labels = {"model": model, "version": version}
        self._families = [
            kind(name="rerank_real_tokens_total", description="Tokens of the scored pairs", kind=kind.COUNTER),
            kind(name="rerank_run_tokens_total", description="Tokens run, padding included", kind=kind.COUNTER),
        ]
        self._real, self._run = (family.Metric(labels=labels) for family in self._families)

    def publish(self, scorer: GraphScorer) -> None:
        """Add what the last call of the scorer did."""
        self._real.increment(scorer.real_tokens)
        self._run.increment(scorer.run_tokens)


def _check_size(path: Path, expected: int) -> None:
    found = path.stat().st_size if path.exists() else None
    if found != expected:
        has = "is missing" if found is None else f"has {found} bytes"
        raise pb_utils.TritonModelException(
            f"{path} {has}, the build wrote {expected} bytes. Delete the version folder and build again."
        )


def _check_verdict(verdict: Any) -> None:
    # The graph has no vocabulary to ask; the build has asked, and the self-test's score is of that very prompt.
    if verdict is not None and not verdict["mass"] >= verdict["floor"]:
        words = " + ".join(f"P({word})" for word in (verdict["yes"], verdict["no"]) if word)
        raise SelfTestError(
            f"{words} was {verdict['mass']:.2g} when it was built, at least {verdict['floor']:g} is asked. The "
            "checkpoint does not answer its prompt; correct it and build again."
        )


def _response(scores: Any) -> Any:
    bad = np.flatnonzero(~np.isfinite(scores))
    if bad.size:
        return _error(
            f"The score of row {bad[0]} is not finite. The model cannot score this pair; leave it out and report it.",
            pb_utils.TritonError.INTERNAL,
        )
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("SCORE", scores)])


def _error(message: str, code: int) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
