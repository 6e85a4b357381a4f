# SPDX-License-Identifier: Apache-2.0
"""The exported graph has the form that TensorRT's fused attention looks for, and layers with the checkpoint's names."""

from __future__ import annotations

import onnx
import pytest
from onnx import numpy_helper
from transformers import AutoConfig, AutoModel

from tests.unit.tiny_models import TinyModels

FAMILIES = ("bert", "roberta", "xlm_roberta", "bi_encoder")


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_are_scaled_before_their_product_with_the_keys(tiny: TinyModels, family: str) -> None:
    config = AutoConfig.from_pretrained(tiny.model(family).checkpoint.folder)
    head_size = config.hidden_size // config.num_attention_heads
    graph = onnx.load(tiny.graph(family)).graph
    producers = {output: node for node in graph.node for output in node.output}
    weights = {weight.name: weight for weight in graph.initializer}
    softmax = [node for node in graph.node if node.op_type == "Softmax"]
    assert len(softmax) == config.num_hidden_layers
    for node in softmax:
        masked = producers[node.input[0]]
        product = next(producers[name] for name in masked.input if producers[name].op_type == "MatMul")
        scaled = producers[product.input[0]]
        assert (masked.op_type, scaled.op_type) == ("Add", "Mul")
        assert numpy_helper.to_array(weights[scaled.input[1]]) == pytest.approx(head_size**-0.5)


@pytest.mark.parametrize("family", FAMILIES)
def test_linear_layers_carry_the_names_of_the_checkpoints_modules(tiny: TinyModels, family: str) -> None:
    encoder = AutoModel.from_pretrained(tiny.model(family).checkpoint.folder)
    modules = {name for name, module in encoder.named_modules() if type(module).__name__ == "Linear"}
    graph = onnx.load(tiny.graph(family)).graph
    constant = {weight.name for weight in graph.initializer}
    named = {node.name for node in graph.node if node.op_type == "MatMul" and node.input[1] in constant}
    expected = {name for name in modules if name.startswith("encoder.")}
    assert {name[name.index("encoder.") :] for name in named} == expected
