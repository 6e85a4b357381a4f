# SPDX-License-Identifier: Apache-2.0
"""Ranking quality of a reranker's FP32 and INT8 graphs beside BM25: nDCG@10 over the candidates BM25 found.

    TRITON_RERANK_DATA=DIR python -m perf.quality light_reranker --sets squad_dev nq_oracle

It scores with the code that serves, in this process, on what `python -m build_engines build NAME` left in build/.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
from rich.progress import track

from build_engines.fetch import fetch
from build_engines.pairs import Candidates
from build_engines.quality import ndcg_at_10
from build_engines.table import find_reranker
from build_engines.verify import Verifier
from perf.data import RetrievalSet, data_folder, read_set
from perf.machine import stamp


def main() -> None:
    """Print one line for each set and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="light_reranker")
    parser.add_argument("--sets", nargs="+", default=["squad_dev", "nq_oracle"])
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
        _print_precisions(arguments.name, arguments.build_folder, retrieval, queries)


def _print_precisions(name: str, build_folder: Path, retrieval: RetrievalSet, queries: list[str]) -> None:
    reranker = find_reranker(name)
    candidates = [
        Candidates(retrieval.queries[q], tuple(retrieval.corpus[d] for d in retrieval.candidates[q])) for q in queries
    ]
    vocabulary = int(fetch(reranker).config["vocab_size"])
    verifier = Verifier(reranker, build_folder / name / "pairing", vocabulary, candidates)
    for precision, step in (("fp32", "export"), ("int8", "quantize")):
        graph = build_folder / name / step / "model.onnx"
        if not graph.exists():
            continue
        scorer = verifier.open(graph, precision)
        scores = [scorer.score([r])[0][:, 0] for r in track(verifier.requests, precision, transient=True)]
        found = np.mean(
            [
                _ndcg(retrieval, query, np.asarray(values, dtype=np.float64))
                for query, values in zip(queries, scores, strict=True)
            ]
        )
        print(f"  {precision.upper()}  nDCG@10 {found:.4f}", flush=True)


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
