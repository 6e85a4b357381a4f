# SPDX-License-Identifier: Apache-2.0
"""FP32 to FP16 or BF16: every tensor of the body, none of the head, and a twin that rounds as NumPy does."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.shape_inference import infer_shapes

from build_engines.errors import ExportError
from build_engines.low_precision import lower, twin
from build_engines.quantize import linear_layers, quantize_for_tensorrt
from build_engines.table import BasePrecision
from tests.unit.small_graphs import COMPUTED, HEAD, LINEAR, arrays, encoder, in_numpy, rounding_to, run, weights
from tests.unit.test_build_export import batch
from tests.unit.tiny_models import TinyModels

FAMILIES = ("bert", "xlm_roberta", "bi_encoder")
BASES: tuple[BasePrecision, ...] = ("fp16", "bf16")
ELEMENT = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
# What computes in FP32 after the last LayerNormalization; what it takes from the body passes a Cast.
CLASSIFIER = {"Cast": 1, "Gemm": 2, "Tanh": 1}
COSINE = {"Cast": 3, "Mul": 4, "ReduceSum": 3, "ReduceL2": 2, "Clip": 2, "Expand": 2, "Div": 2}
HEADS = {"bert": CLASSIFIER, "xlm_roberta": CLASSIFIER, "bi_encoder": COSINE}


def types(model: onnx.ModelProto) -> dict[str, int]:
    """Return the type of every tensor as onnx infers it, with all that it checks."""
    graph = infer_shapes(model, check_type=True, strict_mode=True, data_prop=True).graph
    found = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
    return found | {weight.name: weight.data_type for weight in graph.initializer}


def float_types(model: onnx.ModelProto) -> dict[str, int]:
    """Return those of them that are not whole numbers."""
    whole = (TensorProto.INT64, TensorProto.INT8, TensorProto.BOOL)
    return {name: kind for name, kind in types(model).items() if kind not in whole}


def producers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {output: node for node in model.graph.node for output in node.output}


def small_ranges() -> dict[str, float]:
    found = in_numpy(weights(), arrays())
    return {activation: float(np.abs(found[activation]).max()) for activation, _ in LINEAR.values()}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_but_the_head_is_of_the_base_type(tiny: TinyModels, family: str, base: BasePrecision) -> None:
    model = onnx.load(tiny.graph(family))
    lowered = lower(model, base)
    onnx.checker.check_model(lowered, full_check=True)
    kinds, producer = float_types(lowered), producers(lowered)
    assert set(kinds.values()) == {TensorProto.FLOAT, ELEMENT[base]}
    single = {name for name, kind in kinds.items() if kind == TensorProto.FLOAT}
    assert Counter(producer[name].op_type for name in single & set(producer)) == HEADS[family]
    assert sum(node.op_type == "Cast" for node in lowered.graph.node) == sum(
        node.op_type == "Cast" for node in model.graph.node
    ) + HEADS[family].get("Cast", 0)
    for node in lowered.graph.node:
        if node.op_type in ("LayerNormalization", "Softmax", "Gelu", "MatMul"):
            assert {kinds[name] for name in (*node.input, *node.output)} == {ELEMENT[base]}, node.name


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("family", ["bert", "xlm_roberta"])
def test_only_the_weights_of_the_head_stay_fp32(tiny: TinyModels, family: str, base: BasePrecision) -> None:
    lowered = lower(onnx.load(tiny.graph(family)), base)
    single = {weight.name for weight in lowered.graph.initializer if weight.data_type == TensorProto.FLOAT}
    gemms = [node for node in lowered.graph.node if node.op_type == "Gemm"]
    assert len(gemms) == 2
    assert single == {name for node in gemms for name in node.input[1:]}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_score_opset_and_ir_stay(tiny: TinyModels, family: str, base: BasePrecision) -> None:
    model = onnx.load(tiny.graph(family))
    before = model.SerializeToString()
    for made in (lower(model, base), twin(model, base)):
        assert made.graph.input == model.graph.input
        assert {value.type.tensor_type.elem_type for value in made.graph.input} == {TensorProto.INT64}
        assert made.graph.output == model.graph.output
        assert made.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
        assert [(entry.domain, entry.version) for entry in made.opset_import] == [("", 20)]
        assert made.ir_version == 10
    assert model.SerializeToString() == before


@pytest.mark.parametrize("base", BASES)
def test_casts_to_float_become_casts_to_the_base_type(base: BasePrecision) -> None:
    casts = [node for node in lower(encoder(weights()), base).graph.node if node.op_type == "Cast"]
    to = {node.output[0]: helper.get_node_attr_value(node, "to") for node in casts}
    assert to == {"mask": ELEMENT[base], "first_token_fp32": TensorProto.FLOAT}


@pytest.mark.parametrize("base", BASES)
def test_whole_numbers_are_left_alone(tiny: TinyModels, base: BasePrecision) -> None:
    model = onnx.load(tiny.graph("bi_encoder"))
    before, after = ({n: k for n, k in types(m).items() if k == TensorProto.INT64} for m in (model, lower(model, base)))
    assert len(before) > 20
    assert after == before


@pytest.mark.parametrize("base", BASES)
def test_a_weight_of_body_and_head_exists_in_both_types(base: BasePrecision) -> None:
    lowered = lower(encoder(weights()), base)
    onnx.checker.check_model(lowered, full_check=True)
    read = {node.name: list(node.input) for node in lowered.graph.node}
    stored = {weight.name: weight for weight in lowered.graph.initializer}
    body, head = stored[read["out"][1]], stored[read["pooled"][1]]
    assert (body.data_type, head.data_type) == (ELEMENT[base], TensorProto.FLOAT)
    np.testing.assert_array_equal(numpy_helper.to_array(head), weights()["w_shared"])
    halved = numpy_helper.to_array(body).astype(np.float32)
    np.testing.assert_array_equal(halved, rounding_to(base)(weights()["w_shared"]))
    assert {weight.name for weight in lowered.graph.initializer} <= {name for names in read.values() for name in names}


@pytest.mark.parametrize("base", BASES)
def test_a_product_reads_its_dequantised_inputs_without_a_cast(tiny: TinyModels, base: BasePrecision) -> None:
    model = onnx.load(tiny.graph("xlm_roberta"))
    linear = [node.name for node in linear_layers(model.graph)]
    ranges = {node.input[0]: 4.0 for node in linear_layers(model.graph)}
    lowered = lower(quantize_for_tensorrt(model, ranges, linear), base)
    onnx.checker.check_model(lowered, full_check=True)
    kinds, producer = types(lowered), producers(lowered)
    products = [node for node in lowered.graph.node if node.name in linear]
    assert len(products) == 12
    for node in products:
        for name in node.input:
            assert producer[name].op_type == "DequantizeLinear"
            values, scale, zero = producer[name].input
            assert (kinds[values], kinds[scale], kinds[zero]) == (TensorProto.INT8, ELEMENT[base], TensorProto.INT8)
            assert kinds[name] == ELEMENT[base]
        rounding = producer[producer[node.input[0]].input[0]]
        assert rounding.op_type == "QuantizeLinear"
        assert kinds[rounding.input[0]] == ELEMENT[base]
    assert Counter(node.op_type for node in lowered.graph.node)["Cast"] == 2


@pytest.mark.parametrize("base", BASES)
def test_every_tensor_of_the_twin_is_what_numpy_rounds_after_each_step(base: BasePrecision) -> None:
    expected, exact = in_numpy(weights(), arrays(), rounding_to(base)), in_numpy(weights(), arrays())
    found = run(twin(encoder(weights()), base), arrays(), [*COMPUTED, *HEAD])
    for name in COMPUTED:
        np.testing.assert_array_equal(found[name], rounding_to(base)(found[name]), err_msg=name)
    for name in found:
        step = 2.0 ** (-10 if base == "fp16" else -7)  # two kernels may round a value to two neighbours
        np.testing.assert_allclose(found[name], expected[name], rtol=step, atol=step, err_msg=name)
    off = np.abs(exact["SCORE"] - expected["SCORE"]).max()
    np.testing.assert_allclose(found["SCORE"], expected["SCORE"], atol=off / 10)
    assert all(np.abs(found[name] - rounding_to(base)(found[name])).max() > 0 for name in HEAD)


@pytest.mark.parametrize("base", BASES)
def test_the_twin_of_a_quantised_graph_is_what_numpy_rounds_twice(base: BasePrecision) -> None:
    ranges, names = small_ranges(), list(LINEAR)
    quantised = quantize_for_tensorrt(encoder(weights()), ranges, names)
    expected = in_numpy(weights(), arrays(), rounding_to(base), ranges, names)
    unrounded = in_numpy(weights(), arrays(), ranges=ranges, int8=names)
    found = run(twin(quantised, base), arrays(), [*COMPUTED, *HEAD])
    off = np.abs(unrounded["SCORE"] - expected["SCORE"]).max()
    np.testing.assert_allclose(found["SCORE"], expected["SCORE"], atol=off / 4)
    for name in COMPUTED:
        np.testing.assert_array_equal(found[name], rounding_to(base)(found[name]), err_msg=name)


# The products of queries and keys pass 65504; the softmax of the exact ones is as good as ever.
LARGE = {"w_query": 200.0, "w_key": 200.0}


def test_a_value_beyond_fp16_is_infinite_in_the_fp16_twin_and_finite_in_the_bf16_one() -> None:
    exact = in_numpy(weights(**LARGE), arrays())
    assert 65504 < np.abs(exact["scores"]).max() < 1e6
    model = encoder(weights(**LARGE))
    fp16 = run(twin(model, "fp16"), arrays(), ["scores", "SCORE"])
    np.testing.assert_array_equal(np.isinf(fp16["scores"]), np.abs(exact["scores"]) >= 65520)
    assert not np.isfinite(fp16["SCORE"]).all()
    bf16 = run(twin(model, "bf16"), arrays(), ["scores", "SCORE"])
    assert np.isfinite(bf16["scores"]).all()
    np.testing.assert_allclose(bf16["scores"], exact["scores"], rtol=0.1, atol=2000)
    assert np.isfinite(bf16["SCORE"]).all()


def test_onnx_runtime_does_not_show_that_overflow_in_the_fp16_graph_itself() -> None:
    # This is why there is a twin. Were it to fail, the graph itself could be verified.
    found = run(lower(encoder(weights(**LARGE)), "fp16"), arrays())["SCORE"]
    assert np.isfinite(found).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_are_nearly_all_padding_score_as_in_fp32(tiny: TinyModels, family: str) -> None:
    model = onnx.load(tiny.graph(family))
    padded = batch([128, 6, 7, 9, 12], family)
    expected = run(model, padded)["SCORE"]
    assert expected.std() > 0.1
    for made, tolerance in ((lower(model, "fp16"), 0.02), (twin(model, "fp16"), 0.02), (twin(model, "bf16"), 0.15)):
        found = run(made, padded)["SCORE"]
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, expected, atol=tolerance * float(np.abs(expected).max()))


def test_nodes_without_a_name_of_their_own_are_refused() -> None:
    for name in ("", "down"):
        model = encoder(weights())
        model.graph.node[3].name = name
        for made in (lower, twin):
            with pytest.raises(ExportError, match="nodes without a name of their own; export it again"):
                made(model, "fp16")


def test_a_graph_without_normalisation_is_refused() -> None:
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])
    score = helper.make_tensor_value_info("SCORE", TensorProto.FLOAT, ["batch", "length"])
    cast = helper.make_node("Cast", ["input_ids"], ["SCORE"], "cast", to=TensorProto.FLOAT)
    graph = helper.make_graph([cast], "small", [ids], [score])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    for made in (lower, twin):
        with pytest.raises(ExportError, match="no LayerNormalization and no RMSNorm; export it with opset 17"):
            made(model, "fp16")


def test_a_graph_without_a_head_is_refused() -> None:
    model = encoder(weights())
    del model.graph.node[-4:]
    last = helper.make_tensor_value_info("last", TensorProto.FLOAT, ["batch", "length", 8])
    del model.graph.output[:]
    model.graph.output.append(last)
    with pytest.raises(ExportError, match="ends in last without a head"):
        lower(model, "fp16")


def test_an_operator_whose_types_nobody_knows_is_refused() -> None:
    model = encoder(weights())
    strange = helper.make_node("Strange", ["gelu"], ["stranger"], "strange", domain="org.example")
    model.opset_import.append(helper.make_opsetid("org.example", 1))
    at = [node.name for node in model.graph.node].index("down")
    model.graph.node[at].input[0] = "stranger"
    model.graph.node.insert(at, strange)
    with pytest.raises(ExportError, match=r"The types of \['down', .* cannot be told"):
        lower(model, "bf16")
