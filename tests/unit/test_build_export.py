# SPDX-License-Identifier: Apache-2.0
"""The exported graph is the checkpoint: the same scores, plain operators, the declared inputs, nothing else inside."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForSequenceClassification

import build_engines.export
import build_engines.quantize
from build_engines.errors import ExportError
from build_engines.export import export
from build_engines.quantize import quantize_for_cpu
from build_engines.serving_code import graph_scoring
from tests.checkpoints import CORPUS
from tests.unit.tiny_models import CROSS_ENCODERS, WRITERS, TinyModels

Arrays = dict[str, NDArray[np.int64]]
BATCHES = ([5], [512], [7, 300, 64], [9, 9, 9], [5 + 3 * row for row in range(64)])


def batch(lengths: list[int], family: str, *, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    position, ends = np.arange(max(lengths)), np.array(lengths)[:, None]
    mask = (position < ends).astype(np.int64)
    pad = 0 if family in ("bert", "bi_encoder") else 1
    found = {"input_ids": np.where(mask == 1, rng.integers(5, 330, mask.shape), pad), "attention_mask": mask}
    if family in ("bert", "bi_encoder"):
        found["token_type_ids"] = (position >= ends // 3).astype(np.int64) * mask
    return found


def run(graph: Path, arrays: Arrays) -> NDArray[np.float32]:
    session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
    scores: NDArray[np.float32] = session.run(None, arrays)[0]
    return scores


def own_scores(folder: Path, arrays: Arrays) -> NDArray[np.float32]:
    """What transformers gives, called with its usual two-dimensional mask."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        logits: Any = model(**{name: torch.from_numpy(array) for name, array in arrays.items()}).logits
    found: NDArray[np.float32] = logits.numpy()
    return found


@pytest.mark.parametrize("family", CROSS_ENCODERS)
def test_scores_equal_pytorch_on_ragged_batches(tiny: TinyModels, family: str) -> None:
    graph, folder = tiny.graph(family), tiny.model(family).checkpoint.folder
    for seed, lengths in enumerate(BATCHES):
        arrays = batch(lengths, family, seed=seed)
        expected = own_scores(folder, arrays)
        found = run(graph, arrays)
        assert found.shape == (len(lengths), 1)
        assert len(lengths) < 3 or expected.std() > 0.1
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("family", WRITERS)
def test_gelu_and_layer_normalisation_stay_single_operators(tiny: TinyModels, family: str) -> None:
    operators = Counter(node.op_type for node in onnx.load(tiny.graph(family)).graph.node)
    assert operators["LayerNormalization"] >= 5  # embeddings, and two in each of two layers
    assert operators["Gelu"] == 2
    assert operators["Softmax"] == 2


@pytest.mark.parametrize("family", WRITERS)
def test_operators_that_engines_lack_do_not_occur(tiny: TinyModels, family: str) -> None:
    model = onnx.load(tiny.graph(family))
    operators = {node.op_type for node in model.graph.node}
    assert not operators & {"CumSum", "GatherND", "ScatterND", "IsNaN", "NonZero", "If", "Loop", "Erf"}
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    assert {(entry.domain, entry.version) for entry in model.opset_import} == {("", 20)}
    assert not model.functions
    assert model.ir_version == 10


@pytest.mark.parametrize("family", WRITERS)
def test_inputs_and_output_are_the_declared_ones_with_free_batch_and_length(tiny: TinyModels, family: str) -> None:
    graph = onnx.load(tiny.graph(family)).graph
    names = ["input_ids", "attention_mask"] + (["token_type_ids"] if family in ("bert", "bi_encoder") else [])
    assert [node.name for node in graph.input] == names
    for node in graph.input:
        assert node.type.tensor_type.elem_type == onnx.TensorProto.INT64
        assert [dim.dim_param for dim in node.type.tensor_type.shape.dim] == ["batch", "length"]
    (score,) = graph.output
    assert score.name == "SCORE"
    assert score.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert [dim.dim_param or dim.dim_value for dim in score.type.tensor_type.shape.dim] == ["batch", 1]


@pytest.mark.parametrize("family", WRITERS)
def test_no_path_and_no_stack_trace_is_inside(tiny: TinyModels, family: str) -> None:
    content = tiny.graph(family).read_bytes()
    for text in (str(Path.home()), str(Path.cwd()), str(tiny.root), sys.prefix, "site-packages", 'File "', ".py"):
        assert text.encode() not in content, text
    model = onnx.load(tiny.graph(family))
    parts: list[Any] = [model, model.graph, *model.graph.node, *model.graph.initializer]
    assert not any(part.metadata_props or part.doc_string for part in parts)


def test_two_exports_have_the_same_bytes(tiny: TinyModels, tmp_path: Path) -> None:
    model = tiny.model("roberta")
    export(model.checkpoint, model.reranker, tmp_path)
    assert (tmp_path / "model.onnx").read_bytes() == tiny.graph("roberta").read_bytes()


def test_segment_ids_matter_to_bert(tiny: TinyModels) -> None:
    arrays = batch([40, 60, 80], "bert")
    zeroed = arrays | {"token_type_ids": np.zeros_like(arrays["input_ids"])}
    assert np.abs(run(tiny.graph("bert"), arrays) - run(tiny.graph("bert"), zeroed)).min() > 1e-3


