# SPDX-License-Identifier: Apache-2.0
"""Verdicts are single tokens of the checkpoint, their order is the score's sign, and a prompt must lead to them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from build_engines.decoders import check_verdict
from build_engines.errors import CheckpointError
from build_engines.export import export
from build_engines.families import load_model
from build_engines.fetch import Checkpoint, fetch
from build_engines.prompt_layout import verdict_ids
from build_engines.prompts import Prompt
from build_engines.table import Reranker
from tests.decoder_checkpoints import decoder_row, prompt_of, tokenizer_json, write_decoder
from tests.unit.test_pair_encoding import encode
from tests.unit.tiny_models import TinyModels
from tests.unit.written_prompts import GEMMA_PROMPT, R1, filled, plain, random_pairs, whole_ids

GOOD_PAIR = ("what is a panda?", "The giant panda is a bear species endemic to China.")
YES, NO = 9693, 2152
OPEN = "<｜Assistant｜><think>\n"
CLOSED = "<｜Assistant｜><think>\n\n</think>\n\n"


def changed(family: str, **fields: Any) -> Prompt:
    return dataclasses.replace(prompt_of(family), **fields)


@pytest.mark.parametrize(("family", "expected"), [("qwen2", (YES, NO)), ("qwen3", (YES, NO)), ("llama", (9891, 2201))])
def test_yes_and_no_are_the_tokens_of_the_vocabulary(tiny: TinyModels, family: str, expected: tuple[int, int]) -> None:
    tokenizer = tiny.model(family).tokenizer
    assert (tokenizer.id_to_token(expected[0]), tokenizer.id_to_token(expected[1])) == ("yes", "no")
    assert verdict_ids(tokenizer, prompt_of(family)) == expected


def test_a_prompt_without_a_no_has_one_verdict(tiny: TinyModels) -> None:
    tokenizer = tiny.model("gemma").tokenizer
    assert verdict_ids(tokenizer, prompt_of("gemma")) == (tokenizer.token_to_id("Yes"), None)


@pytest.mark.parametrize("field", ["yes", "no"])
def test_a_verdict_of_two_tokens_is_refused(tiny: TinyModels, field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        verdict_ids(tiny.model("qwen2").tokenizer, changed("qwen2", **{field: "irrelevant"}))
    message = str(caught.value)
    assert "The verdict 'irrelevant' of the prompt deepseek_r1 is 2 tokens (404 'ir', 97573 'relevant')" in message
    assert "Choose another word" in message


@pytest.mark.parametrize(
    ("end", "yes", "no"),
    [
        ("Answer: ", "yes", "no"),  # " yes" is a token of its own
        ("Answer\n(", "yes", "no"),  # "(y" is one
        ("<think>\n\n</think>\n\n", "\n", "no"),
    ],
)
def test_a_verdict_that_the_end_of_the_prompt_would_join_is_refused(
    tiny: TinyModels, end: str, yes: str, no: str
) -> None:
    prompt = changed("qwen2", suffix=(f"<｜Assistant｜>{end}",), yes=yes, no=no)
    with pytest.raises(CheckpointError, match="after the prompt deepseek_r1, whose end it is joined to"):
        verdict_ids(tiny.model("qwen2").tokenizer, prompt)


def test_a_verdict_with_its_space_follows_a_colon(tiny: TinyModels) -> None:
    tokenizer = tiny.model("qwen2").tokenizer
    prompt = changed("qwen2", suffix=("<｜Assistant｜>Answer:",), yes=" yes", no=" no")
    assert verdict_ids(tokenizer, prompt) == (tokenizer.token_to_id("Ġyes"), tokenizer.token_to_id("Ġno"))


def test_swapping_yes_and_no_negates_every_score_exactly(tiny: TinyModels, tmp_path: Path) -> None:
    model = tiny.model("qwen2")
    swapped = dataclasses.replace(model.reranker, prompt=changed("qwen2", yes="no", no="yes"))
    export(model.checkpoint, swapped, tmp_path)
    sessions = [
        ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        for path in (tiny.graph("qwen2"), tmp_path / "model.onnx")
    ]
    for pairs in (random_pairs(71, 1), random_pairs(72, 5), random_pairs(73, 9), [GOOD_PAIR]):
        arrays = encode(tiny.encoder("qwen2"), pairs).arrays
        scores, negated = (session.run(None, arrays)[0] for session in sessions)
        assert np.abs(scores).min() > 0
        np.testing.assert_array_equal(negated, -scores)


def write_thinker(folder: Path) -> Checkpoint:
    """Write a decoder that answers yes or no after a closed think block, and "Okay" where one was opened.

    What it says next depends on the last token nearly alone: layers add little to its embedding.
    """
    write_decoder(folder, "qwen2", layers=1)
    tokenizer = Tokenizer.from_str(tokenizer_json("qwen2"))
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].mul_(0.01)
    weights["model.norm.weight"].fill_(1.0)
    (closed,), (opened,) = plain(tokenizer, "\n\n"), plain(tokenizer, "\n")
    for axis, (token, answers) in enumerate([(closed, {"yes": 2.6, "no": 2.3}), (opened, {"Okay": 3.2})]):
        weights["model.embed_tokens.weight"][token] = 4 * torch.eye(32)[axis]
        for answer, size in answers.items():
            weights["lm_head.weight"][plain(tokenizer, answer)] = size * torch.eye(32)[axis]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return fetch(decoder_row("thinker", folder, "qwen2"))


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_thinker(tmp_path_factory.mktemp("thinker"))


def thinker_row(thinker: Checkpoint, suffix: str, **overrides: Any) -> Reranker:
    prompt = changed("qwen2", suffix=(suffix,))
    return decoder_row("thinker", thinker.folder, "qwen2", **{"prompt": prompt, "verdict_floor": 0.05} | overrides)


def next_token(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return the probability of each token of the vocabulary after some others, as Transformers has it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0, -1]
    return logits.to(torch.float64).softmax(-1)


def test_a_prompt_that_leads_to_its_verdicts_is_exported_with_their_probability(
    thinker: Checkpoint, tmp_path: Path
) -> None:
    facts = export(thinker, thinker_row(thinker, CLOSED), tmp_path)
    tokenizer = Tokenizer.from_file(str(thinker.folder / "tokenizer.json"))
    expected = next_token(thinker.folder, plain(tokenizer, filled(R1, *GOOD_PAIR)))
    assert expected.argmax() == YES
    mass = facts["yes_and_no_probability"]
    assert 0.05 < mass < 0.95
    assert mass == pytest.approx(float(expected[YES] + expected[NO]), rel=1e-4)
    verdict = {"yes": "yes", "yes_id": YES, "no": "no", "no_id": NO, "mass": mass, "floor": 0.05}
    assert facts["verdict"] == verdict


def test_a_prompt_with_an_open_think_block_is_not_exported(thinker: Checkpoint, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(thinker.folder / "tokenizer.json"))
    expected = next_token(thinker.folder, plain(tokenizer, filled(R1.replace(CLOSED, OPEN), *GOOD_PAIR)))
    with pytest.raises(CheckpointError) as caught:
        export(thinker, thinker_row(thinker, OPEN), tmp_path)
    message = str(caught.value)
    assert "thinker: after the prompt deepseek_r1 the checkpoint does not answer with its verdicts" in message
    assert f"'yes' and 'no' have together probability {float(expected[YES] + expected[NO]):.2g}" in message
    assert "at least 0.05 is asked" in message
    assert f"It goes on with 'Okay' {float(expected.max()):.3f}, " in message
    assert "A think block that is still open" in message
    assert "correct the prompt in rerankers.toml, or set verdict_floor = 0" in message
    assert not (tmp_path / "model.onnx").exists()


def test_without_a_floor_any_prompt_passes_and_its_probability_is_told(thinker: Checkpoint) -> None:
    reranker = thinker_row(thinker, OPEN, verdict_floor=0.0)
    found = check_verdict(load_model(thinker, reranker), reranker, thinker)
    assert found["floor"] == 0.0
    assert 0 < found["mass"] < 1e-4


def test_the_floor_itself_passes(thinker: Checkpoint) -> None:
    reranker = thinker_row(thinker, CLOSED)
    model = load_model(thinker, reranker)
    mass = check_verdict(model, reranker, thinker)["mass"]
    assert check_verdict(model, dataclasses.replace(reranker, verdict_floor=mass), thinker)["mass"] == mass
    with pytest.raises(CheckpointError, match="does not answer with its verdicts"):
        check_verdict(model, dataclasses.replace(reranker, verdict_floor=mass * 1.0001), thinker)


def test_a_verdict_alone_is_measured_and_named_alone(thinker: Checkpoint) -> None:
    reranker = thinker_row(thinker, CLOSED, prompt=changed("qwen2", no=""))
    model = load_model(thinker, reranker)
    tokenizer = Tokenizer.from_file(str(thinker.folder / "tokenizer.json"))
    expected = next_token(thinker.folder, plain(tokenizer, filled(R1, *GOOD_PAIR)))
    found = check_verdict(model, reranker, thinker)
    assert found["mass"] == pytest.approx(float(expected[YES]), rel=1e-4)
    assert (found["no"], found["no_id"]) == ("", None)
    with pytest.raises(CheckpointError, match=r"its verdicts: 'yes' has probability 0\."):
        check_verdict(model, dataclasses.replace(reranker, verdict_floor=0.99), thinker)


def test_the_verdict_of_a_prompt_in_segments_is_asked_in_segments(tiny: TinyModels) -> None:
    model = tiny.model("gemma")
    # As one text these are one token, "\n\n".
    prompt = changed("gemma", suffix=("\n", *prompt_of("gemma").suffix))
    ids, end = whole_ids("gemma", model.tokenizer, *GOOD_PAIR), len(plain(model.tokenizer, GEMMA_PROMPT))
    asked = [*ids[:-end], *plain(model.tokenizer, "\n"), *ids[-end:]]
    reranker = dataclasses.replace(model.reranker, prompt=prompt)
    found = check_verdict(load_model(model.checkpoint, reranker), reranker, model.checkpoint)
    expected = next_token(model.checkpoint.folder, asked)[model.tokenizer.token_to_id("Yes")]
    assert found["mass"] == pytest.approx(float(expected), rel=1e-4)


def test_a_classification_head_has_no_verdicts(tiny: TinyModels) -> None:
    model = tiny.model("qwen2_classifier")
    assert check_verdict(None, model.reranker, model.checkpoint) == {}
