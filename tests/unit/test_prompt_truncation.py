# SPDX-License-Identifier: Apache-2.0
"""However long its texts are, a row keeps the whole prompt, ends where the verdict is read, and fits."""

from __future__ import annotations

from typing import Any

import pytest

from build_engines.serving_code import text_ids
from tests.unit.test_pair_encoding import encode, real_ids
from tests.unit.tiny_models import TinyModels
from tests.unit.written_prompts import FAMILIES, Segments, filled, whole_ids

MAX_LENGTH = 384
QUERY = "what is a panda?"
every_family = pytest.mark.parametrize("family", FAMILIES)


def check_cut(tiny: TinyModels, family: str, query: str, document: str) -> list[int]:
    """Return the ids of a pair, in a batch with others, after checking all that must survive a cut."""
    tokenizer = tiny.model(family).tokenizer
    segments = Segments.of(family, tokenizer)
    other = ("panda", "a bear")
    encoded = encode(tiny.encoder(family), [other, (query, document), other])
    ids = real_ids(encoded, 1)
    assert len(ids) <= MAX_LENGTH
    assert ids[: len(segments.prefix)] == segments.prefix
    assert ids[-len(segments.suffix) :] == segments.suffix
    assert ids == segments.row(query, document, MAX_LENGTH)
    assert encoded.tokens[1, 0] == len(whole_ids(family, tokenizer, query, document))
    assert real_ids(encoded, 0) == real_ids(encoded, 2) == whole_ids(family, tokenizer, *other)
    return ids


def words(ids_of_text: Any, tokens: int) -> str:
    """Return a text of short words that has so many tokens together with what stands around it."""
    text = " ".join(["a"] * (tokens - len(ids_of_text("a")) + 1))
    assert len(ids_of_text(text)) == tokens
    return text


@every_family
@pytest.mark.parametrize("size", ["none", "one", "fits", "one more", "50 times"])
def test_a_document_of_any_length_leaves_the_prompt_whole(tiny: TinyModels, family: str, size: str) -> None:
    tokenizer = tiny.model(family).tokenizer
    segments = Segments.of(family, tokenizer)
    room = MAX_LENGTH - segments.control - len(segments.query(QUERY))
    tokens = {"fits": room, "one more": room + 1, "50 times": 50 * MAX_LENGTH}
    short = {"none": "", "one": "a"}
    document = words(segments.document, tokens[size]) if size in tokens else short[size]
    ids = check_cut(tiny, family, QUERY, document)
    assert (ids == whole_ids(family, tokenizer, QUERY, document)) == (size in ("none", "one", "fits"))
    assert (len(ids) == MAX_LENGTH) == (size in tokens)


@every_family
@pytest.mark.parametrize("size", ["one", "fits", "one more", "50 times"])
@pytest.mark.parametrize("document", ["", "a bear", "bread " * 5000], ids=["no document", "short", "long"])
def test_a_query_of_any_length_ends_its_line_and_leaves_a_quarter(
    tiny: TinyModels, family: str, size: str, document: str
) -> None:
    tokenizer = tiny.model(family).tokenizer
    segments = Segments.of(family, tokenizer)
    room = MAX_LENGTH - segments.control
    limit = room * 3 // 4
    tokens = {"fits": limit, "one more": limit + 1, "50 times": 50 * MAX_LENGTH}
    query = words(segments.query, tokens[size]) if size in tokens else "a"
    ids = check_cut(tiny, family, query, document)
    kept = limit if size in tokens else len(segments.query("a"))
    end = len(segments.prefix) + kept
    assert ids[end : end + len(segments.middle)] == segments.middle
    if family != "gemma":
        assert segments.query_tail == [198]
        assert tokenizer.decode(ids[len(segments.prefix) : end]).endswith("a\n")
    if len(document) > len("a bear"):
        assert len(ids) == MAX_LENGTH
        assert len(ids) - segments.control - kept >= room // 4


@every_family
def test_a_query_cut_inside_a_character_still_ends_its_line(tiny: TinyModels, family: str) -> None:
    # Each character is several tokens of bytes, and each query is cut elsewhere in one.
    for before in range(8):
        check_cut(tiny, family, "a " * before + "𓀀ᚠ" * 300, "a bear")


@every_family
def test_a_text_with_the_end_of_text_in_it_is_not_cut_there(tiny: TinyModels, family: str) -> None:
    ends = {"gemma": ["<pad>", "<eos>"], "qwen3": ["<|endoftext|>", "<|im_end|>"]}
    tokenizer = tiny.model(family).tokenizer
    segments = Segments.of(family, tokenizer)
    written = "A: {query}\nB: {document}" if family == "gemma" else " {query}\n<Document>: {document}"
    for end in ends.get(family, ["<｜end▁of▁sentence｜>"]):
        query, document = f"before {end} after", f"{end}before {end}{end} after {end}"
        encoded = encode(tiny.encoder(family), [(query, document)])
        ids, width = real_ids(encoded, 0), encoded.input_ids.shape[1]
        assert encoded.attention_mask[0].tolist() == [1] * len(ids) + [0] * (width - len(ids))
        assert encoded.tokens[0, 0] == len(ids) < MAX_LENGTH
        texts = ids[len(segments.prefix) : -len(segments.suffix)]
        assert tokenizer.decode(texts, skip_special_tokens=False) == filled(written, query, document)
        assert tokenizer.token_to_id(end) not in texts
        assert ids[-len(segments.suffix) :] == segments.suffix


def test_a_text_is_kept_by_what_stands_around_it_too() -> None:
    around = [("", ""), (" ", ""), ("", " "), (" ", "\n"), (" \n", ""), ("", " \n")]
    assert len({text_ids.text_key(parts, b"panda") for parts in around}) == len(around)


@pytest.mark.parametrize("family", ["qwen2", "gemma"])
def test_one_text_as_query_and_document_has_the_ids_of_both_places(tiny: TinyModels, family: str) -> None:
    tokenizer = tiny.model(family).tokenizer
    for text in ("panda", "panda?", "?"):
        for _ in range(2):  # the second time from the cache
            ids = real_ids(encode(tiny.encoder(family), [(text, text)]), 0)
            assert ids == whole_ids(family, tokenizer, text, text)
