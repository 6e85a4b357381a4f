# SPDX-License-Identifier: Apache-2.0
"""Step `convert`: the verified choice of precisions -> the `model.onnx` that TensorRT compiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

# A wrong graph differs by the scores' own spread.
_TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class Verified:
    """What was verified: a switched twin of `layers` with those of `int8` on. `shift`: its largest from FP32.

    Where ONNX Runtime fuses kernels, INT8 rounds the other way here and there, and scores move by as much as INT8 had
    moved them before.
    """

    switched: Path
    layers: tuple[str, ...]
    int8: tuple[str, ...]
    shift: float


def convert(
    graph: Path, ranges: Mapping[str, float], int8: Sequence[str], base: BasePrecision, out: Path
) -> dict[str, Any]:
    """Write `model.onnx` into `out`: products of `int8` between Q/DQ pairs, the rest in base precision, FP32 head."""
    model = onnx.load(graph, load_external_data=False)
    if int8:
        model = quantize_for_tensorrt(model, ranges, int8, graph.parent)
    target = out / "model.onnx"
    save(lower(model, base, graph.parent), target)
    onnx.checker.check_model(str(target))
    return {"int8_layers": len(int8), "bytes": size_bytes(target)}


def largest_difference(converted: Path, verified: Verified, sample: Sequence[graph_scoring.PaddedPairs]) -> float:
    """Return the largest difference between the converted graph's scores and those that were verified.

    ONNX Runtime's CPU provider cannot run BF16; there only the twin is verified. Raises ExportError where they differ
    by more than what rounding the other way can do.
    """
    twin = SwitchedScorer(verified.switched, verified.layers)
    twin.choose(verified.int8)
    expected = np.concatenate(twin.score(sample))
    session = ort.InferenceSession(converted, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    found = np.concatenate([session.run(None, {name: rows.arrays[name] for name in names})[0] for rows in sample])
    difference = float(np.abs(found - expected).max())
    allowed = verified.shift + _TOLERANCE * float(expected.std())
    if not difference <= allowed:
        raise ExportError(
            f"{converted} does not score as verified: scores differ by up to {difference:.3g}, allowed is "
            f"{allowed:.3g}. Delete the reranker's build folder and build again."
        )
    return difference
