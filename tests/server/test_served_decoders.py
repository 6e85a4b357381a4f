# SPDX-License-Identifier: Apache-2.0
"""Served scores of decoders are those of the whole model in Transformers, whatever is asked and what stands beside."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from triton_rerank import RerankClient

from build_engines.table import find_reranker
from build_engines.triton_server import TritonServer
from tests.server.decoder_references import DecoderReference, decoder_references
from tests.server.raw_requests import pairs, refusal, scores, scores_at_once
from tests.server.served import LIGHT, Served
from tests.server.served_decoders import (
    DECODERS,
    FP32_DECODERS,
    INT8_DECODER,
    MAX_BATCH_SIZE,
    MAX_LENGTH,
    QWEN2,
)
from tests.server.texts import QUERY, mixed, ragged, words

# What these small models differ by is 1e-5; large ones, with logits of tens, are allowed 1e-3.
TOLERANCE = 1e-4
# FP32 kernels may sum in another order for another batch; INT8 rows run alone and must not differ at all.
BESIDE = {**dict.fromkeys(FP32_DECODERS, TOLERANCE), INT8_DECODER: 0.0}
TEXTS = {
    "nothing": "",
    "one letter": "a",
    "blanks": "  \t ",
    "Chinese": "什么是大熊猫？大熊猫是中国特有的熊科动物。",
    "Japanese and Arabic": "ジャイアントパンダ ، دب الباندا",
    "emoji": "👩‍👩‍👧 🐼❤️ 👍🏽",
    "accents in two forms": "e\u0301 é ﬁ ½ Å",
    "line breaks": "one\n\ntwo\r\nthree",
    "a template of its own": "<Query>: {query}\n<Document>: {document} yes",
}
LONG_QUERY = mixed(2000, seed=21)


@pytest.fixture(scope="module")
def reference(served_decoders: Served) -> dict[str, DecoderReference]:
    return decoder_references(served_decoders)


def ask(server: TritonServer, name: str, asked: Sequence[tuple[str, str]], **options: Any) -> list[float]:
    with RerankClient(server.grpc_url, model=name) as client:
        return client.score(asked, **options)


def document_of(tokens: int, whole: Callable[[str, str], list[int]]) -> str:
    """A document that makes a pair of exactly so many tokens."""
    text = "a" + " panda" * (tokens - len(whole(QUERY, "a")))
    assert len(whole(QUERY, text)) == tokens
    return text


@pytest.mark.parametrize("name", FP32_DECODERS)
def test_each_pair_alone_gets_the_score_of_the_whole_model(
    decoder_server: TritonServer, reference: dict[str, DecoderReference], name: str
) -> None:
    expected = {kind: reference[name].score(QUERY, text) for kind, text in TEXTS.items()}
    assert len(set(expected.values())) == len(TEXTS), "the checkpoint tells the documents apart"
    with RerankClient(decoder_server.grpc_url, model=name) as client:
        found = {kind: client.score([(QUERY, text)])[0] for kind, text in TEXTS.items()}
        assert found == pytest.approx(expected, abs=TOLERANCE)
        assert client.score([(text, "a") for text in TEXTS.values() if text.strip()]) == pytest.approx(
            [reference[name].score(text, "a") for text in TEXTS.values() if text.strip()], abs=TOLERANCE
        )


@pytest.mark.parametrize("name", FP32_DECODERS)
def test_a_ragged_batch_gets_the_scores_that_each_pair_has_alone(
    decoder_server: TritonServer, reference: dict[str, DecoderReference], name: str
) -> None:
    documents = [*ragged(seed=22, count=14), "", mixed(3000, seed=23)]
    expected = [reference[name].score(QUERY, document) for document in documents]
    assert max(expected) - min(expected) > 0.5, "the checkpoint tells the documents apart"
    found = ask(decoder_server, name, [(QUERY, document) for document in documents])
    assert found == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("name", FP32_DECODERS)
def test_control_tokens_that_are_typed_are_read_as_text(
    decoder_server: TritonServer, reference: dict[str, DecoderReference], name: str
) -> None:
    control = reference[name].written.control
    typed = [*control, *(f"before {token} after" for token in control), "a" + control[-1] * 3, "".join(control)]
    asked = [*((QUERY, text) for text in typed), *((f"{text} panda?", "a bear") for text in typed)]
    expected = [reference[name].score(*pair) for pair in asked]
    assert ask(decoder_server, name, asked) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("name", DECODERS)
def test_tokens_are_those_of_the_uncut_prompt_and_longer_pairs_are_said_to_be_cut(
    decoder_server: TritonServer, reference: dict[str, DecoderReference], name: str
) -> None:
    own = reference.get(name, reference[QWEN2])
    control = own.written.control[-1]
    at_most, above = (document_of(length, own.whole) for length in (MAX_LENGTH, MAX_LENGTH + 1))
    documents = ["", "a", at_most, above, words(50 * MAX_LENGTH, seed=24), control, *TEXTS.values()]
    with RerankClient(decoder_server.grpc_url, model=name) as client:
        hits = sorted(client.rerank(QUERY, documents), key=lambda hit: hit.index)
        (long,) = client.rerank(LONG_QUERY, ["a"])
    assert [hit.tokens for hit in hits] == [len(own.whole(QUERY, document)) for document in documents]
    assert [hit.index for hit in hits if hit.truncated] == [3, 4]
    assert hits[4].tokens > 50 * MAX_LENGTH
    assert (long.tokens, long.truncated) == (len(own.whole(LONG_QUERY, "a")), True)


@pytest.mark.parametrize("name", FP32_DECODERS)
def test_pairs_at_the_limit_and_above_it_keep_the_end_of_the_prompt(
    decoder_server: TritonServer, reference: dict[str, DecoderReference], name: str
) -> None:
    own = reference[name]
    documents = [document_of(MAX_LENGTH + more, own.whole) for more in (-1, 0, 1, 2)]
    documents += [" ".join([documents[1], "and"]), words(50 * MAX_LENGTH, seed=25), "大熊猫" * 10_000]
    # The last query is above its share, though with a short document the pair would fit.
    queries = (LONG_QUERY, "大熊猫" * 5000, " ".join(["panda"] * 280))
    asked = [
        *((QUERY, document) for document in documents),
        *((query, document) for query in queries for document in ("", "a", documents[-2])),
    ]
    assert len(own.ids(queries[-1], "")) < len(own.whole(queries[-1], "")) <= MAX_LENGTH
    expected = [own.score(*pair) for pair in asked]
    assert expected[1] == pytest.approx(expected[2], abs=1e-9), "only a word that does not fit is cut"
    assert abs(expected[0] - expected[1]) > 10 * TOLERANCE
    found = [ask(decoder_server, name, [pair])[0] for pair in asked]
    assert found == pytest.approx(expected, abs=TOLERANCE)
    assert ask(decoder_server, name, asked) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("name", DECODERS)
def test_a_pairs_score_does_not_depend_on_its_row_its_neighbours_or_requests_beside_its_own(
    decoder_grpc: Any, name: str
) -> None:
    query, document = QUERY, words(20, seed=26)
    (alone,) = scores(decoder_grpc, name, pairs([query], [document]))
    crowd = [*ragged(seed=27, count=MAX_BATCH_SIZE - 2, longest=60), mixed(3000, seed=28)]
    queries = [mixed(3 * n + 1, seed=n) for n in range(MAX_BATCH_SIZE - 1)]
    requests = {
        row: pairs([*queries[:row], query, *queries[row:]], [*crowd[:row], document, *crowd[row:]])
        for row in (0, 7, MAX_BATCH_SIZE - 1)
    }
    for row, inputs in requests.items():
        assert scores(decoder_grpc, name, inputs)[row] == pytest.approx(alone, rel=0, abs=BESIDE[name])
    twins = scores(decoder_grpc, name, pairs([query], [document] * MAX_BATCH_SIZE))
    assert twins == pytest.approx([alone] * MAX_BATCH_SIZE, rel=0, abs=BESIDE[name])
    at_once = scores_at_once(decoder_grpc, [(name, inputs) for inputs in [*requests.values()] * 3])
    for row, answer in zip([*requests] * 3, at_once, strict=True):
        assert isinstance(answer, list), answer
        assert answer[row] == pytest.approx(alone, rel=0, abs=BESIDE[name])


def test_int8_scores_stay_as_near_to_the_whole_model_as_the_default_gates_ask(
    decoder_server: TritonServer, reference: dict[str, DecoderReference]
) -> None:
    asked = [(QUERY, document) for document in (*TEXTS.values(), *ragged(seed=29, count=40))]
    expected = np.array([reference[QWEN2].score(*pair) for pair in asked])
    found = np.array(ask(decoder_server, INT8_DECODER, asked))
    gates = find_reranker(LIGHT).gates
    assert 1e-3 < np.abs(found - expected).max() <= gates.max_score_shift * expected.std(), "rounded, but not far"
    two = itertools.combinations(range(len(asked)), 2)
    kendall_tau = np.mean([np.sign((found[a] - found[b]) * (expected[a] - expected[b])) for a, b in two])
    assert kendall_tau >= gates.kendall_tau


@pytest.mark.parametrize("name", [name for name, family in FP32_DECODERS.items() if family != "qwen2_classifier"])
def test_normalised_scores_are_the_probability_of_yes_among_the_verdicts(
    decoder_server: TritonServer, reference: dict[str, DecoderReference], name: str
) -> None:
    own = reference[name]
    asked = [(QUERY, document) for document in TEXTS.values()]
    expected = []
    for pair in asked:
        logits = own.logits(*pair)
        if own.written.no:
            yes, no = own.verdicts(logits.softmax(-1))
            expected.append(yes / (yes + no))
        else:  # FlagEmbedding's: nothing stands against the one logit
            expected.append(float(torch.sigmoid(torch.tensor(own.verdicts(logits)[0], dtype=torch.float64))))
    found = ask(decoder_server, name, asked, normalize=True)
    assert found == pytest.approx(expected, rel=0, abs=TOLERANCE)
    assert max(found) - min(found) > 0.1


@pytest.mark.parametrize("name", DECODERS)
def test_forty_documents_become_three_requests_and_come_back_in_order(
    decoder_server: TritonServer, decoder_grpc: Any, reference: dict[str, DecoderReference], name: str
) -> None:
    documents = [f"{row} {words(1 + row % 9, seed=row)}" for row in range(40)]

    def answered() -> tuple[int, int]:
        (found,) = decoder_grpc.get_inference_statistics(name).model_stats
        return int(found.inference_stats.success.count), int(found.inference_count)

    before = answered()
    with RerankClient(decoder_server.grpc_url, model=name) as client:
        hits = client.rerank(QUERY, documents)
        after = answered()
        assert (after[0] - before[0], after[1] - before[1]) == (3, 40)
        assert [(-hit.score, hit.index) for hit in hits] == sorted((-hit.score, hit.index) for hit in hits)
        assert all(hit.document == documents[hit.index] for hit in hits)
        in_order = [hit.score for hit in sorted(hits, key=lambda hit: hit.index)]
        assert client.score([(QUERY, document) for document in documents]) == pytest.approx(
            in_order, rel=0, abs=BESIDE[name]
        )
    if name in reference:
        assert in_order == pytest.approx([reference[name].score(QUERY, text) for text in documents], abs=TOLERANCE)
    status, message = refusal(decoder_grpc, name, pairs([QUERY], ["document"] * (MAX_BATCH_SIZE + 1)))
    assert status == "INVALID_ARGUMENT"
    assert f"batch-size must be <= {MAX_BATCH_SIZE}" in message
