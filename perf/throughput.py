# SPDX-License-Identifier: Apache-2.0
"""Pairs per second through the whole path, beside the same graph driven directly by onnxruntime in this process.

    TRITON_RERANK_DATA=DIR python -m perf.throughput light_reranker

Served: client, gRPC, ensemble, tokenizer, scorer; 8 requests in flight, 32 real passages each. Direct: the ids of the
same pairs, encoded beforehand, in the same micro-batches on the same number of one-thread runs; nothing else. Rounds
alternate; the figure is the median of their ratios.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from triton_rerank import RerankClient

from build_engines.configs import TOKENS_PER_RUN, pinned_version
from build_engines.install import read_manifest
from build_engines.places import REPOSITORY
from build_engines.serving_code import graph_scoring, pair_encoding
from build_engines.table import Reranker, find_reranker
from build_engines.triton_server import ServerOptions, TritonServer
from perf.data import RetrievalSet, data_folder, read_set
from perf.machine import stamp

Request = tuple[str, list[str]]


def main() -> None:
    """Alternate both ways of scoring and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="light_reranker")
    parser.add_argument("--set", default="squad_dev")
    parser.add_argument("--documents", type=int, default=32, help="per request (32)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight (8)")
    parser.add_argument("--requests", type=int, default=32, help="per round (32)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--unseen", action="store_true", help="make every passage new to the token cache")
    arguments = parser.parse_args()
    print(stamp())
    reranker = find_reranker(arguments.name)
    version = pinned_version(REPOSITORY, reranker)
    precision = read_manifest(REPOSITORY, reranker, version)["precision"]
    rounds = make_rounds(read_set(data_folder() / arguments.set), arguments)
    direct = Direct(reranker, version, precision)
    served_rates, direct_rates = [], []
    with TritonServer(ServerOptions(repository=REPOSITORY, models=(reranker.name,), config_name="cpu")) as server:
        clients = [RerankClient(server.grpc_url, model=reranker.name) for _ in range(arguments.concurrency)]
        for number, requests in enumerate(rounds):
            prepared = direct.prepare(requests)
            pairs = sum(len(documents) for _, documents in requests)
            scores = timed(lambda r=requests: serve(clients, r))  # type: ignore[misc]
            expected = timed(lambda p=prepared: direct.score(p))  # type: ignore[misc]
            check_equal(scores[0], expected[0], precision)
            if number:  # the first round warms both up
                served_rates.append(pairs / scores[1])
                direct_rates.append(pairs / expected[1])
        for client in clients:
            client.close()
    ratios = [a / b for a, b in zip(served_rates, direct_rates, strict=True)]
    print(
        f"{reranker.name} version {version} {precision}, {arguments.documents} documents a request, "
        f"{arguments.concurrency} in flight, {'every passage new' if arguments.unseen else 'passages of one corpus'}"
    )
    print(
        f"served {statistics.median(served_rates):.1f} pairs/s, direct {statistics.median(direct_rates):.1f} pairs/s; "
        f"ratio {statistics.median(ratios):.3f} (rounds {', '.join(f'{r:.3f}' for r in ratios)})"
    )


def make_rounds(retrieval: RetrievalSet, arguments: argparse.Namespace) -> list[list[Request]]:
    """Return rounds of different requests: a query, its BM25 candidates, and other passages up to the count wanted."""
    rng = random.Random(0)
    queries = rng.sample(sorted(retrieval.candidates), arguments.requests * (arguments.rounds + 1))
    passages = sorted(retrieval.corpus)
    counter = itertools.count()
    requests = []
    for query in queries:
        ids = list(dict.fromkeys([*retrieval.candidates[query], *rng.sample(passages, arguments.documents)]))
        texts = [retrieval.corpus[document] for document in ids[: arguments.documents]]
        if arguments.unseen:
            texts = [f"{text} ({next(counter)})" for text in texts]
        requests.append((retrieval.queries[query], texts))
    return [requests[i : i + arguments.requests] for i in range(0, len(requests), arguments.requests)]


def serve(clients: list[RerankClient], requests: list[Request]) -> list[list[float]]:
    """Score every request, one client for each thread."""
    free = list(clients)

    def one(request: Request) -> list[float]:
        client = free.pop()
        try:
            return client.score([(request[0], document) for document in request[1]])
        finally:
            free.append(client)

    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(one, requests))


class Direct:
    """onnxruntime alone: feeds made beforehand, one-thread sessions side by side."""

    def __init__(self, reranker: Reranker, version: int, precision: str) -> None:
        self.threads = graph_scoring.available_threads()
        self.tokens_per_run = 0 if precision == "int8" else TOKENS_PER_RUN
        self.max_batch_size = reranker.max_batch_size
        folder = REPOSITORY / reranker.tokenizer / str(version)
        self.encoder = pair_encoding.PairEncoder.load(folder, cache_bytes=0, max_text_bytes=1 << 20)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        if not graph_scoring.has_vnni():
            options.add_session_config_entry("session.x64quantprecision", "1")
        graph = Path(REPOSITORY / reranker.scorer / str(version) / "model.onnx")
        self.session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def prepare(self, requests: list[Request]) -> list[Any]:
        """Return the batches Triton would form at best (full ones), each a list of (rows, feed)."""
        encoded = [self.encoder.encode([q.encode()] * len(d), [x.encode() for x in d]) for q, d in requests]
        per_batch = max(1, self.max_batch_size // len(requests[0][1]))
        return [self._feeds(encoded[i : i + per_batch]) for i in range(0, len(encoded), per_batch)]

    def score(self, batches: list[Any]) -> list[NDArray[np.float32]]:
        """Run every batch, its runs side by side."""
        scores = []
        with ThreadPoolExecutor(self.threads) as pool:
            for rows, runs in batches:
                out = np.empty(rows, dtype=np.float32)

                def run(job: tuple[NDArray[np.int64], dict[str, Any]], out: NDArray[np.float32] = out) -> None:
                    out[job[0]] = self.session.run(None, job[1])[0][:, 0]

                list(pool.map(run, runs))
                scores.append(out)
        return scores

    def _feeds(self, encoded: list[pair_encoding.EncodedPairs]) -> tuple[int, list[Any]]:
        width = max(pairs.input_ids.shape[1] for pairs in encoded)

        def joined(name: str) -> NDArray[np.int64]:
            arrays = [getattr(pairs, name) for pairs in encoded]
            return np.concatenate([np.pad(a, ((0, 0), (0, width - a.shape[1]))) for a in arrays])

        names = [node.name for node in self.session.get_inputs()]
        arrays = {name: joined(name) for name in names}
        lengths = arrays["attention_mask"].sum(axis=1)
        plan = graph_scoring.plan_runs(lengths, tokens_per_run=self.tokens_per_run, threads=self.threads)
        return len(lengths), [(rows, {n: a[rows, : lengths[rows[0]]] for n, a in arrays.items()}) for rows in plan]


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what `work` returned and the seconds it took."""
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def check_equal(served: list[list[float]], direct: list[NDArray[np.float32]], precision: str) -> None:
    """Exit unless both ways gave the same scores: speed is only compared for equal work."""
    difference = float(np.abs(np.concatenate(served) - np.concatenate(direct)).max())
    if difference > (0.0 if precision == "int8" else 1e-4):
        raise SystemExit(f"served and direct scores differ by {difference:.2e}; the comparison would be meaningless")


if __name__ == "__main__":
    main()
