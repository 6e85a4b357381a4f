# SPDX-License-Identifier: Apache-2.0
"""The token cache changes how often texts are tokenised and nothing else, and stays below its bound."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from build_engines.serving_code import pair_encoding, text_ids
from tests.unit.random_texts import random_pair
from tests.unit.tiny_models import TinyModels


class SpyTokenizer:
    """Notes every text that it is asked to tokenise."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.calls: list[list[str]] = []

    def encode_batch_fast(self, texts: Sequence[str], **settings: Any) -> Any:
        self.calls.append(list(texts))
        return self.tokenizer.encode_batch_fast(texts, **settings)


@pytest.fixture
def encoder(tiny: TinyModels) -> pair_encoding.PairEncoder:
    """With an empty cache and counters at zero, as one that has checked its golden pairs has not."""
    return fresh(tiny)


def fresh(tiny: TinyModels, cache_bytes: int = 1 << 20) -> pair_encoding.PairEncoder:
    loaded = tiny.model("xlm_roberta").encoder()
    return pair_encoding.PairEncoder(
        loaded._tokenizer, loaded.pairing, cache_bytes=cache_bytes, max_text_bytes=1_000_000
    )


def spy_on(encoder: pair_encoding.PairEncoder) -> SpyTokenizer:
    spy = SpyTokenizer(encoder._tokenizer)
    encoder._tokenizer = spy  # type: ignore[assignment]
    return spy


def encode(encoder: pair_encoding.PairEncoder, *pairs: tuple[str, str]) -> pair_encoding.EncodedPairs:
    return encoder.encode([query.encode() for query, _ in pairs], [document.encode() for _, document in pairs])


def test_a_query_that_64_rows_share_is_tokenised_once(encoder: pair_encoding.PairEncoder) -> None:
    spy = spy_on(encoder)
    encode(encoder, *[("what is a panda?", f"document {row}") for row in range(64)])
    assert len(spy.calls) == 1
    assert sorted(spy.calls[0]) == sorted(["what is a panda?", *(f"document {row}" for row in range(64))])


def test_a_text_seen_before_is_not_tokenised_again_whatever_its_role(encoder: pair_encoding.PairEncoder) -> None:
    spy = spy_on(encoder)
    encode(encoder, ("panda", "bread"))
    encode(encoder, ("bread", "panda"), ("panda", "new"))
    assert spy.calls == [["panda", "bread"], ["new"]]


def test_hits_and_misses_count_each_distinct_text_of_a_call(encoder: pair_encoding.PairEncoder) -> None:
    encode(encoder, ("panda", "bread"), ("panda", "sea"))
    assert (encoder.cache.hits, encoder.cache.misses) == (0, 3)
    encode(encoder, ("panda", "bread"), ("panda", "new"))
    assert (encoder.cache.hits, encoder.cache.misses) == (2, 4)


def test_size_is_the_ids_and_the_overhead_of_each_entry(encoder: pair_encoding.PairEncoder) -> None:
    encoded = encode(encoder, ("panda", "bread and the sea"))
    ids = int(encoded.tokens[0, 0]) - 4
    assert encoder.cache.size_bytes == 2 * encoder.cache.ENTRY_OVERHEAD_BYTES + 4 * ids


def test_no_more_than_max_length_ids_of_a_text_are_kept(encoder: pair_encoding.PairEncoder) -> None:
    encode(encoder, ("panda", "bread " * 20_000))
    assert encoder.cache.size_bytes <= 2 * encoder.cache.ENTRY_OVERHEAD_BYTES + 4 * (512 + 8)


@pytest.mark.parametrize("limit", [0, 399, 1000, 20_000])
def test_the_bound_holds_after_every_call(tiny: TinyModels, limit: int) -> None:
    encoder, rng = fresh(tiny, limit), random.Random(1)
    for _ in range(200):
        encode(encoder, *[random_pair(rng) for _ in range(3)])
        assert 0 <= encoder.cache.size_bytes <= limit


