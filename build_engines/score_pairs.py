# SPDX-License-Identifier: Apache-2.0
"""Query/document pairs -> scores, from an installed version in this process or from a running server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from triton_rerank import InvalidRequest, RankedDocument, RerankClient, RerankError

from build_engines.configs import MAX_TEXT_BYTES, TOKEN_CACHE_BYTES, pinned_version
from build_engines.errors import EngineError, GateError, InstallError, PairsError, ServerError
from build_engines.install import check_installed, read_manifest
from build_engines.pairs import Candidates
from build_engines.plan_check import check_files, target_of
from build_engines.progress import bars
from build_engines.table import Reranker

# For all documents of one query: large models on a CPU take seconds a pair.
SERVED_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Scored:
    """What a version gave for every pair.

    Attributes:
        version: Its number.
        precision: What its manifest says; None behind a server, which does not tell.
        scores: float64[documents] for each query.
        cut: Pairs of more tokens than the version reads; None where the server does not say how many that are.
        seconds: Time for tokenising and scoring, one query after the other.
    """

    version: str
    precision: str | None
    scores: list[NDArray[np.float64]]
    cut: int | None
    seconds: float


def score_installed(
    reranker: Reranker, repository: Path, version: int | None, queries: Sequence[Candidates], console: Console
) -> Scored:
    """Score with the installed files in this process, as the CPU scorer serves them, on all threads.

    Without a version, the one that the ensemble names. Raises InstallError where it is not installed or not whole,
    EngineError for a TensorRT engine, PairsError for a text and GateError for a score that no server would let pass.
    """
    version = pinned_version(repository, reranker) if version is None else version
    check_installed(repository, reranker, version)
    manifest = read_manifest(repository, reranker, version)
    if target_of(manifest) == "gpu":
        raise EngineError(
            f"Version {version} of {reranker.name} is a TensorRT engine, which only its server runs: start "
            f"python -m build_engines serve {reranker.name} and add --url localhost:8001; or name a version for cpu "
            "with --version."
        )
    folders = [repository / model / str(version) for model in (reranker.tokenizer, reranker.scorer)]
    with console.status(f"checking the files of {reranker.name} ..."):
        check_files(folders, manifest)
    from build_engines.serving_code import graph_scoring, pair_encoding  # noqa: PLC0415 - ONNX Runtime, for this alone
    from build_engines.verify import Verifier, encode  # noqa: PLC0415

    try:
        encoder = pair_encoding.PairEncoder.load(
            folders[0], cache_bytes=TOKEN_CACHE_BYTES, max_text_bytes=MAX_TEXT_BYTES
        )
        scorer = Verifier.open(folders[1] / "model.onnx", manifest["precision"])
        if "self_test" in manifest["report"]:
            scorer.check(manifest["report"]["self_test"])
    except (pair_encoding.PairingError, graph_scoring.SelfTestError) as error:
        raise InstallError(f"Version {version} of {reranker.name} cannot be served: {error}") from error
    limits = graph_scoring.Limits(manifest["vocabulary"], manifest["max_length"])
    scores, cut, started = [], 0, time.perf_counter()
    with bars(console)("evaluate", "queries", len(queries)) as advance:
        for query in queries:
            encoded = encode(encoder, query)
            found = scorer.score([graph_scoring.PaddedPairs.check(encoded.arrays, limits)])[0][:, 0]
            if not np.isfinite(found).all():
                raise GateError(
                    f"{reranker.name} version {version}: a score of the query {query.query[:60]!r} is not finite, "
                    "which a server would refuse. Leave the query out and report it."
                )
            scores.append(found.astype(np.float64))
            cut += int((encoded.tokens > limits.max_length).sum())
            advance()
    return Scored(str(version), manifest["precision"], scores, cut, time.perf_counter() - started)


def score_served(
    name: str, url: str, version: int | str | None, queries: Sequence[Candidates], console: Console
) -> Scored:
    """Score with a running server; raise PairsError for a text that it refuses, ServerError for anything else."""
    scores, cut, started = [], [], time.perf_counter()
    try:
        with (
            RerankClient(url, model=name, timeout_s=SERVED_TIMEOUT_S) as client,
            bars(console)("evaluate", "queries", len(queries)) as advance,
        ):
            for query in queries:
                hits = _ask(client, query, version)
                # A version that is loaded in between must not score the rest.
                version = hits[0].model_version
                found = np.empty(len(hits), dtype=np.float64)
                found[[hit.index for hit in hits]] = [hit.score for hit in hits]
                scores.append(found)
                cut += [hit.truncated for hit in hits]
                advance()
    except RerankError as error:
        raise ServerError(str(error)) from error
    known = [value for value in cut if value is not None]
    seconds = time.perf_counter() - started
    return Scored(str(version), None, scores, sum(known) if len(known) == len(cut) else None, seconds)


def _ask(client: RerankClient, query: Candidates, version: int | str | None) -> list[RankedDocument[str]]:
    try:
        return client.rerank(query.query, query.documents, model_version=version)
    except InvalidRequest as error:
        raise PairsError(f"The query {query.query[:60]!r} cannot be scored: {error}") from error
