# SPDX-License-Identifier: Apache-2.0
"""Decoders in FP16 or BF16: RMSNorm's inside, the angles of positions and the head stay FP32, and nothing else does."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper

from build_engines.fp32_parts import fp32_nodes, head_nodes
from build_engines.low_precision import lower, twin
from build_engines.quantize import linear_layers, quantize_for_tensorrt
from build_engines.table import BasePrecision
from tests.unit.decoder_graphs import KINDS, LAYERS, NORMS, DecoderGraphs, prompts
from tests.unit.small_graphs import Floats, arrays, encoder, rounding_to, run, weights
from tests.unit.test_low_precision import BASES, ELEMENT, float_types, producers, types

both_bases = pytest.mark.parametrize("base", BASES)
every_kind = pytest.mark.parametrize("kind", KINDS)
# Positions beyond 256, which BF16 rounds.
LENGTHS = (400, 37)


def norms(kind: str) -> int:
    return NORMS[kind] * LAYERS + 1


def only_reader(model: onnx.ModelProto, name: str) -> NodeProto:
    (reader,) = (node for node in model.graph.node if name in node.input)
    return reader


def results_of_norms(model: onnx.ModelProto) -> dict[str, str]:
    """Return what each RMSNorm reads and what it makes, in the order of the graph."""
    found = {}
    for node in model.graph.node:
        if node.op_type == "Pow":
            reader = node
            for operator in ("ReduceMean", "Add", "Sqrt", "Reciprocal", "Mul", "Mul"):
                reader = only_reader(model, reader.output[0])
                assert reader.op_type == operator
            found[node.input[0]] = reader.output[0]
    return found


@both_bases
@every_kind
def test_only_norms_angles_and_the_head_compute_in_fp32(
    decoders: DecoderGraphs, kind: str, base: BasePrecision
) -> None:
    model = decoders.of(kind).graph()
    lowered = lower(model, base)
    onnx.checker.check_model(lowered, full_check=True)
    kinds, producer = float_types(lowered), producers(lowered)
    assert set(kinds.values()) == {TensorProto.FLOAT, ELEMENT[base]}
    single = {name for name, element in kinds.items() if element == TensorProto.FLOAT}
    n = norms(kind)
    steps = dict.fromkeys(("Pow", "ReduceMean", "Add", "Sqrt", "Reciprocal"), n)
    angles = {"Concat": 1, "Cos": 1, "Sin": 1}
    # Gemma multiplies its weight in FP32 too, YaRN (here with Qwen2) scales cosine and sine.
    products = n * (2 if kind == "gemma" else 1) + 1 + (2 if kind == "qwen2" else 0) + 1
    # What each norm reads, the positions, and what the head reads.
    counted = steps | angles | {"Mul": products, "Cast": n + 2, "ReduceSum": 1}
    assert Counter(producer[name].op_type for name in single & set(producer)) == counted
    # A Cast before each norm and one after it, one for the cosine, the sine, and the head.
    casts = [Counter(node.op_type for node in m.graph.node)["Cast"] for m in (model, lowered)]
    assert casts[1] - casts[0] == 2 * n + 3


@both_bases
@every_kind
def test_products_softmax_and_activations_are_of_the_base_type(
    decoders: DecoderGraphs, kind: str, base: BasePrecision
) -> None:
    lowered = lower(decoders.of(kind).graph(), base)
    kinds = float_types(lowered)
    found = [n for n in lowered.graph.node if n.op_type in ("MatMul", "Softmax", "Sigmoid", "Gelu", "Neg")]
    assert len(found) == LAYERS * (9 + 1 + 1 + 2)
    for node in found:
        assert {kinds[name] for name in (*node.input, *node.output)} == {ELEMENT[base]}, node.name


@both_bases
@every_kind
def test_whole_numbers_inputs_and_score_are_left_alone(decoders: DecoderGraphs, kind: str, base: BasePrecision) -> None:
    model = decoders.of(kind).graph()
    integers = {name: element for name, element in types(model).items() if element == TensorProto.INT64}
    assert len(integers) > 20
    for made in (lower(model, base), twin(model, base)):
        assert {name: e for name, e in types(made).items() if e == TensorProto.INT64} == integers
        assert (made.graph.input, made.graph.output) == (model.graph.input, model.graph.output)
        assert (made.ir_version, made.opset_import) == (model.ir_version, model.opset_import)


@every_kind
def test_the_head_is_the_product_with_one_row(decoders: DecoderGraphs, kind: str) -> None:
    graph = decoders.of(kind).graph().graph
    head = [node for node in graph.node if node.name in head_nodes(graph)]
    assert [node.op_type for node in head] == ["Mul", "ReduceSum"]
    stored = {weight.name: list(weight.dims) for weight in lower(decoders.of(kind).graph(), "bf16").graph.initializer}
    assert stored[head[0].input[1]] == [128]
    assert head[1].output[0] == "SCORE"


@both_bases
@every_kind
def test_a_product_reads_its_dequantised_inputs_without_a_cast(
    decoders: DecoderGraphs, kind: str, base: BasePrecision
) -> None:
    model = decoders.of(kind).graph()
    linear = [node.name for node in linear_layers(model.graph)]
    ranges = {node.input[0]: 4.0 for node in linear_layers(model.graph)}
    lowered = lower(quantize_for_tensorrt(model, ranges, linear), base)
    onnx.checker.check_model(lowered, full_check=True)
    kinds, producer = types(lowered), producers(lowered)
    products = [node for node in lowered.graph.node if node.name in linear]
    assert len(products) == 7 * LAYERS
    for node in products:
        for name in node.input:
            assert producer[name].op_type == "DequantizeLinear"
            values, scale, _ = producer[name].input
            assert (kinds[values], kinds[scale], kinds[name]) == (TensorProto.INT8, ELEMENT[base], ELEMENT[base])
        rounding = producer[producer[node.input[0]].input[0]]
        assert (rounding.op_type, kinds[rounding.input[0]]) == ("QuantizeLinear", ELEMENT[base])


@both_bases
@every_kind
def test_the_twin_rounds_what_the_lowered_graph_stores_and_nothing_else(
    decoders: DecoderGraphs, kind: str, base: BasePrecision
) -> None:
    model = decoders.of(kind).graph()
    lowered, mirrored = lower(model, base), twin(model, base)
    stored, kinds = float_types(lowered), float_types(model)
    makers = {name: node.op_type for node in model.graph.node for name in node.output if name in kinds}
    entering = [node.input[0] for node in lowered.graph.node if node.name.endswith(f"_{base}_cast")]
    assert len(entering) == norms(kind) + 2
    found = run(mirrored, prompts(LENGTHS), [*makers, *(f"{name}_rounded" for name in entering)])
    rounded = rounding_to(base)
    for name, operator in makers.items():
        if stored[name] == ELEMENT[base]:
            np.testing.assert_array_equal(found[name], rounded(found[name]), err_msg=name)
        elif base == "bf16" or operator != "Cast":  # FP16 holds these positions
            assert (found[name] != rounded(found[name])).any(), name
    for name in entering:
        np.testing.assert_array_equal(found[f"{name}_rounded"], rounded(found[name]), err_msg=name)
    # What computes nothing is not rounded again.
    computed = [n for n in model.graph.node if stored.get(n.output[0]) == ELEMENT[base] and n.op_type not in HANDED_ON]
    casts = [Counter(node.op_type for node in m.graph.node)["Cast"] for m in (model, mirrored)]
    assert casts[1] - casts[0] == 2 * (len(computed) + len(entering))


HANDED_ON = ("Reshape", "Transpose", "Unsqueeze", "Expand", "Slice", "Concat", "Neg", "Gather", "GatherElements")


@every_kind
def test_norms_and_angles_of_the_bf16_twin_are_those_of_transformers(decoders: DecoderGraphs, kind: str) -> None:
    decoder = decoders.of(kind)
    model = decoder.graph()
    mirrored = twin(model, "bf16")
    made = {name for node in mirrored.graph.node for name in node.output}
    between = results_of_norms(model)
    assert len(between) == norms(kind)

    def stored(name: str) -> str:
        return f"{name}_rounded" if f"{name}_rounded" in made else name

    turns = [only_turn(mirrored, operator) for operator in ("Cos", "Sin")]
    names = {*between, *map(stored, between.values()), *turns}
    found = run(mirrored, prompts(LENGTHS), sorted(names))
    transformers = decoder.in_bf16()
    modules = [m for name, m in transformers.named_modules() if "norm" in name.rsplit(".", 1)[-1]]
    # A layer holds its attention, with the norms of queries and keys, before its own; they run after the first.
    runs = [modules[i] for i in order_of_norms(kind)]
    for (source, result), module in zip(between.items(), runs, strict=True):
        with torch.no_grad():
            expected = module(torch.from_numpy(found[source]).to(torch.bfloat16)).float().numpy()
        same(found[stored(result)], expected)
    positions = torch.arange(max(LENGTHS))[None]
    for name, expected in zip(
        turns, transformers.model.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), positions), strict=True
    ):
        same(found[name].reshape(expected.shape), expected.float().numpy())


def only_turn(model: onnx.ModelProto, operator: str) -> str:
    """Return the cosine or sine as the layers read it: scaled if it is, and stored."""
    (node,) = (node for node in model.graph.node if node.op_type == operator)
    name = node.output[0]
    while (reader := only_reader(model, name)).op_type in ("Mul", "Cast"):
        name = reader.output[0]
    return name


def order_of_norms(kind: str) -> list[int]:
    """Return the order in which norms run, as indices into the order in which a model holds them."""
    of_layer = {2: [0, 1], 4: [2, 0, 1, 3]}[NORMS[kind]]
    return [NORMS[kind] * layer + i for layer in range(LAYERS) for i in of_layer] + [NORMS[kind] * LAYERS]


def same(found: Floats, expected: Floats) -> None:
    """Two kernels may differ in the last bit of FP32, and so round one value in a thousand to the other neighbour.

    The weight then doubles that step at most.
    """
    np.testing.assert_allclose(found, expected, rtol=2.0**-6)
    assert (found != expected).mean() < 2e-3


def test_squares_beyond_fp16_stay_finite(decoders: DecoderGraphs) -> None:
    # RMSNorm's result does not depend on the size of what it reads, but with large embeddings its squares pass 65504.
    decoder = decoders.of("qwen2")
    model = decoder.graph()
    (words,) = (weight for weight in model.graph.initializer if weight.name == "model.embed_tokens.weight")
    values = numpy_helper.to_array(words) * np.float32(2000)
    words.CopyFrom(numpy_helper.from_array(values, words.name))
    squares = [node.output[0] for node in model.graph.node if node.op_type == "Pow"]
    found = run(twin(model, "fp16"), prompts((40, 7)), [*squares, "SCORE"])
    assert min(float(found[name].max()) for name in squares) > 65504
    expected = run(model, prompts((40, 7)))["SCORE"]
    np.testing.assert_allclose(found["SCORE"], expected, atol=0.02 * float(np.abs(expected).max()))


def with_rms_norm(*, weight: str) -> onnx.ModelProto:
    """Return the small encoder with an RMSNorm between its last LayerNormalization and its head."""
    model = encoder(weights())
    steps = [
        ("Pow", "last two", "squares"),
        ("ReduceMean", "squares last_axis", "mean"),
        ("Add", "mean epsilon", "shifted"),
        ("Sqrt", "shifted", "root"),
        ("Reciprocal", "root", "factor"),
        ("Mul", "last factor", "even"),
    ]
    end = {"none": ("Identity", "even"), "first": ("Mul", "gamma even"), "second": ("Mul", "even gamma")}[weight]
    steps.append((end[0], end[1], "normed"))
    nodes = [helper.make_node(kind, inputs.split(), [output], output) for kind, inputs, output in steps]
    at = [node.name for node in model.graph.node].index("first_token")
    model.graph.node[at].input[0] = "normed"
    after = list(model.graph.node)[at:]
    del model.graph.node[at:]
    model.graph.node.extend([*nodes, *after])
    constants = {"two": np.float32(2), "epsilon": np.float32(1e-6), "last_axis": np.array([-1])}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), name) for name, a in constants.items())
    return model


INSIDE = ["squares", "mean", "shifted", "root", "factor", "even"]


@pytest.mark.parametrize(
    ("weight", "inside", "head"),
    [
        ("first", INSIDE, ["pooled", "tanh", "SCORE"]),
        ("second", [*INSIDE, "normed"], ["pooled", "tanh", "SCORE"]),
        # What follows a norm without a weight is the head.
        ("none", INSIDE, ["normed", "pooled", "tanh", "SCORE"]),
    ],
)
def test_the_order_of_the_factors_tells_where_a_norm_is_rounded(
    weight: str, inside: list[str], head: list[str]
) -> None:
    graph = with_rms_norm(weight=weight).graph
    assert [node.name for node in graph.node if node.name in head_nodes(graph)] == head
    assert fp32_nodes(graph) == {*inside, *head}


@both_bases
@pytest.mark.parametrize("weight", ["first", "second"])
def test_a_norm_of_the_twin_is_what_numpy_rounds(weight: str, base: BasePrecision) -> None:
    rounded = rounding_to(base)
    found = run(twin(with_rms_norm(weight=weight), base), arrays(), ["last", "even", "normed"])
    even = found["last"] / np.sqrt((found["last"] ** 2).mean(-1, keepdims=True) + np.float32(1e-6))
    np.testing.assert_allclose(found["even"], even, rtol=1e-6)
    gamma = weights()["gamma"]
    expected = rounded(gamma) * rounded(even) if weight == "first" else gamma * even
    np.testing.assert_allclose(rounded(found["normed"]), rounded(expected), rtol=1e-6)


def test_a_factor_of_another_tensor_is_no_norm() -> None:
    model = with_rms_norm(weight="first")
    (square,) = (node for node in model.graph.node if node.name == "squares")
    square.input[0] = "down_residual"
    assert not fp32_nodes(model.graph) & {"squares", "mean", "even"} - head_nodes(model.graph)
