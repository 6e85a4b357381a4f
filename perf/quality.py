# SPDX-License-Identifier: Apache-2.0
"""Ranking quality of a reranker's precisions beside BM25: nDCG@10 over the candidates BM25 found, and how they agree.

    TRITON_RERANK_DATA=DIR python -m perf.quality light_reranker --sets squad_dev nq_oracle
    TRITON_RERANK_DATA=DIR python -m perf.quality light_reranker --target gpu

It scores with the code that serves, in this process, on what `python -m build_engines build NAME` left in build/. For
the gpu target, FP16 or BF16 and INT8 are the graphs that the build verified, rounded on this CPU as the engine rounds.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from build_engines.fetch import fetch
from build_engines.pairs import Candidates
from build_engines.quality import ndcg_at_10
from build_engines.serving_code import graph_scoring
from build_engines.steps import Steps
from build_engines.switched import SwitchedScorer
from build_engines.table import find_reranker
from build_engines.verify import Scores, Verifier
from build_engines.verify_gpu import agreement
from perf.data import RetrievalSet, data_folder, read_set
from perf.machine import stamp


def main() -> None:
    """Print one line for each set and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="light_reranker")
    parser.add_argument("--sets", nargs="+", default=["squad_dev", "nq_oracle"])
    parser.add_argument("--target", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--queries", type=int, default=0, help="only this many hard queries, drawn with a fixed seed")
    parser.add_argument("--build-folder", type=Path, default=Path("build"))
    arguments = parser.parse_args()
    print(stamp())
    for name in arguments.sets:
        retrieval = read_set(data_folder() / name)
        queries = retrieval.hard
        if arguments.queries:
            queries = random.Random(0).sample(queries, min(arguments.queries, len(queries)))
        print(f"{name}: {len(queries)} queries that BM25 gets wrong, its first candidates reranked")
        print(f"  BM25  nDCG@10 {_bm25(retrieval, queries):.4f}")
        _print_precisions(arguments.name, arguments.target, arguments.build_folder / arguments.name, retrieval, queries)


def _print_precisions(name: str, target: str, folder: Path, retrieval: RetrievalSet, queries: list[str]) -> None:
    reranker = find_reranker(name)
    candidates = [
        Candidates(retrieval.queries[q], tuple(retrieval.corpus[d] for d in retrieval.candidates[q])) for q in queries
    ]
    vocabulary = int(fetch(reranker).config["vocab_size"])
    verifier = Verifier(reranker, folder / "pairing", vocabulary, candidates)
    fp32: Scores = []
    for precision, scorer in _scorers(verifier, target, folder):
        scores = [scorer.score([r])[0][:, 0] for r in track(verifier.requests, precision, transient=True)]
        fp32 = fp32 or scores
        found = np.mean([_ndcg(retrieval, q, s.astype(np.float64)) for q, s in zip(queries, scores, strict=True)])
        same = {key: value for key, value in agreement(verifier, fp32, scores).items() if value is not None}
        figures = "  ".join(f"{key.replace('_', ' ')} {value:.4f}" for key, value in same.items())
        print(f"  {precision.upper()}  nDCG@10 {found:.4f}  beside FP32: {figures}", flush=True)


def _scorers(verifier: Verifier, target: str, folder: Path) -> Iterator[tuple[str, graph_scoring.GraphScorer]]:
    """Yield each precision's scorer, FP32 first; one at a time, since a large model is not wanted twice in memory."""
    yield "fp32", verifier.open(folder / "export" / "model.onnx", "fp32")
    if target == "cpu":
        if (folder / "quantize" / "model.onnx").exists():
            yield "int8", verifier.open(folder / "quantize" / "model.onnx", "int8")
        return
    steps = Steps(folder, Console())
    facts, quantized = steps.finished("verify-gpu").facts, steps.finished("quantize-gpu")
    layers = json.loads((quantized.folder / "layers.json").read_text(encoding="utf-8"))
    scorer = SwitchedScorer(quantized.folder / "switched.onnx", layers)
    for precision, int8 in ((facts["base_precision"], []), ("int8", facts["int8_layers"] or layers)):
        scorer.choose(int8)
        yield precision, scorer


def _bm25(retrieval: RetrievalSet, queries: list[str]) -> float:
    return float(
        np.mean([_ndcg(retrieval, q, -np.arange(len(retrieval.candidates[q]), dtype=np.float64)) for q in queries])
    )


def _ndcg(retrieval: RetrievalSet, query: str, scores: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    grades = retrieval.relevance[query]
    return ndcg_at_10(
        scores, [grades.get(d, 0.0) for d in retrieval.candidates[query]], all_relevant=list(grades.values())
    )


if __name__ == "__main__":
    main()
