# SPDX-License-Identifier: Apache-2.0
"""Pairs in a decoder's prompt get the ids that its own tokenizer gives the published prompt."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from build_engines.prompts import Prompt
from tests.unit.test_pair_encoding import encode, real_ids
from tests.unit.tiny_models import TinyModel, TinyModels, prepare
from tests.unit.written_prompts import (
    FAMILIES,
    INSTRUCTION,
    ODD_PAIRS,
    QWEN3_BODY,
    QWEN3_PREFIX,
    QWEN3_SUFFIX,
    R1,
    WHOLE,
    WRITTEN,
    Segments,
    filled,
    plain,
    random_pairs,
    whole_ids,
)

MAX_LENGTH = 384
BOS = {"qwen2": 151646, "llama": 128000}
PADDING = {"qwen2": 151643, "llama": 128001, "qwen3": 151643, "gemma": 0}
every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
def test_random_and_odd_pairs_get_the_ids_of_the_published_prompt(tiny: TinyModels, family: str) -> None:
    tokenizer, encoder = tiny.model(family).tokenizer, tiny.encoder(family)
    segments, cut = Segments.of(family, tokenizer), 0
    pairs = [*ODD_PAIRS, *random_pairs(41, 330)]
    for start in range(0, len(pairs), 30):
        batch = pairs[start : start + 30]
        encoded = encode(encoder, batch)
        for row, pair in enumerate(batch):
            whole = whole_ids(family, tokenizer, *pair)
            cut += (cuts := segments.cuts(*pair, MAX_LENGTH))
            assert real_ids(encoded, row) == (segments.row(*pair, MAX_LENGTH) if cuts else whole), pair
            assert encoded.tokens[row, 0] == len(whole), pair
    assert 10 <= cut <= 150


def test_qwen3_pairs_get_the_ids_of_qwens_own_code(tiny: TinyModels) -> None:
    tokenizer, encoder = tiny.model("qwen3").tokenizer, tiny.encoder("qwen3")
    prefix, suffix = plain(tokenizer, QWEN3_PREFIX), plain(tokenizer, QWEN3_SUFFIX)
    fitted = 0
    for query, document in [*ODD_PAIRS, *random_pairs(43, 330)]:
        body = tokenizer.encode(filled(QWEN3_BODY, query, document)).ids
        if len(prefix) + len(body) + len(suffix) <= MAX_LENGTH:
            fitted += 1
            assert real_ids(encode(encoder, [(query, document)]), 0) == [*prefix, *body, *suffix], (query, document)
    assert fitted >= 200


@pytest.mark.parametrize("family", WHOLE)
def test_a_row_decodes_to_the_published_prompt(tiny: TinyModels, family: str) -> None:
    pair = ("what is a panda?", "  A bear, 1,864 of them.\n大熊猫 🐼")
    ids = real_ids(encode(tiny.encoder(family), [pair]), 0)
    assert tiny.model(family).tokenizer.decode(ids, skip_special_tokens=False) == filled(WRITTEN[family], *pair)


@pytest.mark.parametrize("family", sorted(BOS))
def test_there_is_one_bos_at_the_start_of_every_row(tiny: TinyModels, family: str) -> None:
    typed = "<｜begin▁of▁sentence｜>"
    pairs = [(typed, f"{typed} {typed}"), *(("panda", "bread " * n) for n in (0, 1, 7, 40, 100, 200, 5000))]
    encoder = tiny.encoder(family)
    assert len({len(real_ids(encode(encoder, [pair]), 0)) for pair in pairs}) == 8
    for batch in [pairs, *([pair] for pair in pairs)]:
        encoded = encode(encoder, batch)
        assert (encoded.input_ids == BOS[family]).sum(axis=1).tolist() == [1] * len(batch)
        assert (encoded.input_ids[:, 0] == BOS[family]).all()


@every_family
def test_rows_are_padded_behind_their_end_with_the_padding_id(tiny: TinyModels, family: str) -> None:
    encoded = encode(tiny.encoder(family), random_pairs(53, 16))
    assert encoded.token_type_ids is None
    for ids, mask in zip(encoded.input_ids, encoded.attention_mask, strict=True):
        length = int(mask.sum())
        assert mask.tolist() == [1] * length + [0] * (len(mask) - length)
        assert (ids[length:] == PADDING[family]).all()


def assert_pairs_read_as_written(model: TinyModel, template: str, segments: Segments, seed: int) -> None:
    """Of random pairs, those that fit are the template with both texts in it; many do not fit and are cut."""
    encoder, longest, cut = model.encoder(), model.reranker.max_length, 0
    pairs = [*ODD_PAIRS, *random_pairs(seed, 150)]
    for pair in pairs:
        whole = plain(model.tokenizer, filled(template, *pair))
        encoded = encode(encoder, [pair])
        cut += (cuts := segments.cuts(*pair, longest))
        assert real_ids(encoded, 0) == (segments.row(*pair, longest) if cuts else whole), pair
        assert encoded.tokens[0, 0] == len(whole)
    assert 40 < cut < len(pairs) - 40


def test_another_instruction_changes_the_prompt(tiny: TinyModels, tmp_path: Path) -> None:
    reranker, instruction = tiny.model("qwen2").reranker, "Find code.\n  Answer in 中文?"
    assert reranker.prompt is not None
    prompt = reranker.prompt.instructed(instruction)
    model = prepare(dataclasses.replace(reranker, prompt=prompt, max_length=128, buckets=(96, 128)), tmp_path)
    template = R1.replace(INSTRUCTION, instruction)
    segments = Segments.of_text(model.tokenizer, template, " {query}\n", " {document}")
    assert_pairs_read_as_written(model, template, segments, 59)


def test_a_document_keeps_the_end_of_its_line_too(tiny: TinyModels, tmp_path: Path) -> None:
    template = (
        "<｜begin▁of▁sentence｜><｜User｜>Query: {query}\n\nDocument: {document}\n\nDoes it answer?<｜Assistant｜>"
    )
    prompt = Prompt(
        name="lines",
        prefix=("<｜begin▁of▁sentence｜><｜User｜>", "Query:"),
        query=" {query}\n\n",
        middle=("Document", ":"),
        document=" {document}\n\n",
        suffix=("Does it answer?<｜Assistant｜>",),
        yes="yes",
        no="no",
    )
    reranker = dataclasses.replace(tiny.model("qwen2").reranker, prompt=prompt, max_length=96, buckets=(64, 96))
    model = prepare(reranker, tmp_path)
    segments = Segments.of_text(model.tokenizer, template, " {query}\n\n", " {document}\n\n")
    assert segments.document_tail == plain(model.tokenizer, "\n\n")
    assert_pairs_read_as_written(model, template, segments, 61)
