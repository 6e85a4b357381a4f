# SPDX-License-Identifier: Apache-2.0
"""Q/DQ pairs for TensorRT: around the chosen products, symmetric, with the scales that NumPy computes, nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from build_engines import quantize
from build_engines.errors import ExportError
from build_engines.low_precision import lower
from build_engines.quantize import attention_products, linear_layers, quantize_for_tensorrt
from tests.unit.small_graphs import ATTENTION, HEAD, LINEAR, arrays, encoder, in_numpy, run, weights
from tests.unit.tiny_models import TinyModels

FAMILIES = ("bert", "xlm_roberta", "bi_encoder")
PAIR = ("QuantizeLinear", "DequantizeLinear")


def constants(model: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    return {weight.name: numpy_helper.to_array(weight) for weight in model.graph.initializer}


def producers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {output: node for node in model.graph.node for output in node.output}


def by_name(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {node.name: node for node in model.graph.node}


def small_ranges() -> dict[str, float]:
    """The largest value of every activation that enters a product."""
    found = in_numpy(weights(), arrays())
    found["key_turned"] = found["key"]
    names = {activation for activation, _ in LINEAR.values()} | {name for pair in ATTENTION.values() for name in pair}
    return {name: float(np.abs(found[name]).max()) for name in names}


def quantised(tiny: TinyModels, family: str, *, attention: bool = False) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return the FP32 graph and the quantised one, with a range of its own for each activation."""
    path = tiny.graph(family)
    model = onnx.load(path)
    chosen = linear_layers(model.graph) + (attention_products(model.graph) if attention else [])
    made = quantize_for_tensorrt(onnx.load(path), ranges_of(model), [node.name for node in chosen])
    return model, made


def ranges_of(model: onnx.ModelProto) -> dict[str, float]:
    names = {node.input[0] for node in linear_layers(model.graph)}
    names |= {name for node in attention_products(model.graph) for name in node.input}
    return {name: 1.0 + index / 8 for index, name in enumerate(sorted(names))}


def test_the_products_of_a_small_graph_are_told_apart() -> None:
    graph = encoder(weights()).graph
    assert [node.name for node in linear_layers(graph)] == list(LINEAR)
    assert [node.name for node in attention_products(graph)] == list(ATTENTION)


@pytest.mark.parametrize("family", FAMILIES)
def test_linear_layers_are_six_a_layer_and_attention_has_two_products(tiny: TinyModels, family: str) -> None:
    model = onnx.load(tiny.graph(family))
    stored = constants(model)
    # Hidden 32, feed-forward 64: query, key, value, attention's output, up and down, in each of two layers.
    shapes = [(32, 32)] * 4 + [(32, 64), (64, 32)]
    assert [stored[node.input[1]].shape for node in linear_layers(model.graph)] == 2 * shapes
    assert {node.op_type for node in linear_layers(model.graph)} == {"MatMul"}
    assert len(attention_products(model.graph)) == 4
    normed = {name for node in model.graph.node if node.op_type == "Softmax" for name in node.output}
    assert sum(node.input[0] in normed for node in attention_products(model.graph)) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_linear_layers_are_quantised(tiny: TinyModels, family: str) -> None:
    before, after = quantised(tiny, family)
    onnx.checker.check_model(after, full_check=True)
    linear = {node.name for node in linear_layers(before.graph)}
    producer, old = producers(after), by_name(before)
    for node in after.graph.node:
        if node.op_type in PAIR:
            continue
        makers = [producer[name].op_type for name in node.input if name in producer]
        if node.name in linear:
            assert makers == ["DequantizeLinear", "DequantizeLinear"]
        else:
            # Residual additions too read what they read before, not what was rounded for the product beside them.
            assert list(node.input) == list(old[node.name].input), node.name
        assert list(node.output) == list(old[node.name].output)
    counts = Counter(node.op_type for node in after.graph.node)
    assert counts - Counter(node.op_type for node in before.graph.node) == Counter(
        # Query, key and value share one activation: 4 in each of two layers. Weights are stored rounded.
        {"QuantizeLinear": 8, "DequantizeLinear": 8 + 12}
    )


def test_attention_is_quantised_on_both_sides_where_it_is_chosen(tiny: TinyModels) -> None:
    before, after = quantised(tiny, "xlm_roberta", attention=True)
    onnx.checker.check_model(after, full_check=True)
    producer, old = producers(after), by_name(before)
    products = [node.name for node in attention_products(before.graph)]
    assert len(products) == 4
    for name in products:
        for position, dequantised in enumerate(by_name(after)[name].input):
            pair = producer[dequantised]
            assert pair.op_type == "DequantizeLinear"
            rounding = producer[pair.input[0]]
            assert rounding.op_type == "QuantizeLinear"
            assert rounding.input[0] == old[name].input[position]
    # Four of linear layers, and queries, keys, weights and values, in each of two layers.
    assert Counter(node.op_type for node in after.graph.node)["QuantizeLinear"] == 16


