# SPDX-License-Identifier: Apache-2.0
"""`python -m build_engines demo`: the whole path on a sample, from tritonserver's start to its stop."""

from __future__ import annotations

import argparse
import time

from rich.console import Console
from triton_rerank import RankedDocument, RerankClient

from build_engines.errors import ServerError
from build_engines.pairs import SAMPLE, Candidates, read_pairs
from build_engines.serve import check, served_manifests
from build_engines.table import find_reranker
from build_engines.triton_server import ServerOptions, TritonServer

_RERANKER = "light_reranker"
_SHOWN = 4


def run_demo(arguments: argparse.Namespace, console: Console) -> int:
    """Serve light_reranker, rank the sample, print what came back, stop; raise ServerError when it is not built."""
    reranker = find_reranker(_RERANKER, arguments.table)
    if not served_manifests(arguments.repository, [reranker]):
        raise ServerError(f"{_RERANKER} is not built. Run: python -m build_engines build {_RERANKER}")
    sample = read_pairs(SAMPLE)
    checked = check(arguments.repository, [reranker], console)
    options = ServerOptions(
        repository=arguments.repository,
        models=checked.models,
        config_name=checked.config_name,
        extra_args=checked.extra_args,
    )
    with console.status("starting tritonserver ..."):
        server = TritonServer(options, checked.installation)
        server.start()
    try:
        console.print(f"tritonserver (pid {server.pid}) serves {_RERANKER} at {server.grpc_url}\n")
        first = 0
        started = time.perf_counter()
        with RerankClient(server.grpc_url, model=_RERANKER) as client:
            for query in sample:
                hits = client.rerank(query.query, query.documents)
                first += _is_best(query, hits[0].index)
                if query in sample[:_SHOWN]:
                    _print_hits(console, query, hits)
        seconds = time.perf_counter() - started
        pairs = sum(len(query.documents) for query in sample)
        console.print(
            f"{len(sample)} queries, {pairs} pairs in {seconds:.2f} s. The wrong documents are near misses; "
            f"the right one came first for {first} of {len(sample)} queries."
        )
    finally:
        server.stop()
    console.print("tritonserver has stopped.")
    return 0


def _is_best(query: Candidates, index: int) -> bool:
    grades = query.relevance or ()
    return bool(grades) and grades[index] == max(grades)


def _print_hits(console: Console, query: Candidates, hits: list[RankedDocument[str]]) -> None:
    console.print(f"[bold]{query.query}[/bold]")
    for hit in hits[:_SHOWN]:
        line = f"{hit.score:8.2f}  {hit.document}"
        console.print(line if len(line) <= console.width else f"{line[: console.width - 1]}…", markup=False)
    console.print()
