# SPDX-License-Identifier: Apache-2.0
"""A decoder that is not what its row says, or whose graph would depend on the length of a row, is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from build_engines.decoders import check_decoder
from build_engines.errors import CheckpointError
from build_engines.families import load_model
from build_engines.fetch import fetch
from build_engines.table import Reranker
from tests.decoder_checkpoints import prompt_of, write_decoder
from tests.unit.tiny_models import TinyModels


def check(tiny: TinyModels, family: str, config: dict[str, Any], **overrides: Any) -> None:
    """Check a family's checkpoint with other values in its config and its row."""
    model = tiny.model(family)
    checkpoint = dataclasses.replace(model.checkpoint, config=dict(model.checkpoint.config) | config)
    check_decoder(checkpoint, dataclasses.replace(model.reranker, **overrides))


def refusal(tiny: TinyModels, family: str, config: dict[str, Any], **overrides: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        check(tiny, family, config, **overrides)
    return str(caught.value)


def test_a_language_model_as_a_classifier(tiny: TinyModels) -> None:
    model = tiny.model("qwen2")
    reranker = dataclasses.replace(model.reranker, head="sequence_classification")
    with pytest.raises(CheckpointError, match="tiny_qwen2: the checkpoint is a Qwen2ForCausalLM") as caught:
        load_model(model.checkpoint, reranker)
    assert '"sequence_classification" for a ...ForSequenceClassification with one label' in str(caught.value)


def test_a_classifier_as_a_language_model(tiny: TinyModels) -> None:
    message = refusal(tiny, "qwen2_classifier", {}, head="yes_no")
    assert "the checkpoint is a Qwen2ForSequenceClassification" in message
    assert 'Set head = "yes_no" for a ...ForCausalLM' in message


@pytest.mark.parametrize("architectures", [["Qwen2Model"], ["Qwen2ForTokenClassification"], [], None])
def test_an_architecture_without_a_head_that_scores(tiny: TinyModels, architectures: list[str] | None) -> None:
    named = architectures[0] if architectures else "nothing"
    for family in ("qwen2", "qwen2_classifier"):
        assert f"the checkpoint is a {named}." in refusal(tiny, family, {"architectures": architectures})


def test_a_decoder_as_a_bi_encoder(tiny: TinyModels) -> None:
    message = refusal(tiny, "qwen2", {"architectures": ["Qwen2Model"]}, head="bi_encoder", prompt=None)
    assert "the checkpoint is a Qwen2Model" in message


@pytest.mark.parametrize("labels", [{"0": "no", "1": "yes"}, {"0": "a", "1": "b", "2": "c"}])
def test_more_labels_than_one(tiny: TinyModels, labels: dict[str, str]) -> None:
    message = refusal(tiny, "qwen2_classifier", {"id2label": labels})
    assert f"the head has {len(labels)} labels; a reranker has 1" in message


def test_a_checkpoint_of_two_labels(tmp_path: Path, tiny: TinyModels) -> None:
    folder = write_decoder(tmp_path, "qwen2_classifier", num_labels=2)
    reranker = dataclasses.replace(tiny.model("qwen2_classifier").reranker, checkpoint=str(folder))
    with pytest.raises(CheckpointError, match="the head has 2 labels; a reranker has 1"):
        load_model(fetch(reranker), reranker)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "gemma"])
def test_more_tokens_than_positions(tiny: TinyModels, family: str) -> None:
    check(tiny, family, {"max_position_embeddings": 384})
    message = refusal(tiny, family, {"max_position_embeddings": 383})
    assert "max_length 384 exceeds the 383 tokens that the model attends to" in message
    assert "Set max_length and the last bucket to 383 or less" in message


def test_more_tokens_than_an_active_window(tiny: TinyModels) -> None:
    check(tiny, "qwen2", {"use_sliding_window": True, "sliding_window": 384})
    message = refusal(tiny, "qwen2", {"use_sliding_window": True, "sliding_window": 256})
    assert "max_length 384 exceeds the 256 tokens that the model attends to" in message


@pytest.mark.parametrize(
    "config",
    [
        {"use_sliding_window": False, "sliding_window": 256},
        {"sliding_window": 256},
        {"use_sliding_window": True, "sliding_window": None},
    ],
)
def test_a_window_that_is_off_limits_nothing(tiny: TinyModels, config: dict[str, Any]) -> None:
    check(tiny, "qwen2", config)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_angles_that_change_with_the_length_of_a_row(tiny: TinyModels, kind: str, place: str, key: str) -> None:
    config = {"rope_parameters": None, "rope_scaling": None} | {place: {key: kind, "factor": 2.0}}
    message = refusal(tiny, "llama", config)
    assert f"its rotary embedding is of the kind {kind!r}, which changes with the length of a row" in message


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_angles_that_are_the_same_for_every_row(tiny: TinyModels, kind: str, place: str) -> None:
    check(tiny, "llama", {"rope_parameters": None, "rope_scaling": None} | {place: {"rope_type": kind}})
    check(tiny, "llama", {"rope_parameters": None, "rope_scaling": None})


@pytest.mark.parametrize(("family", "weight"), [("qwen2", "lm_head.weight"), ("qwen2_classifier", "score.weight")])
def test_a_head_that_would_be_random(tiny: TinyModels, tmp_path: Path, family: str, weight: str) -> None:
    model = tiny.model(family)
    folder = tmp_path / "checkpoint"
    shutil.copytree(model.checkpoint.folder, folder)
    weights = load_file(folder / "model.safetensors")
    del weights[weight]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    reranker: Reranker = dataclasses.replace(model.reranker, checkpoint=str(folder))
    with pytest.raises(CheckpointError, match=f"lacks weights for {weight}.* so would the scores"):
        load_model(fetch(reranker), reranker)


def test_a_head_that_is_the_embeddings_matrix_needs_no_weights_of_its_own(tiny: TinyModels) -> None:
    model = tiny.model("qwen3")
    assert "lm_head.weight" not in load_file(model.checkpoint.folder / "model.safetensors")
    load_model(model.checkpoint, model.reranker)


def test_a_prompt_of_no_verdicts_is_no_matter_of_the_checkpoint(tiny: TinyModels) -> None:
    silent = dataclasses.replace(prompt_of("qwen2_classifier"), yes="", no="")
    check(tiny, "qwen2_classifier", {}, prompt=silent)


def test_what_is_quantised_already_or_only_an_adapter_is_refused(tiny: TinyModels, tmp_path: Path) -> None:
    model = tiny.model("qwen2")
    folder = tmp_path / "checkpoint"
    shutil.copytree(model.checkpoint.folder, folder)
    reranker = dataclasses.replace(model.reranker, checkpoint=str(folder))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {}}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="is quantised already; give the checkpoint that it was made from"):
        fetch(reranker)
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(CheckpointError, match="holds an adapter and not a whole checkpoint; merge it first"):
        fetch(reranker)
