# SPDX-License-Identifier: Apache-2.0
"""The token cache tells on the metrics page what it did."""

from __future__ import annotations

import pytest
from triton_rerank import RerankClient

from build_engines.triton_server import TritonServer
from tests.server.metrics_page import Metrics, read_metrics
from tests.server.served import ALL, BERT, XLM_R
from tests.server.texts import words


def hits_and_misses(grown: Metrics, name: str) -> tuple[float, float]:
    return tuple(grown.of(f"rerank_token_cache_{kind}_total", f"{name}_tokenizer") for kind in ("hits", "misses"))  # type: ignore[return-value]


@pytest.mark.parametrize("name", ALL)
def test_texts_seen_before_are_hits_and_new_ones_are_misses(server: TritonServer, name: str) -> None:
    # No other test sends these texts; each stands in the request once for every row.
    query, documents = f"cache {name}?", [f"cache {name} {words(9, seed=n)}" for n in range(3)]
    with RerankClient(server.grpc_url, model=name) as client:
        start = read_metrics(server)
        client.rerank(query, documents)
        first = read_metrics(server)
        assert hits_and_misses(first.minus(start), name) == (0, 4)
        client.rerank(query, documents)
        second = read_metrics(server)
        assert hits_and_misses(second.minus(first), name) == (4, 0)
        client.rerank(query, [*documents[:2], f"cache {name} another"])
        third = read_metrics(server)
        assert hits_and_misses(third.minus(second), name) == (3, 1)
    sizes = [page.of("rerank_token_cache_bytes", f"{name}_tokenizer") for page in (start, first, second, third)]
    # Ids of 4 bytes for at least the nine words of each document.
    assert sizes[1] - sizes[0] > 3 * 9 * 4
    assert sizes[2] == sizes[1]
    assert sizes[2] < sizes[3] < 64 << 20


def test_one_rerankers_cache_does_not_move_anothers_numbers(server: TritonServer) -> None:
    before = read_metrics(server)
    with RerankClient(server.grpc_url, model=XLM_R) as client:
        client.rerank("cache of one reranker?", ["cache of one reranker"])
    grown = read_metrics(server).minus(before)
    assert hits_and_misses(grown, XLM_R) == (0, 2)
    assert hits_and_misses(grown, BERT) == (0, 0)


def test_refused_texts_are_not_counted(server: TritonServer) -> None:
    before = read_metrics(server)
    with RerankClient(server.grpc_url, model=BERT) as client:
        with pytest.raises(ValueError, match="at most 400000"):
            client.rerank("cache of refused texts?", ["cache of refused texts", "x" * 400_001])
        client.rerank("cache of refused texts?", ["cache of refused texts"])
    assert hits_and_misses(read_metrics(server).minus(before), BERT) == (0, 2)
