# SPDX-License-Identifier: Apache-2.0
"""Step `quantize`: FP32 `model.onnx` -> INT8 linear layers.

For the cpu target activations are quantised as they come; for TensorRT their scales are fixed by calibration and
stated in the graph as QuantizeLinear/DequantizeLinear pairs.

onnxruntime's quantiser places them, not NVIDIA's ModelOpt: on the light reranker ModelOpt 0.47 agreed with FP32 no
better for the same layers (Kendall's tau 0.90 to 0.92 for all linear layers), and with its own placement, which rounds
residual additions, worse (0.74). It wants an environment of its own, 2 GB without CUDA's PyTorch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, numpy_helper
from onnxruntime.quantization import CalibrationMethod, QuantType, quantize_dynamic
from onnxruntime.quantization.calibrate import TensorData, TensorsData
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from onnxruntime.quantization.quant_utils import add_infer_metadata

from build_engines.errors import ExportError
from build_engines.fp32_parts import fp32_nodes
from build_engines.low_precision import inferred
from build_engines.onnx_files import INLINE_BYTES, size_bytes

# Scales below FP16's numbers would become 0 there, which TensorRT refuses; this holds them above 2^-20, and only
# channels whose weights are all below 0.0002 are rounded more coarsely for it.
_SMALLEST_RANGE = 127 * 2.0**-19


def quantize_for_cpu(source: Path, out: Path) -> dict[str, Any]:
    """Write `model.onnx` with INT8 linear layers into `out`; embeddings, attention and LayerNorm stay FP32.

    Weights are symmetric and scaled per output channel; an activation has one scale per run, which is why the scorer
    runs INT8 rows one by one (a pair's score must not depend on its neighbours).
    """
    target = out / "model.onnx"
    with _quiet():
        quantize_dynamic(
            source,
            target,
            op_types_to_quantize=["MatMul", "Gemm"],
            weight_type=QuantType.QInt8,
            per_channel=True,
            use_external_data_format=size_bytes(source) > INLINE_BYTES,
            extra_options={"MatMulConstBOnly": True},
        )
    linear = sum(node.op_type == "MatMulInteger" for node in onnx.load(target, load_external_data=False).graph.node)
    if linear == 0:
        raise ExportError(f'{source} has no linear layer that could be quantised; set precision = "fp32".')
    return {"quantised_linear_layers": linear, "bytes": size_bytes(target)}


def linear_layers(graph: onnx.GraphProto) -> list[NodeProto]:
    """Return the products with a constant matrix, those that stay FP32 excepted, in the order of the graph."""
    constant, fp32 = {weight.name for weight in graph.initializer}, fp32_nodes(graph)
    return [
        node
        for node in graph.node
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in constant and node.name not in fp32
    ]


def attention_products(graph: onnx.GraphProto) -> list[NodeProto]:
    """Return the two products of each attention: query by key, and weights by value."""
    constant, fp32 = {weight.name for weight in graph.initializer}, fp32_nodes(graph)
    products = [node for node in graph.node if node.op_type == "MatMul" and node.name not in fp32]
    return [node for node in products if not constant & set(node.input)]


def quantize_for_tensorrt(
    model: onnx.ModelProto, ranges: Mapping[str, float], nodes: Collection[str], folder: Path | None = None
) -> onnx.ModelProto:
    """Return the FP32 model with the products named in `nodes` between Q/DQ pairs; the argument is used up.

    Weights that it does not hold are read from `folder`, one after the other, and those of other nodes stay there.

    Symmetric as TensorRT demands: an activation has one scale, its range / 127; a weight has one for each output
    channel and is stored as INT8. Nothing else is quantised. Raises ExportError unless the result is what TensorRT
    accepts.
    """
    _part_shared_weights(model.graph, nodes)
    if not nodes:  # onnxruntime takes an empty list for every node
        return model
    data = {name: TensorData(lowest=np.float32(-r), highest=np.float32(r)) for name, r in ranges.items()}
    # Told that types are inferred, onnxruntime does not copy all weights through a file to infer them.
    types = inferred(model).value_info
    del model.graph.value_info[:]
    model.graph.value_info.extend(types)
    add_infer_metadata(model)
    # It looks for weights outside of the model in the current directory.
    with _quiet(), chdir(folder or Path()):
        quantizer = QDQQuantizer(
            model,
            per_channel=True,
            reduce_range=False,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QInt8,
            tensors_range=TensorsData(CalibrationMethod.MinMax, data),
            nodes_to_quantize=sorted(nodes),
            nodes_to_exclude=[],
            op_types_to_quantize=["MatMul", "Gemm"],
            extra_options={
                "ActivationSymmetric": True,
                "WeightSymmetric": True,
                "QuantizeBias": False,
                "MinimumRealRange": _SMALLEST_RANGE,
                "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"],
            },
        )
        quantizer.quantize_model()
        quantizer.model.topological_sort()
    quantised: onnx.ModelProto = quantizer.model.model
    _unround_others(quantised.graph, nodes)
    _check_explicit(quantised, nodes)
    return quantised


def _part_shared_weights(graph: onnx.GraphProto, nodes: Collection[str]) -> None:
    """Copy a matrix that other nodes read too (exporting merges equal ones): theirs must stay exact."""
    others = {name for node in graph.node if node.name not in nodes for name in node.input}
    shared = {weight.name: weight for weight in graph.initializer if weight.name in others}
    copies: dict[str, onnx.TensorProto] = {}
    for node in graph.node:
        if node.name in nodes and node.input[1] in shared:
            name = f"{node.input[1]}_int8"
            if name not in copies:
                copies[name] = onnx.TensorProto()
                copies[name].CopyFrom(shared[node.input[1]])
                copies[name].name = name
            node.input[1] = name
    graph.initializer.extend(copies.values())


def _unround_others(graph: onnx.GraphProto, nodes: Collection[str]) -> None:
    """Give all but the chosen nodes the exact tensor: onnxruntime makes residual additions read the rounded one."""
    producer = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        if node.name in nodes or node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue
        for index, name in enumerate(node.input):
            pair = producer.get(name)
            if pair is not None and pair.op_type == "DequantizeLinear":
                node.input[index] = producer[pair.input[0]].input[0]


def _check_explicit(model: onnx.ModelProto, nodes: Collection[str]) -> None:
    graph = model.graph
    constants = {weight.name: weight for weight in graph.initializer}
    dequantised: set[str] = set()
    for node in graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        scale, zero = (numpy_helper.to_array(constants[name]) for name in node.input[1:3])
        if zero.any() or not (np.isfinite(scale) & (scale > 0)).all():
            raise ExportError(f"{node.name} has a zero point other than 0, or a scale that is not above 0.")
        if node.op_type == "DequantizeLinear":
            dequantised |= set(node.output)
    for node in graph.node:
        found = len(dequantised & set(node.input))
        if found != (2 if node.name in nodes else 0):
            raise ExportError(f"{node.name} has {found} quantised inputs; wanted is 2 for the chosen products, else 0.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence onnxruntime's advice to pre-process: the exported graph is already folded and typed."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
