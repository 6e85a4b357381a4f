# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that cannot be served faithfully is refused before anything is built, with what to do instead."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from build_engines.errors import CheckpointError
from build_engines.export import export
from build_engines.families import load_model
from build_engines.fetch import fetch
from build_engines.hashing import sha256_file
from build_engines.pairing import write_pairing
from tests.checkpoints import row, write_bert, write_bi_encoder, write_roberta, write_xlm_roberta


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_xlm_roberta(tmp_path / "checkpoint")


def refusal(folder: Path, **overrides: Any) -> str:
    """What the build says when it fetches and loads the checkpoint."""
    reranker = dataclasses.replace(row("tiny", folder), **overrides)
    with pytest.raises(CheckpointError) as caught:
        load_model(fetch(reranker), reranker)
    return str(caught.value)


def edit(folder: Path, name: str, **values: Any) -> None:
    fields = json.loads((folder / name).read_text(encoding="utf-8"))
    (folder / name).write_text(json.dumps(fields | values), encoding="utf-8")


def drop_weights(folder: Path, prefix: str) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_good_checkpoint_is_known_by_the_hashes_of_its_files(folder: Path) -> None:
    checkpoint = fetch(row("tiny", folder, sha256={"config.json": sha256_file(folder / "config.json")}))
    assert set(checkpoint.files) == {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert checkpoint.files["tokenizer.json"] == sha256_file(folder / "tokenizer.json")
    assert checkpoint.model_type == "xlm-roberta"


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal(folder)


def test_a_pickle_is_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(folder)
    assert "safetensors only" in message
    assert "save_pretrained(DIR)" in message


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}), encoding="utf-8")
    assert "lacks model-00002-of-00002.safetensors. Fetch the checkpoint again" in refusal(folder)


def test_no_fast_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    message = refusal(folder)
    assert "has no tokenizer.json" in message
    assert "save_pretrained(DIR)" in message


def test_another_file_than_the_pinned_one(folder: Path) -> None:
    message = refusal(folder, sha256={"model.safetensors": "0" * 64})
    assert sha256_file(folder / "model.safetensors") in message
    assert "change sha256 in rerankers.toml" in message


def test_a_pinned_file_that_is_not_there(folder: Path) -> None:
    assert "no such file" in refusal(folder, sha256={"vocab.txt": "0" * 64})


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_config_that_is_none(folder: Path, content: str | None) -> None:
    reranker = row("tiny", folder)
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        fetch(reranker)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("some/where/else", "neither a folder, a hub id (owner/name) nor package:MODULE/FOLDER"),
        ("owner/name", "as a hub id it needs a revision"),
        ("package:no_such_module/model", "is not installed. Run: make setup"),
    ],
)
def test_a_source_that_leads_nowhere(folder: Path, source: str, says: str) -> None:
    assert says in refusal(folder, checkpoint=source)


def test_an_embedding_model_as_a_cross_encoder(tmp_path: Path) -> None:
    message = refusal(write_bi_encoder(tmp_path / "checkpoint"), head="sequence_classification")
    assert "BertModel, which has no classification head" in message
    assert 'head = "bi_encoder"' in message


def test_a_cross_encoder_as_a_bi_encoder(folder: Path) -> None:
    assert "must be a BERT with mean pooling" in refusal(folder, head="bi_encoder")


