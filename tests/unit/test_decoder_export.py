# SPDX-License-Identifier: Apache-2.0
"""A decoder's exported graph scores as Transformers' whole model, alone or in a batch, however rows are padded."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.decoder_checkpoints import DECODER_FAMILIES
from tests.unit.tiny_models import TinyModels
from tests.unit.written_prompts import Segments, random_pairs

Ids = NDArray[np.int64]
Scores = NDArray[np.float32]

BUCKET = 384
VOCABULARY = {"qwen2": 151_936, "qwen2_classifier": 151_936, "qwen3": 151_936, "llama": 128_256}
# Both sides compute in FP32, and scores have a spread of 1 to 2.
TOLERANCE = 1e-4
every_family = pytest.mark.parametrize("family", DECODER_FAMILIES)


@functools.cache
def rows(tiny: TinyModels, family: str) -> list[list[int]]:
    """Return the ids of twenty pairs, of which one has to be cut; one is no prompt at all."""
    segments = Segments.of(family, tiny.model(family).tokenizer)
    pairs = [*random_pairs(83, 17), ("panda", ""), ("panda", "bread " * 1000)]
    return [*(segments.row(query, document, BUCKET) for query, document in pairs), [7]]


@functools.cache
def expected(tiny: TinyModels, family: str) -> Scores:
    """Score each row alone with the whole model as Transformers loads it, and read the verdicts off its vocabulary."""
    folder, tokenizer = tiny.model(family).checkpoint.folder, tiny.model(family).tokenizer
    kind: Any = AutoModelForSequenceClassification if family == "qwen2_classifier" else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32)
    scores = []
    for ids in rows(tiny, family):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits
        if family == "qwen2_classifier":
            assert logits.shape == (1, 1)
            scores.append(logits[0, 0])
        elif family == "gemma":
            scores.append(logits[0, -1, tokenizer.token_to_id("Yes")])
        else:
            assert logits.shape[-1] == VOCABULARY[family]
            scores.append(logits[0, -1, tokenizer.token_to_id("yes")] - logits[0, -1, tokenizer.token_to_id("no")])
    return np.array(scores, np.float32)


@functools.cache
def session(path: Path) -> ort.InferenceSession:
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


def padded(batch: list[list[int]], width: int, vocabulary: int) -> dict[str, Ids]:
    """Pad rows on the right with any ids, none of which may be seen."""
    ids = np.random.default_rng(width).integers(0, vocabulary, (len(batch), width))
    mask = np.zeros_like(ids)
    for row, own in enumerate(batch):
        ids[row, : len(own)], mask[row, : len(own)] = own, 1
    return {"input_ids": ids, "attention_mask": mask}


def score(tiny: TinyModels, family: str, batch: list[list[int]], width: int = 0) -> Scores:
    vocabulary = int(tiny.model(family).checkpoint.config["vocab_size"])
    feed = padded(batch, width or max(map(len, batch)), vocabulary)
    scores: Scores = session(tiny.graph(family)).run(None, feed)[0]
    assert scores.shape == (len(batch), 1)
    assert scores.dtype == np.float32
    return scores[:, 0]


@every_family
def test_each_row_alone_has_the_score_of_the_whole_model(tiny: TinyModels, family: str) -> None:
    wanted = expected(tiny, family)
    assert wanted.std() > 0.5
    found = np.concatenate([score(tiny, family, [ids]) for ids in rows(tiny, family)])
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)


@every_family
@pytest.mark.parametrize("padding", [1, 37, BUCKET])
def test_padding_changes_no_score_whatever_its_ids(tiny: TinyModels, family: str, padding: int) -> None:
    found = [score(tiny, family, [ids], min(len(ids) + padding, BUCKET + 37)) for ids in rows(tiny, family)]
    np.testing.assert_allclose(np.concatenate(found), expected(tiny, family), atol=TOLERANCE)


@every_family
@pytest.mark.parametrize("size", [4, 20])
def test_a_ragged_batch_has_the_scores_of_its_rows(tiny: TinyModels, family: str, size: int) -> None:
    batches = [rows(tiny, family)[start : start + size] for start in range(0, 20, size)]
    assert all(len({len(ids) for ids in batch}) > 1 for batch in batches)
    for width in (0, BUCKET):
        found = np.concatenate([score(tiny, family, batch, width) for batch in batches])
        np.testing.assert_allclose(found, expected(tiny, family), atol=TOLERANCE)


def test_a_ragged_batch_of_a_classifier_has_the_scores_of_transformers_padded_batch(tiny: TinyModels) -> None:
    family, batch = "qwen2_classifier", rows(tiny, "qwen2_classifier")[:8]
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny.model(family).checkpoint.folder, dtype=torch.float32, pad_token_id=151643
    )
    feed = padded(batch, BUCKET, 100)
    ids = np.where(feed["attention_mask"] == 1, feed["input_ids"], 151643)
    with torch.no_grad():
        wanted = model(torch.from_numpy(ids), attention_mask=torch.from_numpy(feed["attention_mask"])).logits[:, 0]
    np.testing.assert_allclose(score(tiny, family, batch, BUCKET), wanted.numpy(), atol=TOLERANCE)


@every_family
def test_a_row_without_tokens_does_not_reach_its_neighbours(tiny: TinyModels, family: str) -> None:
    batch = rows(tiny, family)[:3]
    found = score(tiny, family, [batch[0], [], batch[1]])
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[[0, 2]], expected(tiny, family)[:2], atol=TOLERANCE)


@every_family
def test_the_graph_takes_ids_and_mask_of_any_batch_and_length(tiny: TinyModels, family: str) -> None:
    model = onnx.load(tiny.graph(family))
    shapes = {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    batch, length = shapes["input_ids"]
    assert isinstance(batch, str)
    assert isinstance(length, str)
    assert batch != length
    assert shapes == {"input_ids": [batch, length], "attention_mask": [batch, length], "SCORE": [batch, 1]}
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 20)]
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    assert kinds == {
        "input_ids": onnx.TensorProto.INT64,
        "attention_mask": onnx.TensorProto.INT64,
        "SCORE": onnx.TensorProto.FLOAT,
    }


@every_family
def test_only_the_embeddings_have_the_size_of_the_vocabulary(tiny: TinyModels, family: str) -> None:
    vocabulary = int(tiny.model(family).checkpoint.config["vocab_size"])
    graph = onnx.load(tiny.graph(family)).graph
    wide = [weight.name for weight in graph.initializer if vocabulary in weight.dims]
    assert wide == ["model.embed_tokens.weight"]
    readers = {node.op_type for node in graph.node if wide[0] in node.input}
    assert readers == {"Gather"}


@every_family
def test_every_constant_of_the_graph_is_finite_in_fp16(tiny: TinyModels, family: str) -> None:
    graph = onnx.load(tiny.graph(family)).graph
    constants = [
        *graph.initializer,
        *(a.t for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.TENSOR),
    ]
    floats = [numpy_helper.to_array(c) for c in constants if c.data_type == onnx.TensorProto.FLOAT]
    assert max(float(np.abs(values).max()) for values in floats) == 10000
    assert not any(node.op_type in ("IsNaN", "IsInf") for node in graph.node)
    assert not [
        a for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.FLOAT and abs(a.f) > 1e4
    ]
