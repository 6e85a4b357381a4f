# SPDX-License-Identifier: Apache-2.0
"""Step `convert`: the verified choice of precisions -> the `model.onnx` that TensorRT compiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from build_engines.errors import ExportError
from build_engines.low_precision import lower
from build_engines.onnx_files import save, size_bytes
from build_engines.quantize import quantize_for_tensorrt
from build_engines.serving_code import graph_scoring
from build_engines.switched import SwitchedScorer
from build_engines.table import BasePrecision

# INT8 may round the other way where ONNX Runtime fuses kernels; a wrong graph differs by the scores' own spread.
_TOLERANCE = 0.25


def convert(
    graph: Path, ranges: Mapping[str, float], int8: Sequence[str], base: BasePrecision, out: Path
) -> dict[str, Any]:
    """Write `model.onnx` into `out`: products of `int8` between Q/DQ pairs, the rest in base precision, FP32 head."""
    model = onnx.load(graph)
    if int8:
        model = quantize_for_tensorrt(model, ranges, int8)
    target = out / "model.onnx"
    save(lower(model, base), target)
    onnx.checker.check_model(str(target))
    return {"int8_layers": len(int8), "bytes": size_bytes(target)}


def largest_difference(
    converted: Path,
    switched: Path,
    layers: Sequence[str],
    int8: Sequence[str],
    sample: Sequence[graph_scoring.PaddedPairs],
) -> float:
    """Return how far the converted graph's scores are from the verified ones, as a share of these scores' spread.

    ONNX Runtime's CPU provider cannot run BF16; there only the twin is verified. Raises ExportError where they differ.
    """
    twin = SwitchedScorer(switched, layers)
    twin.choose(int8)
    expected = np.concatenate(twin.score(sample))
    session = ort.InferenceSession(converted, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    found = np.concatenate([session.run(None, {name: rows.arrays[name] for name in names})[0] for rows in sample])
    difference = float(np.abs(found - expected).max() / expected.std())
    if not difference <= _TOLERANCE:
        raise ExportError(
            f"{converted} does not score as verified: the largest difference is {difference:.2f} of the scores' "
            f"standard deviation, allowed is {_TOLERANCE}. Delete the reranker's build folder and build again."
        )
    return difference
