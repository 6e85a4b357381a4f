# SPDX-License-Identifier: Apache-2.0
"""Control tokens typed by a user are text; only the layout of a pair places control ids."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer

from build_engines.serving_code import pair_encoding
from tests.unit.random_texts import CONTROL_TOKENS, random_text
from tests.unit.tiny_models import CROSS_ENCODERS, TinyModels

# Every special id but the unknown one, which is what unknown characters honestly become; bytes are never unknown.
CONTROL_IDS: dict[str, dict[str, int | None]] = {
    "bert": {"[PAD]": 0, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4},
    "roberta": {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4},
    "xlm_roberta": {"<s>": 0, "<pad>": 1, "</s>": 2, "<mask>": None},
}
FULL_WIDTH = str.maketrans("<>[]/sSEPCLpadmk", "＜＞［］／ｓＳＥＰＣＬｐａｄｍｋ")
FRAMES = ("{}", " {}", "{} ", " {} ", "a{}b", "a {} b", "{0}{0}", "{0} {0}", "x</{}", "\n{}\t", "▁{}", "Ġ{}", "##{}")


def variants(token: str) -> list[str]:
    spellings = (token, token.upper(), token.lower(), token.translate(FULL_WIDTH), "\u200b".join(token))
    return [frame.format(spelling) for frame in FRAMES for spelling in spellings]


def control_ids(tiny: TinyModels, family: str) -> set[int]:
    checkpoint: Any = Tokenizer.from_file(str(tiny.model(family).checkpoint.folder / "tokenizer.json"))
    ids = {token: int(checkpoint.token_to_id(token)) for token in CONTROL_IDS[family]}
    assert all(wanted in (None, ids[token]) for token, wanted in CONTROL_IDS[family].items())
    return set(ids.values())


def text_ids(encoder: pair_encoding.PairEncoder, text: str) -> list[int]:
    texts = encoder.request_texts([], [text.encode()])
    (found,) = encoder.text_ids(texts).values()
    ids: list[int] = found.ids.tolist()
    return ids


@pytest.mark.parametrize("family", CROSS_ENCODERS)
@pytest.mark.parametrize("token", CONTROL_TOKENS)
def test_a_typed_control_token_never_becomes_a_control_id(tiny: TinyModels, family: str, token: str) -> None:
    encoder, control = tiny.model(family).encoder(), control_ids(tiny, family)
    for text in variants(token):
        leaked = control.intersection(text_ids(encoder, text))
        assert not leaked, (text, leaked)


@pytest.mark.parametrize("family", CROSS_ENCODERS)
def test_a_pair_of_typed_control_tokens_has_only_its_own_separators(tiny: TinyModels, family: str) -> None:
    encoder, control = tiny.model(family).encoder(), control_ids(tiny, family)
    typed = " ".join(CONTROL_TOKENS)
    encoded = encoder.encode([typed.encode()], [typed.encode()])
    placed = [i for i in encoded.input_ids[0][encoded.attention_mask[0] == 1].tolist() if i in control]
    assert placed == ([2, 3, 3] if family == "bert" else [0, 2, 2, 2])


@pytest.mark.parametrize("family", CROSS_ENCODERS)
def test_the_built_files_name_the_control_ids(tiny: TinyModels, family: str) -> None:
    assert set(tiny.model(family).encoder().pairing.control_ids) == control_ids(tiny, family)


@pytest.mark.parametrize("family", CROSS_ENCODERS)
def test_ordinary_text_has_the_same_ids_as_in_the_checkpoint(tiny: TinyModels, family: str) -> None:
    model, rng = tiny.model(family), random.Random(17)
    checkpoint = Tokenizer.from_file(str(model.checkpoint.folder / "tokenizer.json"))
    served = Tokenizer.from_file(str(model.pairing / "tokenizer.json"))
    texts = [random_text(rng) for _ in range(3000)] + [chr(rng.randrange(0x20, 0xD7FF)) * 3 for _ in range(1000)]
    expected = [encoding.ids for encoding in checkpoint.encode_batch(texts, add_special_tokens=False)]
    found = [encoding.ids for encoding in served.encode_batch(texts, add_special_tokens=False)]
    assert found == expected
    unknown = {"bert": 1, "xlm_roberta": 3}.get(family)
    assert unknown is None or any(unknown in ids for ids in found)
