# SPDX-License-Identifier: Apache-2.0
"""Texts that cannot be encoded are named by role and row; files that do not belong together never serve."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from build_engines.serving_code import pair_encoding
from tests.unit.tiny_models import TinyModels

GOOD = b"a good text"
Change = Callable[[dict[str, Any]], Any]


def refusal(tiny: TinyModels, queries: list[bytes], documents: list[bytes]) -> str:
    encoder = tiny.model("xlm_roberta").encoder(max_text_bytes=100)
    with pytest.raises(pair_encoding.TextError) as caught:
        encoder.encode(queries, documents)
    return str(caught.value)


@pytest.mark.parametrize("blank", ["", " ", "\n\t", "\u3000", "\u00a0 \u2028"])
def test_a_blank_query_is_refused(tiny: TinyModels, blank: str) -> None:
    message = refusal(tiny, [GOOD, blank.encode()], [GOOD, GOOD])
    assert message.startswith("QUERY in row 1 is empty or blank")


@pytest.mark.parametrize("blank", ["", " ", "\n\t", "\u3000"])
def test_a_blank_document_is_scored(tiny: TinyModels, blank: str) -> None:
    encoded = tiny.model("xlm_roberta").encoder().encode([b"panda"], [blank.encode()])
    assert encoded.tokens[0, 0] >= 5


@pytest.mark.parametrize("bad", [b"\xff", b"cut \xe5\xa4", b"\xed\xa0\x80", b"\xc0\xaf", "UTF-16".encode("utf-16")])
@pytest.mark.parametrize("role", ["QUERY", "DOCUMENT"])
def test_bytes_that_are_not_utf_8_are_refused(tiny: TinyModels, bad: bytes, role: str) -> None:
    rows = [GOOD, GOOD, bad]
    message = refusal(tiny, rows if role == "QUERY" else [GOOD] * 3, rows if role == "DOCUMENT" else [GOOD] * 3)
    assert message.startswith(f"{role} in row 2 is not valid UTF-8")
    assert "Send text encoded as UTF-8" in message


@pytest.mark.parametrize("role", ["QUERY", "DOCUMENT"])
def test_a_text_over_the_byte_limit_is_refused_with_the_limit(tiny: TinyModels, role: str) -> None:
    rows = ["熊".encode() * 33, b"x" * 101]
    message = refusal(tiny, rows if role == "QUERY" else [GOOD] * 2, rows if role == "DOCUMENT" else [GOOD] * 2)
    assert message.startswith(f"{role} in row 1 has 101 bytes; at most 100 are allowed")
    assert "512 tokens" in message


def test_a_refused_row_leaves_the_cache_as_it_was(tiny: TinyModels) -> None:
    encoder = tiny.model("xlm_roberta").encoder()
    before = (encoder.cache.hits, encoder.cache.misses, encoder.cache.size_bytes)
    with pytest.raises(pair_encoding.TextError):
        encoder.encode([GOOD, b" "], [b"another", b"text"])
    assert (encoder.cache.hits, encoder.cache.misses, encoder.cache.size_bytes) == before


@pytest.fixture
def built(tiny: TinyModels, tmp_path: Path) -> Path:
    folder = tmp_path / "built"
    shutil.copytree(tiny.model("xlm_roberta").pairing, folder)
    return folder


def load(folder: Path) -> str:
    with pytest.raises(pair_encoding.PairingError) as caught:
        pair_encoding.PairEncoder.load(folder, cache_bytes=0, max_text_bytes=1000)
    return str(caught.value)


def change(folder: Path, how: Change) -> None:
    path = folder / "pairing.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    how(fields)
    path.write_text(json.dumps(fields), encoding="utf-8")


@pytest.mark.parametrize("name", ["pairing.json", "tokenizer.json"])
def test_a_missing_file_says_how_to_build_it(built: Path, name: str) -> None:
    (built / name).unlink()
    message = load(built)
    assert name in message
    assert "python -m build_engines build" in message


def test_a_tokenizer_of_another_build_is_refused_by_its_hash(built: Path) -> None:
    path = built / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b"\n")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert f"tokenizer.json has sha256 {found}, pairing.json expects" in load(built)


def test_a_golden_pair_with_other_ids_is_refused(built: Path) -> None:
    change(built, lambda fields: fields["golden"][0]["ids"].__setitem__(3, 99))
    assert "The golden pair 'what is a panda?'" in load(built)


def test_a_golden_pair_of_another_length_is_refused(built: Path) -> None:
    change(built, lambda fields: fields["golden"][-1].update(tokens=1))
    assert "build again" in load(built)


def test_a_tokenizer_that_reads_texts_differently_is_refused_by_the_golden_pairs(built: Path) -> None:
    path = built / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["pre_tokenizer"]["pretokenizers"][1]["prepend_scheme"] = "never"
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    change(built, lambda fields: fields.update(tokenizer_sha256=hashlib.sha256(path.read_bytes()).hexdigest()))
    assert "The golden pair" in load(built)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda fields: fields.update(format=2), "format 2; this code reads 1. Build again"),
        (lambda fields: fields.pop("format"), None),
        (lambda fields: fields.pop("pad_id"), "pad_id"),
        (lambda fields: fields.pop("golden"), "golden"),
        (lambda fields: fields.update(surprise=1), "surprise"),
        (lambda fields: fields.update(query_max="many"), "cannot be read"),
        (lambda fields: fields.update(query_max=0), "query_max 0"),
        (lambda fields: fields.update(query_max=509), "query_max 509 and 4 control tokens exceed max_length 512"),
        (lambda fields: fields.update(buckets=[64, 32, 512]), "must rise and end with max_length 512"),
        (lambda fields: fields.update(buckets=[32, 64]), "must rise and end with max_length 512"),
        (lambda fields: fields.update(buckets=[]), "must rise"),
    ],
    ids=lambda value: None if callable(value) else str(value)[:24],
)
def test_a_pairing_with_a_wrong_field_is_refused(built: Path, how: Change, says: str | None) -> None:
    change(built, how)
    if says is None:
        pair_encoding.PairEncoder.load(built, cache_bytes=0, max_text_bytes=1000)
    else:
        assert says in load(built)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"text"', '{"golden": 1}', '{"golden": [1]}'])
def test_a_pairing_that_is_not_an_object_of_the_right_kind_is_refused(built: Path, text: str) -> None:
    (built / "pairing.json").write_text(text, encoding="utf-8")
    assert "pairing.json cannot be read" in load(built)


def test_a_pairing_that_is_not_text_is_refused(built: Path) -> None:
    (built / "pairing.json").write_bytes(b"\xff\xfe{}")
    load(built)


def test_a_tokenizer_that_the_library_cannot_read_is_refused(built: Path) -> None:
    path = built / "tokenizer.json"
    path.write_text("{}", encoding="utf-8")
    change(built, lambda fields: fields.update(tokenizer_sha256=hashlib.sha256(b"{}").hexdigest()))
    assert "tokenizer.json" in load(built)
