# SPDX-License-Identifier: Apache-2.0
"""INT8 in decoders: seven linear layers of each layer, for either target, and neither rotary positions nor the head."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from build_engines.quantize import attention_products, linear_layers, quantize_for_cpu, quantize_for_tensorrt
from tests.unit.decoder_graphs import KINDS, LAYERS, LINEAR, DecoderGraphs, prompts
from tests.unit.small_graphs import run
from tests.unit.test_low_precision import producers

every_kind = pytest.mark.parametrize("kind", KINDS)
NAMES = [f"layers.{layer}.{name}" for layer in range(LAYERS) for name in LINEAR]


@every_kind
def test_linear_layers_are_seven_a_layer_and_attention_has_two_products(decoders: DecoderGraphs, kind: str) -> None:
    graph = decoders.of(kind).graph().graph
    assert [node.name for node in linear_layers(graph)] == NAMES
    products = attention_products(graph)
    assert len(products) == 2 * LAYERS
    normed = {node.output[0] for node in graph.node if node.op_type == "Softmax"}
    assert [node.input[0] in normed for node in products] == [False, True] * LAYERS


@every_kind
def test_quantising_for_the_cpu_takes_the_linear_layers_and_no_other_product(
    decoders: DecoderGraphs, kind: str, tmp_path: Path
) -> None:
    decoder = decoders.of(kind)
    before = decoder.graph()
    assert quantize_for_cpu(decoder.path, tmp_path)["quantised_linear_layers"] == 7 * LAYERS
    after = onnx.load(tmp_path / "model.onnx")
    integer = [node.name for node in after.graph.node if node.op_type == "MatMulInteger"]
    assert sorted(integer) == sorted(f"{name}_quant" for name in NAMES)
    made = {node.name for node in after.graph.node}
    assert {node.name for node in before.graph.node} - made == set(NAMES)
    # What else there is quantises their activations and scales the results.
    new = Counter(n.op_type for n in after.graph.node) - Counter(n.op_type for n in before.graph.node)
    assert set(new) == {"DynamicQuantizeLinear", "MatMulInteger", "Cast", "Mul"}


@every_kind
def test_scores_of_the_cpu_graph_are_near_those_of_fp32(decoders: DecoderGraphs, kind: str, tmp_path: Path) -> None:
    decoder, rows = decoders.of(kind), [prompts((length,), seed=length) for length in range(40, 401, 40)]
    quantize_for_cpu(decoder.path, tmp_path)
    expected, found = (
        np.concatenate([run(onnx.load(path), feed)["SCORE"] for feed in rows])
        for path in (decoder.path, tmp_path / "model.onnx")
    )
    assert np.corrcoef(found[:, 0], expected[:, 0])[0, 1] > 0.9


@every_kind
def test_only_the_linear_layers_are_quantised_for_tensorrt(decoders: DecoderGraphs, kind: str) -> None:
    before = decoders.of(kind).graph()
    ranges = {node.input[0]: 4.0 for node in linear_layers(before.graph)}
    # Query, key and value share an activation, gate and up another.
    assert len(ranges) == 4 * LAYERS
    after = quantize_for_tensorrt(decoders.of(kind).graph(), ranges, NAMES)
    onnx.checker.check_model(after, full_check=True)
    producer, old = producers(after), {node.name: node for node in before.graph.node}
    for node in after.graph.node:
        if node.name in NAMES:
            assert [producer[name].op_type for name in node.input] == ["DequantizeLinear"] * 2
        elif node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            assert list(node.input) == list(old[node.name].input), node.name
    counts = Counter(n.op_type for n in after.graph.node) - Counter(n.op_type for n in before.graph.node)
    assert counts == Counter({"QuantizeLinear": 4 * LAYERS, "DequantizeLinear": (4 + 7) * LAYERS})
