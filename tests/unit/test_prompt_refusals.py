# SPDX-License-Identifier: Apache-2.0
"""A prompt that reads differently once cut, or with which a checkpoint cannot be served, is refused with a reason."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from build_engines.errors import CheckpointError, TableError
from build_engines.fetch import Checkpoint
from build_engines.pairing import write_pairing
from build_engines.prompt_layout import pad_id, prompt_layout
from build_engines.prompts import Prompt
from build_engines.serving_code import pair_encoding
from tests.decoder_checkpoints import prompt_of, tokenizer_json
from tests.unit.tiny_models import TinyModels

ASSISTANT = "<｜Assistant｜><think>\n\n</think>\n\n"


def refusal(tiny: TinyModels, out: Path, family: str, **overrides: Any) -> str:
    """What the build says of a family's checkpoint with other fields in its row."""
    model = tiny.model(family)
    with pytest.raises(CheckpointError) as caught:
        write_pairing(model.checkpoint, dataclasses.replace(model.reranker, **overrides), out)
    assert not (out / "pairing.json").exists()
    return str(caught.value)


def changed(family: str, **fields: Any) -> Prompt:
    return dataclasses.replace(prompt_of(family), **fields)


def layout_refusal(tiny: TinyModels, family: str, prompt: Prompt) -> str:
    """What is said of a prompt with a family's own tokenizer, which takes long to load."""
    with pytest.raises(CheckpointError) as caught:
        prompt_layout(tiny.model(family).tokenizer, prompt)
    return str(caught.value)


def test_the_build_refuses_a_prompt_that_is_cut_in_the_wrong_place(tiny: TinyModels, tmp_path: Path) -> None:
    prompt = changed("qwen2", query=" {query}", middle=("\n<Document>:",))
    message = refusal(tiny, tmp_path, "qwen2", prompt=prompt)
    assert "The prompt deepseek_r1 reads differently in parts: for the query '.' and the document 'a'" in message
    assert "the whole has 16448 'Ġ.Ċ', " in message
    assert "where its parts have 659 'Ġ.', 198 'Ċ'" in message
    assert "Move the characters that the tokenizer joins to a text into query or document" in message


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
def test_a_space_that_the_tokenizer_joins_to_the_query_belongs_to_it(tiny: TinyModels, family: str) -> None:
    (prefix,) = prompt_of(family).prefix
    prompt = changed(family, prefix=(f"{prefix} ",), query="{query}\n")
    message = layout_refusal(tiny, family, prompt)
    assert f"The prompt {prompt.name} reads differently in parts: for the query 'a' and the document 'a'" in message
    assert "'Ġa'" in message


@pytest.mark.parametrize(
    ("fields", "query", "document"),
    [
        # A line break joins the punctuation before it.
        ({"suffix": ("\nAnswer:", ASSISTANT)}, "a", "."),
        ({"query": " {query}", "middle": ("\n", "<Document>:")}, ".", "a"),
        ({"middle": ("<Document>: ",), "document": "{document}"}, "a", "a"),
        # Letters join letters, and punctuation punctuation.
        ({"suffix": ("s", ASSISTANT)}, "a", "a"),
        ({"suffix": ("'", ASSISTANT)}, "a", "."),
        ({"query": " {query}", "middle": ("?\n<Document>:",)}, "<", "a"),
        # This word stands apart from letters, but takes the space before it.
        ({"suffix": ("Ends", ASSISTANT)}, "a", " "),
    ],
)
def test_a_cut_where_the_tokenizer_has_no_boundary_is_shown_by_a_text(
    tiny: TinyModels, fields: dict[str, Any], query: str, document: str
) -> None:
    message = layout_refusal(tiny, "qwen2", changed("qwen2", **fields))
    assert f"for the query {query!r} and the document {document!r} the whole has" in message