def test_an_empty_cache_counts_no_bytes(tiny: TinyModels) -> None:
    encoder = fresh(tiny, 399)
    encode(encoder, ("panda", "bread"))
    assert encoder.cache.size_bytes == 0


def test_the_least_recently_used_text_goes_first(tiny: TinyModels) -> None:
    # Room for three one-word texts.
    encoder = fresh(tiny, 3 * (text_ids.TokenCache.ENTRY_OVERHEAD_BYTES + 20))
    encode(encoder, ("panda", "bread"))
    encode(encoder, ("sea", "sea"))
    encode(encoder, ("panda", "panda"))
    spy = spy_on(encoder)
    encode(encoder, ("city", "city"))
    encode(encoder, ("panda", "sea"))
    encode(encoder, ("panda", "bread"))
    assert spy.calls == [["city"], ["bread"]]


@pytest.mark.parametrize("words", [1, 60])
def test_counted_bytes_are_the_memory_that_the_cache_takes(tiny: TinyModels, words: int) -> None:
    encoder = fresh(tiny, 1 << 30)
    encode(encoder, ("warm", "up"))
    documents = [f"{row} " + "bread " * (words - 1) for row in range(3000)]
    gc.collect()
    tracemalloc.start()
    before, counted = tracemalloc.get_traced_memory()[0], encoder.cache.size_bytes
    for start in range(0, len(documents), 100):
        encode(encoder, *[("warm", document) for document in documents[start : start + 100]])
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    counted = encoder.cache.size_bytes - counted
    assert taken <= 1.1 * counted, "the bound would not bound the memory"
    assert counted <= 2 * taken, "the cache would hold much less than it may"


def test_texts_that_join_to_the_same_text_do_not_share_ids(encoder: pair_encoding.PairEncoder) -> None:
    pairs = [("a", "b c"), ("a b", "c"), ("a b c", ""), ("b c", "a"), ("c", "a b"), ("ab", "c"), ("a", "bc")]
    together = encode(encoder, *pairs)
    rows = {tuple(row) for row in together.input_ids.tolist()}
    assert len(rows) == len(pairs)


def test_texts_under_different_heads_do_not_share_ids(tiny: TinyModels) -> None:
    loaded = tiny.model("xlm_roberta").encoder()
    fields = {name: getattr(loaded.pairing, name) for name in loaded.pairing.__dataclass_fields__}
    pairing = pair_encoding.Pairing(**fields | {"query_head": "a", "document_head": "a b"})
    encoder = pair_encoding.PairEncoder(loaded._tokenizer, pairing, cache_bytes=1 << 20, max_text_bytes=1000)
    spy = spy_on(encoder)
    encode(encoder, (" b c", " c"), (" c", " b c"))
    assert spy.calls == [["a b c", "a c", "a b c", "a b b c"]]


def test_results_are_the_same_without_a_cache_and_with_a_warm_one(tiny: TinyModels) -> None:
    rng = random.Random(2)
    batches = [[random_pair(rng) for _ in range(4)] for _ in range(50)]
    none, small, large = fresh(tiny, 0), fresh(tiny, 3000), fresh(tiny)
    for batch in [*batches, *batches]:
        expected = encode(none, *batch)
        for encoder in (small, large):
            found = encode(encoder, *batch)
            assert np.array_equal(found.input_ids, expected.input_ids)
            assert np.array_equal(found.attention_mask, expected.attention_mask)
            assert np.array_equal(found.tokens, expected.tokens)
    assert none.cache.hits == 0
    assert large.cache.hits > 0


def test_an_answer_is_not_a_view_of_the_cache(encoder: pair_encoding.PairEncoder) -> None:
    first = encode(encoder, ("panda", "bread"))
    kept = first.input_ids.copy()
    first.input_ids[:] = 0
    assert np.array_equal(encode(encoder, ("panda", "bread")).input_ids, kept)
