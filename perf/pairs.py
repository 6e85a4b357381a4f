# SPDX-License-Identifier: Apache-2.0
"""Queries of retrieval sets with their BM25 candidates as JSON lines: what `build --pairs` and `--calibration` read.

    TRITON_RERANK_DATA=DIR python -m perf.pairs hard squad_dev nq_oracle --queries 50 > verify.jsonl
    TRITON_RERANK_DATA=DIR python -m perf.pairs easy squad_dev nq_oracle --queries 200 > calibrate.jsonl

Hard queries are those for which BM25 does not put the answer first; easy ones are the others.
"""

from __future__ import annotations

import argparse
import json
import random

from perf.data import data_folder, read_set


def main() -> None:
    """Print one line for each query drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["hard", "easy"])
    parser.add_argument("sets", nargs="+")
    parser.add_argument("--queries", type=int, default=50, help="of each set, drawn with a fixed seed (default: 50)")
    arguments = parser.parse_args()
    for name in arguments.sets:
        retrieval = read_set(data_folder() / name)
        hard = set(retrieval.hard)
        queries = [query for query in retrieval.queries if (query in hard) == (arguments.kind == "hard")]
        for query in random.Random(0).sample(queries, min(arguments.queries, len(queries))):
            candidates, grades = retrieval.candidates[query], retrieval.relevance[query]
            row = {
                "query": retrieval.queries[query],
                "documents": [retrieval.corpus[document] for document in candidates],
                "relevance": [grades.get(document, 0.0) for document in candidates],
            }
            print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    main()
