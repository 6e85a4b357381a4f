# SPDX-License-Identifier: Apache-2.0
"""Which operators an exported graph consists of: a new one is a new thing that an engine must know."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest

from build_engines.export import export
from tests.checkpoints import row, write_bert
from tests.unit.tiny_models import TinyModels, prepare

BODY = {
    *("Add", "Cast", "Concat", "Gather", "Gelu", "LayerNormalization", "MatMul", "Mul", "Range", "Reshape", "Shape"),
    *("Softmax", "Squeeze", "Sub", "Transpose", "Unsqueeze"),
}
CLASSIFIER = {"Gemm", "Tanh"}
COSINE = {"Clip", "Div", "ReduceL2", "ReduceSum"}
OPERATORS = {
    "bert": BODY | CLASSIFIER,
    # Expand makes the segment ids that they do not have.
    "roberta": BODY | CLASSIFIER | {"Expand"},
    "xlm_roberta": BODY | CLASSIFIER | {"Expand"},
    "bi_encoder": BODY | COSINE | {"Expand"},
}


def architecture(layers: int, head: int) -> dict[str, int]:
    """Count what a post-norm encoder has: a normalisation of the embeddings, then two, a Gelu and a softmax a layer.

    Products a layer: query, key, value, attention's two and its output, up and down. Gather: words, positions and
    segments, and the first token for a classifier's head.
    """
    return {
        "LayerNormalization": 1 + 2 * layers,
        "Gelu": layers,
        "Softmax": layers,
        "MatMul": 8 * layers,
        "Gemm": head,
        "Gather": 3 + bool(head),
    }


def counted(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.parametrize("family", OPERATORS)
def test_a_graph_has_exactly_these_operators(tiny: TinyModels, family: str) -> None:
    assert set(counted(tiny.graph(family))) == OPERATORS[family]


@pytest.mark.parametrize("family", OPERATORS)
def test_operators_are_counted_as_the_architecture_says(tiny: TinyModels, family: str) -> None:
    expected = architecture(layers=2, head=0 if family == "bi_encoder" else 2)
    found = counted(tiny.graph(family))
    assert {name: found[name] for name in expected} == expected


def test_a_third_layer_adds_the_operators_of_one(tmp_path: Path) -> None:
    (tmp_path / "pairing").mkdir()
    model = prepare(row("deeper", write_bert(tmp_path / "checkpoint", layers=3)), tmp_path / "pairing")
    export(model.checkpoint, model.reranker, tmp_path)
    expected, found = architecture(layers=3, head=2), counted(tmp_path / "model.onnx")
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("family", OPERATORS)
def test_graphs_are_of_opset_20_and_ir_10_and_of_no_other_domain(tiny: TinyModels, family: str) -> None:
    model = onnx.load(tiny.graph(family))
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 20)]
    assert model.ir_version == 10
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions
    assert not model.training_info


@pytest.mark.parametrize("family", OPERATORS)
def test_every_node_has_a_name_of_its_own_and_no_graph_inside(tiny: TinyModels, family: str) -> None:
    nodes = onnx.load(tiny.graph(family)).graph.node
    assert len({node.name for node in nodes} - {""}) == len(nodes)
    assert not [node.name for node in nodes if any(attribute.HasField("g") for attribute in node.attribute)]
