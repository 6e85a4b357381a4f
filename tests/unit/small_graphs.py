# SPDX-License-Identifier: Apache-2.0
"""A one-layer encoder made node by node, and the same in NumPy: what each tensor is when every step rounds.

Eight numbers a token, one attention head, and a classification head whose first matrix is that of the attention's
output: one weight that both the body and the head use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Rounding = Callable[[Any], Floats]

WIDTH, WORDS = 8, 50
DTYPES: dict[str, Any] = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
# Products with a constant matrix, the head's excepted: name -> (activation, weight).
LINEAR = {
    "query": ("embedded", "w_query"),
    "key": ("embedded", "w_key"),
    "value": ("embedded", "w_value"),
    "out": ("context", "w_shared"),
    "up": ("attended", "w_up"),
    "down": ("gelu", "w_down"),
}
ATTENTION = {"scores": ("query_biased", "key_turned"), "context": ("weights", "value")}
# Float tensors that are computed in the body, not only handed on, and those of the head.
COMPUTED = (
    *("mask", "unseen", "bias", "embedded", "query", "query_biased", "key", "value", "scores", "biased", "weights"),
    *("context", "out", "residual", "attended", "up", "up_biased", "gelu", "down", "down_residual", "last"),
)
HEAD = ("pooled", "tanh", "SCORE")


def unrounded(values: Any) -> Floats:
    """FP32 as it is."""
    return np.asarray(values, np.float32)


def weights(**factors: float) -> dict[str, Any]:
    """Return the constants by name, those named in `factors` multiplied."""
    rng = np.random.default_rng(0)

    def matrix(*shape: int, size: float = 0.4) -> Floats:
        return (rng.standard_normal(shape) * size).astype(np.float32)

    square = {f"w_{name}": matrix(WIDTH, WIDTH) for name in ("query", "key", "value", "shared")}
    found = square | {
        "words": matrix(WORDS, WIDTH, size=1.0),
        "gamma": 1 + matrix(WIDTH, size=0.1),
        "beta": matrix(WIDTH, size=0.1),
        "w_up": matrix(WIDTH, 2 * WIDTH),
        "b_up": matrix(2 * WIDTH, size=0.1),
        "w_down": matrix(2 * WIDTH, WIDTH),
        "w_score": matrix(1, WIDTH),
        "b_score": matrix(1),
        "one": np.array(1, np.float32),
        "masked": np.array(-10000, np.float32),
        "axis": np.array([1], np.int64),
        "first": np.array(0, np.int64),
    }
    return found | {name: found[name] * np.float32(factor) for name, factor in factors.items()}


def encoder(constants: Mapping[str, Any]) -> onnx.ModelProto:
    """Return the graph: inputs `input_ids` and `attention_mask`, output `SCORE`; each node has its output's name."""

    def node(kind: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(kind, inputs.split(), [output], output, **attributes)

    nodes = [
        node("Cast", "attention_mask", "mask", to=TensorProto.FLOAT),
        node("Sub", "one mask", "unseen"),
        node("Mul", "unseen masked", "bias"),
        node("Unsqueeze", "bias axis", "bias_3d"),
        node("Gather", "words input_ids", "words_of_ids"),
        node("LayerNormalization", "words_of_ids gamma beta", "embedded"),
        node("MatMul", "embedded w_query", "query"),
        node("Add", "query beta", "query_biased"),
        node("MatMul", "embedded w_key", "key"),
        node("Transpose", "key", "key_turned", perm=[0, 2, 1]),
        node("MatMul", "embedded w_value", "value"),
        node("MatMul", "query_biased key_turned", "scores"),
        node("Add", "scores bias_3d", "biased"),
        node("Softmax", "biased", "weights"),
        node("MatMul", "weights value", "context"),
        node("MatMul", "context w_shared", "out"),
        node("Add", "out embedded", "residual"),
        node("LayerNormalization", "residual gamma beta", "attended"),
        node("MatMul", "attended w_up", "up"),
        node("Add", "up b_up", "up_biased"),
        node("Gelu", "up_biased", "gelu"),
        node("MatMul", "gelu w_down", "down"),
        node("Add", "down attended", "down_residual"),
        node("LayerNormalization", "down_residual gamma beta", "last"),
        node("Gather", "last first", "first_token", axis=1),
        node("Gemm", "first_token w_shared beta", "pooled"),
        node("Tanh", "pooled", "tanh"),
        node("Gemm", "tanh w_score b_score", "SCORE", transB=1),
    ]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"])
        for name in ("input_ids", "attention_mask")
    ]
    score = helper.make_tensor_value_info("SCORE", TensorProto.FLOAT, ["batch", 1])
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "small", inputs, [score], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def in_numpy(
    constants: Mapping[str, Any],
    arrays: Mapping[str, Ids],
    rounding: Rounding = unrounded,
    ranges: Mapping[str, float] | None = None,
    int8: Collection[str] = (),
) -> dict[str, Floats]:
    """Compute every tensor of `encoder`; the body's are rounded by `rounding`, the inputs of `int8` also to INT8."""
    c = {name: rounding(array) if array.dtype == np.float32 else array for name, array in constants.items()}
    t: dict[str, Floats] = {}

    def product(name: str, activation: Floats, weight: Floats) -> Floats:
        if name in int8:
            first, second = (LINEAR | ATTENTION)[name]
            activation = fake_int8(activation, (ranges or {})[first], rounding)
            size = np.abs(constants[second]).max(0) if name in LINEAR else (ranges or {})[second]
            # Weights are rounded to INT8 as they are in FP32, activations as they come.
            weight = fake_int8(constants[second] if name in LINEAR else weight, size, rounding, constant=name in LINEAR)
        return rounding(activation @ weight)

    t["mask"] = arrays["attention_mask"].astype(np.float32)
    t["unseen"] = rounding(c["one"] - t["mask"])
    t["bias"] = rounding(t["unseen"] * c["masked"])
    t["embedded"] = rounding(layer_norm(c["words"][arrays["input_ids"]], c["gamma"], c["beta"]))
    t["query"], t["key"], t["value"] = (product(n, t["embedded"], c[f"w_{n}"]) for n in ("query", "key", "value"))
    t["query_biased"] = rounding(t["query"] + c["beta"])
    t["scores"] = product("scores", t["query_biased"], t["key"].swapaxes(1, 2))
    t["biased"] = rounding(t["scores"] + t["bias"][:, None])
    t["weights"] = rounding(softmax(t["biased"]))
    t["context"] = product("context", t["weights"], t["value"])
    t["out"] = product("out", t["context"], c["w_shared"])
    t["residual"] = rounding(t["out"] + t["embedded"])
    t["attended"] = rounding(layer_norm(t["residual"], c["gamma"], c["beta"]))
    t["up"] = product("up", t["attended"], c["w_up"])
    t["up_biased"] = rounding(t["up"] + c["b_up"])
    t["gelu"] = rounding(gelu(t["up_biased"]))
    t["down"] = product("down", t["gelu"], c["w_down"])
    t["down_residual"] = rounding(t["down"] + t["attended"])
    t["last"] = rounding(layer_norm(t["down_residual"], c["gamma"], c["beta"]))
    return t | head(constants, t["last"][:, 0])


