# SPDX-License-Identifier: Apache-2.0
"""Graphs to build engines from: exported rerankers, kept between sessions, and small ones made node by node."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper
from rich.console import Console

import build_engines
from build_engines.export import IR_VERSION, OPSET, export
from build_engines.fetch import fetch
from build_engines.steps import Steps, code_hash
from build_engines.table import Reranker
from tests.locks import alone_in
from tests.tensorrt.without_gpu import KEPT

_CODE = [Path(build_engines.__path__[0]) / name for name in ("export.py", "families.py", "decoders.py")]
# Every small graph starts with it, so that its one input may be of the type that scorers take.
CAST = helper.make_node("Cast", ["ids"], ["floats"], name="cast", to=TensorProto.FLOAT)


def exported(reranker: Reranker) -> Path:
    """Export a row in FP32 and return the graph; unchanged code and weights are exported once."""
    checkpoint = fetch(reranker)
    inputs = {
        "checkpoint": dict(checkpoint.files),
        "row": [reranker.head, reranker.segment_ids, reranker.max_length, reranker.max_batch_size],
        "code": code_hash(*_CODE),
    }
    steps = Steps(KEPT / "graphs" / reranker.name, Console(file=io.StringIO()))
    with alone_in(KEPT):
        return steps.run("export", inputs, lambda out: export(checkpoint, reranker, out)).folder / "model.onnx"


def write_graph(
    folder: Path,
    nodes: Sequence[NodeProto],
    *,
    weights: dict[str, NDArray[np.generic]] | None = None,
    shape: Sequence[str | int] = ("batch", "length"),
    input_type: int = TensorProto.INT64,
    external: bool = False,
) -> Path:
    """Write model.onnx with input `ids` and float output `SCORE`, both of `shape`; `external` weights lie beside it."""
    initializers = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(
        list(nodes),
        "small",
        [helper.make_tensor_value_info("ids", input_type, shape)],
        [helper.make_tensor_value_info("SCORE", TensorProto.FLOAT, shape)],
        initializers,
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("org.example", 1)]
    path = folder / "model.onnx"
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    onnx.save(model, path, save_as_external_data=external, location="model.onnx.data", size_threshold=0)
    return path


def quantised(folder: Path, zero_point: int) -> Path:
    """Write a graph that rounds its input to INT8 and back."""
    nodes = [
        CAST,
        helper.make_node("QuantizeLinear", ["floats", "scale", "zero"], ["int8"], name="to_int8"),
        helper.make_node("DequantizeLinear", ["int8", "scale", "zero"], ["SCORE"], name="to_float"),
    ]
    return write_graph(
        folder, nodes, weights={"scale": np.array(0.1, np.float32), "zero": np.array(zero_point, np.int8)}
    )


def with_input(folder: Path, shape: Sequence[str | int], input_type: int) -> Path:
    """Write a graph that turns an input of `shape` and `input_type` to floats."""
    nodes = [helper.make_node("Cast", ["ids"], ["SCORE"], name="cast", to=TensorProto.FLOAT)]
    return write_graph(folder, nodes, shape=shape, input_type=input_type)


def with_unknown_operator(folder: Path) -> Path:
    """Write a graph whose second node, `encoder/strange`, is of an operator that nobody knows."""
    strange = helper.make_node("Strange", ["floats"], ["SCORE"], name="encoder/strange", domain="org.example")
    return write_graph(folder, [CAST, strange])


def with_external_weights(folder: Path) -> Path:
    """Write a graph for 32 tokens whose weights lie in model.onnx.data beside it."""
    add = helper.make_node("Add", ["floats", "weights"], ["SCORE"], name="add")
    return write_graph(folder, [CAST, add], weights={"weights": np.arange(32, dtype=np.float32)}, external=True)
