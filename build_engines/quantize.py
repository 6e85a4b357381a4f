# SPDX-License-Identifier: Apache-2.0
"""Step `quantize`, cpu target: FP32 `model.onnx` -> INT8 weights, activations quantised as they come."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic

from build_engines.errors import ExportError
from build_engines.export import INLINE_BYTES


def quantize_for_cpu(source: Path, out: Path) -> dict[str, Any]:
    """Write `model.onnx` with INT8 linear layers into `out`; embeddings, attention and LayerNorm stay FP32.

    Weights are symmetric and scaled per output channel; an activation has one scale per run, which is why the scorer
    runs INT8 rows one by one (a pair's score must not depend on its neighbours).
    """
    target = out / "model.onnx"
    size_bytes = sum(file.stat().st_size for file in source.parent.glob("model.onnx*"))
    # onnxruntime advises its own pre-processing in a warning; the exported graph is already folded and typed.
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        quantize_dynamic(
            source,
            target,
            op_types_to_quantize=["MatMul", "Gemm"],
            weight_type=QuantType.QInt8,
            per_channel=True,
            use_external_data_format=size_bytes > INLINE_BYTES,
            extra_options={"MatMulConstBOnly": True},
        )
    finally:
        root.setLevel(level)
    linear = sum(node.op_type == "MatMulInteger" for node in onnx.load(target, load_external_data=False).graph.node)
    if linear == 0:
        raise ExportError(f'{source} has no linear layer that could be quantised; set precision = "fp32".')
    return {"quantised_linear_layers": linear, "bytes": sum(f.stat().st_size for f in out.glob("model.onnx*"))}