def test_quotation_marks_around_texts_belong_to_them(tiny: TinyModels) -> None:
    fields = {"prefix": ("<｜User｜>Query:",), "document": ' "{document}"', "instruction": ""}
    prompt_layout(tiny.model("qwen2").tokenizer, changed("qwen2", query=' "{query}"\n', **fields))
    inside = changed("qwen2", query=' "{query}', middle=('"\n<Document>:',), **fields)
    assert "reads differently in parts" in layout_refusal(tiny, "qwen2", inside)


@pytest.mark.parametrize(
    ("family", "other", "token"),
    [
        ("qwen2", "qwen3", "<|im_start|>"),
        ("qwen3", "qwen2", "<｜begin▁of▁sentence｜>"),
        ("llama", "qwen3", "<|im_start|>"),
        ("llama", "gemma", "<bos>"),
    ],
)
def test_a_prompt_of_another_model_is_refused(tiny: TinyModels, family: str, other: str, token: str) -> None:
    message = layout_refusal(tiny, family, prompt_of(other))
    assert f"The prompt {prompt_of(other).name} holds {token!r}, which is not a token of this checkpoint" in message


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("times", [0, 2])
def test_the_beginning_of_text_stands_once_at_the_beginning(
    tiny: TinyModels, tmp_path: Path, family: str, times: int
) -> None:
    (prefix,) = prompt_of(family).prefix
    bos = "<｜begin▁of▁sentence｜>"
    prompt = changed(family, prefix=(prefix.replace(bos, bos * times),))
    message = refusal(tiny, tmp_path, family, prompt=prompt)
    assert f"its prompt has {times} {bos!r}; this tokenizer puts one before a text" in message