@pytest.mark.parametrize("family", FAMILIES)
def test_an_activation_has_one_pair_with_its_range_over_127(tiny: TinyModels, family: str) -> None:
    before, after = quantised(tiny, family, attention=True)
    stored, ranges = constants(after), ranges_of(before)
    roundings = [node for node in after.graph.node if node.op_type == "QuantizeLinear"]
    assert Counter(node.input[0] for node in roundings) == Counter(dict.fromkeys(ranges, 1))
    assert len(set(ranges.values())) == len(ranges) == 16
    back = {node.input[0]: node for node in after.graph.node if node.op_type == "DequantizeLinear"}
    for node in roundings:
        assert back[node.output[0]].input[1:] == node.input[1:]
        scale, zero = stored[node.input[1]], stored[node.input[2]]
        assert (scale.shape, zero.shape, zero.dtype, zero.tolist()) == ((), (), np.dtype(np.int8), 0)
        np.testing.assert_allclose(scale, ranges[node.input[0]] / 127, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_int8_with_a_scale_for_each_output_channel(tiny: TinyModels, family: str) -> None:
    before, after = quantised(tiny, family)
    old, stored, producer = constants(before), constants(after), producers(after)
    for node in linear_layers(before.graph):
        pair = producer[by_name(after)[node.name].input[1]]
        values, scale, zero = (stored[name] for name in pair.input)
        weight = old[node.input[1]]
        expected = np.abs(weight).max(axis=0) / np.float32(127)
        assert helper.get_node_attr_value(pair, "axis") == 1
        np.testing.assert_allclose(scale, expected, rtol=1e-6)
        assert values.dtype == zero.dtype == np.int8
        assert zero.shape == scale.shape == (weight.shape[1],)
        assert not zero.any()
        np.testing.assert_array_equal(values, np.rint(weight / expected).astype(np.int8))
        assert np.abs(values).max(axis=0).tolist() == [127] * weight.shape[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_else_is_stored_as_before(tiny: TinyModels, family: str) -> None:
    before, after = quantised(tiny, family)
    old, stored = constants(before), constants(after)
    gone = {node.input[1] for node in linear_layers(before.graph)}
    assert not gone & set(stored)
    for name in set(old) - gone:
        assert stored[name].dtype == old[name].dtype
        np.testing.assert_array_equal(stored[name], old[name])
    added = sum(array.nbytes for name, array in stored.items() if array.dtype == np.int8 and array.size > 100)
    assert added == sum(old[name].nbytes for name in gone) // 4


@pytest.mark.parametrize(
    "nodes", [("down",), ("query", "up"), tuple(LINEAR), tuple(ATTENTION), (*LINEAR, *ATTENTION)], ids=len
)
def test_a_small_graph_computes_what_numpy_rounds_to_int8(nodes: Collection[str]) -> None:
    ranges = small_ranges()
    found = run(quantize_for_tensorrt(encoder(weights()), ranges, nodes), arrays(), [*LINEAR, *ATTENTION, *HEAD])
    expected = in_numpy(weights(), arrays(), ranges=ranges, int8=nodes)
    plain = in_numpy(weights(), arrays())
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, err_msg=name)
    assert np.abs(plain["SCORE"] - expected["SCORE"]).max() > 1e-4


def test_values_beyond_the_range_are_cut() -> None:
    ranges = small_ranges() | {"gelu": small_ranges()["gelu"] / 4}
    found = run(quantize_for_tensorrt(encoder(weights()), ranges, ["down"]), arrays(), ["down"])["down"]
    inside = in_numpy(weights(), arrays())["gelu"].clip(max=ranges["gelu"])
    expected = in_numpy(weights(), arrays(), ranges=ranges, int8=["down"])["down"]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(found, inside @ weights()["w_down"], atol=0.05)
    assert np.abs(found - in_numpy(weights(), arrays())["down"]).max() > 0.2


def test_a_gemm_of_the_body_keeps_its_bias_and_is_scaled_by_its_rows_where_it_is_turned() -> None:
    c = weights()
    c["w_turned"] = np.ascontiguousarray(c["w_down"].T)
    model = encoder(c)
    nodes = by_name(model)
    nodes["gelu"].output[0] = "gelu_3d"
    shapes = {"flat": np.array([-1, 16], np.int64), "deep": np.array([3, 5, 8], np.int64)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in shapes.items())
    gemm = [
        helper.make_node("Reshape", ["gelu_3d", "flat"], ["gelu"], "flatten"),
        helper.make_node("Gemm", ["gelu", "w_turned", "beta"], ["down_flat"], "down", transB=1),
        helper.make_node("Reshape", ["down_flat", "deep"], ["down"], "deepen"),
    ]
    at = [node.name for node in model.graph.node].index("down")
    after = list(model.graph.node)[at + 1 :]
    del model.graph.node[at:]
    model.graph.node.extend([*gemm, *after])
    assert [node.name for node in linear_layers(model.graph)] == list(LINEAR)
    made = quantize_for_tensorrt(model, small_ranges(), ["down"])
    pair = producers(made)[by_name(made)["down"].input[1]]
    assert helper.get_node_attr_value(pair, "axis") == 0
    np.testing.assert_allclose(constants(made)[pair.input[1]], np.abs(c["w_down"]).max(0) / 127, rtol=1e-6)
    assert by_name(made)["down"].input[2] == "beta"
    expected = in_numpy(c, arrays(), ranges=small_ranges(), int8=["down"])["down"] + c["beta"]
    np.testing.assert_allclose(run(made, arrays(), ["down"])["down"], expected, atol=1e-5)


def test_a_matrix_that_the_head_reads_too_stays_exact_there() -> None:
    made = quantize_for_tensorrt(encoder(weights()), small_ranges(), list(LINEAR))
    assert by_name(made)["pooled"].input[1] == "w_shared"
    np.testing.assert_array_equal(constants(made)["w_shared"], weights()["w_shared"])
    assert {weight.name for weight in made.graph.initializer} <= {n for node in made.graph.node for n in node.input}


def test_a_matrix_that_two_layers_share_may_be_int8_in_one_of_them() -> None:
    model = encoder(weights())
    by_name(model)["key"].input[1] = "w_query"
    made = quantize_for_tensorrt(model, small_ranges(), ["query"])
    c = weights() | {"w_key": weights()["w_query"]}
    expected = in_numpy(c, arrays(), ranges=small_ranges(), int8=["query"])
    found = run(made, arrays(), ["query", "key", "SCORE"])
    for name, values in found.items():
        np.testing.assert_allclose(values, expected[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("size", [1e-6, 1e-9, 0.0])
def test_scales_stay_above_zero_in_fp16(size: float) -> None:
    # TensorRT refuses a scale of 0; a channel or an activation may be next to nothing.
    c = weights()
    c["w_up"][:, 3] *= np.float32(size)
    model = quantize_for_tensorrt(encoder(c), small_ranges() | {"context": size}, list(LINEAR))
    lowered = lower(model, "fp16")
    scales = [constants(lowered)[node.input[1]] for node in lowered.graph.node if node.op_type in PAIR]
    assert {scale.dtype for scale in scales} == {np.dtype(np.float16)}
    assert min(float(scale.min()) for scale in scales) > 0
    up = run(model, arrays(), ["up"])["up"][..., 3]
    assert np.abs(up).max() <= 1e-4


def damaged(change: str) -> onnx.ModelProto:
    """Return a quantised small graph with one thing wrong."""
    model = quantize_for_tensorrt(encoder(weights()), small_ranges(), ["up", "down"])
    stored = {weight.name: weight for weight in model.graph.initializer}
    pair = producers(model)[by_name(model)["up"].input[0]]
    values: dict[str, tuple[int, Any]] = {
        "zero point": (2, np.array(1, np.int8)),
        "zero scale": (1, np.array(0, np.float32)),
        "negative scale": (1, np.array(-0.1, np.float32)),
        "infinite scale": (1, np.array(np.inf, np.float32)),
        "nan scale": (1, np.array(np.nan, np.float32)),
    }
    if change in values:
        position, value = values[change]
        stored[pair.input[position]].CopyFrom(numpy_helper.from_array(value, pair.input[position]))
    elif change == "residual":
        by_name(model)["down_residual"].input[1] = by_name(model)["up"].input[0]
    elif change == "activation":
        by_name(model)["up"].input[0] = "attended"
    return model


@pytest.mark.parametrize("change", ["zero point", "zero scale", "negative scale", "infinite scale", "nan scale"])
def test_what_tensorrt_would_not_take_is_refused(change: str) -> None:
    with pytest.raises(ExportError, match="has a zero point other than 0, or a scale that is not above 0"):
        quantize._check_explicit(damaged(change), ["up", "down"])


@pytest.mark.parametrize(
    ("change", "said"),
    [("residual", "down_residual has 1 quantised inputs"), ("activation", "up has 1 quantised inputs")],
)
def test_a_product_half_quantised_and_a_rounded_residual_are_refused(change: str, said: str) -> None:
    with pytest.raises(ExportError, match=said):
        quantize._check_explicit(damaged(change), ["up", "down"])


def test_a_chosen_product_that_is_not_quantised_is_refused() -> None:
    with pytest.raises(ExportError, match="query has 0 quantised inputs; wanted is 2"):
        quantize._check_explicit(damaged("nothing"), ["up", "down", "query"])
    quantize._check_explicit(damaged("nothing"), ["up", "down"])


def test_no_tensor_is_stored_in_another_type_than_int8_where_weights_were_quantised() -> None:
    made = quantize_for_tensorrt(encoder(weights()), small_ranges(), list(LINEAR))
    matrices = {weight.name: weight.data_type for weight in made.graph.initializer if list(weight.dims) == [8, 8]}
    assert Counter(matrices.values()) == {TensorProto.INT8: 4, TensorProto.FLOAT: 1}
    assert matrices["w_shared"] == TensorProto.FLOAT