def head(constants: Mapping[str, Any], first_token: Floats) -> dict[str, Floats]:
    """Compute the head, whose weights nobody rounds."""
    pooled = first_token @ constants["w_shared"] + constants["beta"]
    tanh = np.tanh(pooled)
    return {"pooled": pooled, "tanh": tanh, "SCORE": tanh @ constants["w_score"].T + constants["b_score"]}


def fake_int8(values: Floats, size: Any, rounding: Rounding = unrounded, *, constant: bool = False) -> Floats:
    """Round to the nearest of 255 steps of size / 127 and back; `rounding` is what the scale itself suffers."""
    scale = np.asarray(size, np.float32) / np.float32(127)
    stated = rounding(scale)
    steps = np.clip(np.rint(values / (scale if constant else stated)), -128, 127)
    found: Floats = (steps * stated).astype(np.float32)
    return found


def rounding_to(base: str) -> Rounding:
    """Return what storing a tensor as FP16 or BF16 does to it."""

    def rounded(values: Any) -> Floats:
        with np.errstate(over="ignore"):
            return np.asarray(values, np.float32).astype(DTYPES[base]).astype(np.float32)

    return rounded


def layer_norm(x: Floats, gamma: Floats, beta: Floats) -> Floats:
    """Normalise the last axis; epsilon is ONNX's default."""
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + np.float32(1e-5))
    found: Floats = (scaled * gamma + beta).astype(np.float32)
    return found


def softmax(x: Floats) -> Floats:
    """Normalise the exponentials of the last axis."""
    powers = np.exp(x - x.max(-1, keepdims=True))
    found: Floats = powers / powers.sum(-1, keepdims=True)
    return found


def gelu(x: Floats) -> Floats:
    """The exact one, not its approximation by tanh."""
    found: Floats = (x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))).astype(np.float32)
    return found


def arrays(*, seed: int = 0, lengths: Collection[int] = (5, 3, 2)) -> dict[str, Ids]:
    """Return a ragged batch."""
    ends = np.array(list(lengths))[:, None]
    mask = (np.arange(ends.max()) < ends).astype(np.int64)
    ids = np.random.default_rng(seed).integers(0, WORDS, mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask}


def run(model: onnx.ModelProto, feed: Mapping[str, Any], names: Collection[str] = ("SCORE",)) -> dict[str, Floats]:
    """Run a graph in ONNX Runtime, as it stands, and return the named tensors."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    own = {output.name for output in shown.graph.output}
    shown.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in own)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(shown.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(list(names), dict(feed)), strict=True))