def test_a_tokenizer_that_loses_spaces_is_refused(tiny: TinyModels) -> None:
    # What some versions of Transformers make of DeepSeek's: Llama's pre-tokenizer over a byte-level vocabulary.
    text = json.loads(tokenizer_json("qwen2"))
    text["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
    with pytest.raises(CheckpointError, match=r"tokenizer\.json turns 'How are you doing\?' into 'Howareyoudoing\?'"):
        prompt_layout(Tokenizer.from_str(json.dumps(text)), prompt_of("qwen2"))


def test_a_classifier_may_read_its_score_off_the_document(tiny: TinyModels, tmp_path: Path) -> None:
    prompt = changed("qwen2", middle=(), document="<Document>: {document}", suffix=())
    row = dataclasses.replace(tiny.model("qwen2_classifier").reranker, prompt=prompt)
    write_pairing(tiny.model("qwen2_classifier").checkpoint, row, tmp_path)
    encoder = pair_encoding.PairEncoder.load(tmp_path, cache_bytes=0, max_text_bytes=1000)
    ids = encoder.encode([b"what is a panda?"], [b"a bear"])
    last = int(ids.attention_mask.sum()) - 1
    whole = tiny.model("qwen2").tokenizer.encode(prompt.whole("what is a panda?", "a bear"), add_special_tokens=False)
    assert ids.input_ids[0, : last + 1].tolist() == whole.ids
    with pytest.raises(TableError, match="ends in the document, so a yes_no head would read its verdict where"):
        dataclasses.replace(tiny.model("qwen2").reranker, prompt=prompt)


def test_the_gemma_prompt_is_not_one_text_for_its_tokenizer(tiny: TinyModels) -> None:
    assert prompt_of("gemma").apart
    message = layout_refusal(tiny, "gemma", changed("gemma", apart=False))
    assert "The prompt bge_gemma reads differently in parts" in message


@pytest.mark.parametrize("token", ["<think>", "<｜User｜>", "<｜end▁of▁sentence｜>", "<|quad_start|>"])
def test_an_instruction_with_a_control_token_is_refused(tiny: TinyModels, token: str) -> None:
    instruction = f"Find it.{token}Now"
    message = layout_refusal(tiny, "qwen2", prompt_of("qwen2").instructed(instruction))
    assert f"The instruction {instruction!r} holds the control token {token!r}" in message
    assert "write it as plain text" in message


def test_line_breaks_that_a_vocabulary_adds_may_stand_in_an_instruction(tiny: TinyModels) -> None:
    tokenizer = tiny.model("gemma").tokenizer
    asking = changed("gemma", suffix=("\n", "{instruction}"), instruction="Is it relevant?\n\nYes or No:\n")
    suffix = prompt_layout(tokenizer, asking)["suffix_ids"]
    assert tokenizer.decode(list(suffix)) == "\nIs it relevant?\n\nYes or No:\n"
    assert "control token '<eos>'" in layout_refusal(tiny, "gemma", asking.instructed("Is it <eos> relevant?"))


def test_a_decoder_without_a_prompt_is_refused(tiny: TinyModels, tmp_path: Path) -> None:
    message = refusal(tiny, tmp_path, "qwen2_classifier", prompt=None)
    assert message == "tiny_qwen2_classifier: a qwen2 checkpoint needs a prompt in rerankers.toml."


def test_an_encoder_with_a_prompt_is_refused(tiny: TinyModels, tmp_path: Path) -> None:
    message = refusal(tiny, tmp_path, "xlm_roberta", prompt=prompt_of("qwen2"))
    assert message == "tiny_xlm_roberta: a xlm-roberta checkpoint takes no prompt in rerankers.toml."


@pytest.mark.parametrize("max_length", [32, 63])
def test_a_prompt_that_leaves_no_room_for_texts_is_refused(tiny: TinyModels, tmp_path: Path, max_length: int) -> None:
    message = refusal(tiny, tmp_path, "qwen2", max_length=max_length, buckets=(max_length,))
    assert f"61 control tokens exceed max_length {max_length}" in message
    assert "Raise max_length and the last bucket" in message


def test_a_classifiers_prompt_that_ends_in_padding_is_refused(tiny: TinyModels, tmp_path: Path) -> None:
    prompt = changed("qwen2_classifier", suffix=(f"{ASSISTANT}<｜end▁of▁sentence｜>",))
    message = refusal(tiny, tmp_path, "qwen2_classifier", prompt=prompt)
    assert "tiny_qwen2_classifier: its prompt ends in the padding token 151643" in message
    assert "Leave it out of the suffix, or set another pad_token_id" in message


ADDED = [{"id": 3, "content": "<end>"}, {"id": 7, "content": "<pad>"}, {"id": 40, "content": "<far>"}]


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        ({"pad_token_id": 5, "eos_token_id": 3}, {"pad_token": "<pad>"}, 5),
        ({"pad_token_id": 0, "eos_token_id": 3}, {"pad_token": "<pad>"}, 0),
        ({"pad_token_id": None, "eos_token_id": 3}, {"pad_token": "<pad>"}, 7),
        ({"eos_token_id": 3}, {"pad_token": {"content": "<pad>", "special": True}}, 7),
        ({"eos_token_id": 3}, {"pad_token": None}, 3),
        ({"eos_token_id": 3}, {"pad_token": "<unheard of>"}, 3),
        ({"eos_token_id": 3}, {"pad_token": "<far>"}, 3),
        ({"eos_token_id": 3}, {}, 3),
        ({"eos_token_id": 3}, None, 3),
        ({"eos_token_id": [4, 3]}, None, 4),
        ({"pad_token_id": -1, "eos_token_id": 3}, None, 3),
        ({"pad_token_id": 20, "eos_token_id": 3}, None, 3),
        ({}, {"pad_token": "<pad>"}, 7),
        ({}, {}, None),
        ({"eos_token_id": []}, {}, None),
        ({"eos_token_id": 20}, None, None),
    ],
)
def test_padding_is_what_a_checkpoint_names_first(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, Any] | None, expected: int | None
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": ADDED}), encoding="utf-8")
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    checkpoint = Checkpoint("", "", tmp_path, {"vocab_size": 20} | config, {})
    if expected is None:
        with pytest.raises(CheckpointError, match=r"config\.json names neither pad_token_id nor eos_token_id; add one"):
            pad_id(checkpoint)
    else:
        assert pad_id(checkpoint) == expected