@pytest.mark.parametrize("family", CROSS_ENCODERS)
def test_ids_below_the_padding_do_not_matter(tiny: TinyModels, family: str) -> None:
    arrays = batch([40, 60, 80], family)
    filled = arrays | {"input_ids": np.where(arrays["attention_mask"] == 1, arrays["input_ids"], 77)}
    np.testing.assert_allclose(run(tiny.graph(family), arrays), run(tiny.graph(family), filled), atol=1e-6)


def test_a_folded_bi_encoder_scores_twenty_times_the_cosine_of_sentence_transformers(tiny: TinyModels) -> None:
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - takes seconds to import

    model = tiny.model("bi_encoder")
    rng = np.random.default_rng(8)
    queries = [CORPUS[row % len(CORPUS)] for row in range(50)]
    documents = [" ".join(rng.choice(CORPUS, size=rng.integers(1, 9))) for _ in queries]
    embedder = SentenceTransformer(str(model.checkpoint.folder), device="cpu")
    q, d = (embedder.encode(texts, normalize_embeddings=True).astype(np.float64) for texts in (queries, documents))
    expected = 20 * (q * d).sum(axis=1, keepdims=True)
    pairs = model.encoder().encode([text.encode() for text in queries], [text.encode() for text in documents])
    assert int(pairs.tokens.max()) > 100
    assert int(pairs.tokens.max()) <= 512
    assert pairs.token_type_ids is not None
    found = run(
        tiny.graph("bi_encoder"),
        {
            "input_ids": pairs.input_ids,
            "attention_mask": pairs.attention_mask,
            "token_type_ids": pairs.token_type_ids,
        },
    )
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.fixture(scope="module")
def external(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP32 and INT8 graphs whose weights lie beside them, as those of models above 2 GB do."""
    root = tmp_path_factory.mktemp("external")
    model = tiny.model("xlm_roberta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_engines.export, "INLINE_BYTES", 1000)
        patch.setattr(build_engines.quantize, "INLINE_BYTES", 1000)
        for name in ("fp32", "int8"):
            (root / name).mkdir()
        export(model.checkpoint, model.reranker, root / "fp32")
        quantize_for_cpu(root / "fp32" / "model.onnx", root / "int8")
    return root


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_large_weights_lie_beside_the_graph_and_move_with_it(
    tiny: TinyModels, external: Path, tmp_path: Path, precision: str
) -> None:
    assert {file.name for file in (external / precision).iterdir()} == {"model.onnx", "model.onnx.data"}
    moved = tmp_path / "moved"
    shutil.copytree(external / precision, moved)
    inline = tiny.graph("xlm_roberta") if precision == "fp32" else tiny.int8_graph("xlm_roberta")
    arrays = batch([40, 7], "xlm_roberta")
    np.testing.assert_allclose(run(moved / "model.onnx", arrays), run(inline, arrays), atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_missing_weights_are_named_when_the_graph_is_opened(external: Path, tmp_path: Path, precision: str) -> None:
    shutil.copyfile(external / precision / "model.onnx", tmp_path / "model.onnx")
    with pytest.raises(Exception, match=r"model\.onnx\.data"):
        graph_scoring.GraphScorer(tmp_path / "model.onnx", threads=1, tokens_per_run=512)


@pytest.mark.parametrize("family", CROSS_ENCODERS)
def test_quantising_turns_the_linear_layers_and_nothing_else_to_int8(tiny: TinyModels, family: str) -> None:
    before, after = (
        Counter(node.op_type for node in onnx.load(graph).graph.node)
        for graph in (tiny.graph(family), tiny.int8_graph(family))
    )
    # Six linear layers in each of two layers, and the head's two or BERT's pooler and head.
    assert after["MatMulInteger"] == 14
    assert after["MatMul"] == 4  # attention: queries by keys, weights by values
    assert (after["Gather"], after["LayerNormalization"]) == (before["Gather"], before["LayerNormalization"])
    arrays = batch([40, 60, 80, 100], family)
    shift = np.abs(run(tiny.int8_graph(family), arrays) - run(tiny.graph(family), arrays)).max()
    assert 0 < shift < 0.5


@pytest.mark.parametrize("family", CROSS_ENCODERS)
def test_int8_weights_are_symmetric_with_a_scale_for_each_output_channel(tiny: TinyModels, family: str) -> None:
    graph = onnx.load(tiny.int8_graph(family)).graph
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "MatMulInteger":
            weight, zero = weights[node.input[1]], weights[node.input[3]]
            scale = weights[node.input[1].replace("_quantized", "_scale")]
            assert weight.dtype == np.int8
            assert zero.shape == scale.shape == weight.shape[1:]
            assert not zero.any()


def test_a_graph_without_linear_layers_cannot_be_quantised(tmp_path: Path) -> None:
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    opset = [onnx.helper.make_opsetid("", 20)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=10), tmp_path / "model.onnx")
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match='set precision = "fp32"'):
        quantize_for_cpu(tmp_path / "model.onnx", tmp_path / "out")
