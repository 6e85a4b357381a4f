# SPDX-License-Identifier: Apache-2.0
"""Served scores are those of the checkpoint, whatever else is in the request or beside it."""

from __future__ import annotations

from typing import Any

import pytest
from triton_rerank import RerankClient

from build_engines.triton_server import TritonServer
from tests.server.raw_requests import pairs, scores, scores_at_once
from tests.server.references import Reference, reference_scores, references
from tests.server.served import ALL, BERT, FP32, INT8, LIGHT, XLM_R, Served
from tests.server.texts import QUERY, mixed, ragged, words

PAIR = (QUERY, words(20, seed=7))
# FP32 kernels may sum in another order for another batch; INT8 rows run alone and must not differ at all.
TOLERANCE = {**dict.fromkeys(FP32, 1e-4), INT8: 0.0}


@pytest.fixture(scope="module")
def reference(served: Served) -> dict[str, Reference]:
    return references(served)


@pytest.mark.parametrize("name", [XLM_R, BERT])
def test_a_ragged_batch_gets_the_scores_that_pytorch_gives_each_pair_alone(
    server: TritonServer, reference: dict[str, Reference], name: str
) -> None:
    documents = [*ragged(seed=1), "", "   ", "\t\n", "\u200b", mixed(3000, seed=2)]
    expected = reference_scores(reference[name], QUERY, documents)
    assert max(expected) - min(expected) > 0.5, "the checkpoint tells the documents apart"
    with RerankClient(server.grpc_url, model=name) as client:
        assert client.score([(QUERY, document) for document in documents]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", [XLM_R, BERT])
@pytest.mark.parametrize("query_words", [250, 3000])
def test_pairs_that_do_not_fit_are_cut_where_flagembedding_cuts_them(
    server: TritonServer, reference: dict[str, Reference], name: str, query_words: int
) -> None:
    query = mixed(query_words, seed=3)
    documents = ["short", *(mixed(length, seed=length) for length in (100, 400, 3000))]
    expected = reference_scores(reference[name], query, documents)
    with RerankClient(server.grpc_url, model=name) as client:
        assert client.score([(query, document) for document in documents]) == pytest.approx(expected, abs=1e-4)


def test_the_light_reranker_is_twenty_times_the_cosine_of_sentence_transformers(
    server: TritonServer, reference: dict[str, Reference]
) -> None:
    # sentence-transformers cuts this checkpoint's texts at 256 tokens.
    documents = [*ragged(seed=4, count=24, longest=12), *(words(n, seed=n) for n in (1, 40, 200)), "什么是大熊猫？"]
    expected = reference_scores(reference[LIGHT], QUERY, documents)
    with RerankClient(server.grpc_url, model=LIGHT) as client:
        assert client.score([(QUERY, document) for document in documents]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_a_pairs_score_does_not_depend_on_its_row_or_its_neighbours(grpc: Any, name: str) -> None:
    query, document = PAIR
    (alone,) = scores(grpc, name, pairs([query], [document]))
    crowd = ragged(seed=5, count=63, longest=25)
    long = mixed(3000, seed=6)
    for row in (0, 63):
        together = scores(grpc, name, pairs([query], [*crowd[:row], document, *crowd[row:]]))
        assert together[row] == pytest.approx(alone, rel=0, abs=TOLERANCE[name])
    for row, documents in ((0, [document, long]), (1, [long, document])):
        beside = scores(grpc, name, pairs([query], documents))
        assert beside[row] == pytest.approx(alone, rel=0, abs=TOLERANCE[name])
    twins = scores(grpc, name, pairs([query], [document] * 16))
    assert twins == pytest.approx([alone] * 16, rel=0, abs=TOLERANCE[name])


@pytest.mark.parametrize("name", ALL)
def test_a_pairs_score_does_not_depend_on_the_other_queries_in_its_request(grpc: Any, name: str) -> None:
    query, document = PAIR
    (alone,) = scores(grpc, name, pairs([query], [document]))
    others = [mixed(3 * n + 1, seed=n) for n in range(8)]
    together = scores(grpc, name, pairs([*others, query], [*others[::-1], document]))
    assert together[-1] == pytest.approx(alone, rel=0, abs=TOLERANCE[name])


@pytest.mark.parametrize("name", ALL)
def test_a_pairs_score_does_not_depend_on_requests_beside_its_own(grpc: Any, name: str) -> None:
    query, document = PAIR
    (alone,) = scores(grpc, name, pairs([query], [document]))
    requests = [(name, pairs([query], [*ragged(seed=n, count=max(2, n), longest=25)[:n], document])) for n in range(12)]
    for answer in scores_at_once(grpc, requests):
        assert isinstance(answer, list), answer
        assert answer[-1] == pytest.approx(alone, rel=0, abs=TOLERANCE[name])