def test_an_embedding_model_with_another_pooling(tmp_path: Path) -> None:
    folder = write_bi_encoder(tmp_path / "checkpoint")
    edit(folder, "1_Pooling/config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)
    assert "mean pooling" in refusal(folder)


def test_two_labels(tmp_path: Path) -> None:
    folder = write_xlm_roberta(tmp_path / "checkpoint", labels=2)
    assert "the head has 2 labels; a reranker has 1" in refusal(folder)


@pytest.mark.parametrize(
    ("write", "prefix"),
    [(write_xlm_roberta, "classifier."), (write_roberta, "classifier.out_proj"), (write_bert, "bert.pooler")],
)
def test_weights_that_would_be_random(tmp_path: Path, write: Callable[[Path], Path], prefix: str) -> None:
    folder = write(tmp_path / "checkpoint")
    drop_weights(folder, prefix)
    message = refusal(folder)
    assert f"lacks weights for {prefix}" in message
    assert "Use a checkpoint trained as a reranker" in message


def test_a_head_of_another_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["classifier.out_proj.weight"] = weights["classifier.out_proj.weight"][:, :16].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "classifier.out_proj.weight" in refusal(folder)


def test_more_tokens_than_the_model_has_positions(folder: Path) -> None:
    message = refusal(folder, max_length=600, buckets=(600,))
    assert "max_length 600 exceeds the model's 512 positions" in message
    assert "Set max_length and the last bucket to 512 or less" in message


@pytest.mark.parametrize("write", [write_xlm_roberta, write_roberta])
def test_positions_reserved_for_padding_are_not_counted(tmp_path: Path, write: Callable[..., Path]) -> None:
    folder = write(tmp_path / "checkpoint", max_positions=66)
    load_model(fetch(row("tiny", folder, max_length=64)), row("tiny", folder, max_length=64))
    assert "the model's 64 positions" in refusal(folder, max_length=65, buckets=(65,))


def test_every_position_of_bert_counts(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "checkpoint", max_positions=64)
    load_model(fetch(row("tiny", folder, max_length=64)), row("tiny", folder, max_length=64))
    assert "the model's 64 positions" in refusal(folder, max_length=65, buckets=(65,))


@pytest.mark.parametrize(("write", "wrong"), [(write_bert, False), (write_xlm_roberta, True), (write_roberta, True)])
def test_segment_ids_that_the_family_does_not_take(tmp_path: Path, write: Callable[[Path], Path], wrong: bool) -> None:
    message = refusal(write(tmp_path / "checkpoint"), segment_ids=wrong)
    assert f"set segment_ids = {str(not wrong).lower()}" in message


def test_a_family_that_is_not_supported(folder: Path) -> None:
    edit(folder, "config.json", model_type="deberta-v2")
    assert "holds a model of type 'deberta-v2'; supported: bert, roberta, xlm-roberta" in refusal(folder)


def pairing_refusal(folder: Path, out: Path) -> str:
    reranker = row("tiny", folder)
    with pytest.raises(CheckpointError) as caught:
        write_pairing(fetch(reranker), reranker, out)
    return str(caught.value)


def test_a_tokenizer_without_a_pair_template(folder: Path, tmp_path: Path) -> None:
    edit(folder, "tokenizer.json", post_processor=None)
    assert "its template is missing. Save the tokenizer again" in pairing_refusal(folder, tmp_path)


def test_a_config_without_a_padding_id(folder: Path, tmp_path: Path) -> None:
    edit(folder, "config.json", pad_token_id=None)
    assert "has no whole number for pad_token_id" in pairing_refusal(folder, tmp_path)


def test_an_added_token_that_control_tokens_hide(folder: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    token = tokenizer["added_tokens"][-1] | {"id": 900, "content": "[NEW]", "special": False}
    edit(folder, "tokenizer.json", added_tokens=[*tokenizer["added_tokens"], token])
    assert "The added token '[NEW]' would change its id" in pairing_refusal(folder, tmp_path)


def test_a_tokenizer_with_more_ids_than_the_model(folder: Path, tmp_path: Path) -> None:
    edit(folder, "config.json", vocab_size=300)
    assert "They do not belong together" in pairing_refusal(folder, tmp_path)


def test_weights_that_are_not_finite(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["classifier.out_proj.bias"] = weights["classifier.out_proj.bias"] * float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    reranker = row("tiny", folder)
    with pytest.raises(Exception, match="differ from PyTorch by nan"):
        export(fetch(reranker), reranker, tmp_path)


@pytest.mark.parametrize(("name", "damage"), [("model.safetensors", b"\x08"), ("tokenizer.json", b'{"version": ')])
def test_a_file_that_is_cut_short(folder: Path, tmp_path: Path, name: str, damage: bytes) -> None:
    (folder / name).write_bytes(damage)
    told = refusal(folder) if name == "model.safetensors" else pairing_refusal(folder, tmp_path)
    assert "again" in told
    assert str(folder) in told


def test_an_index_of_weights_that_names_none(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    assert "model.safetensors.index.json is damaged" in refusal(folder)
