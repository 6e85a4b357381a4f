# SPDX-License-Identifier: Apache-2.0
"""The decoders that the server tests serve: one of each family in FP32, and the Qwen2 in INT8 as well.

Like those of `served`, their steps lie in build/server-tests and are kept while nothing that they depend on changes.
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from build_engines.build import build
from build_engines.request import BuildRequest, Target
from build_engines.table import Reranker
from tests.decoder_checkpoints import DECODER_FAMILIES, decoder_row, write_decoder
from tests.locks import alone_in
from tests.server import served
from tests.server.served import Served

# Name of the reranker -> family of its checkpoint.
FP32_DECODERS = {f"tiny_{family}": family for family in DECODER_FAMILIES}
QWEN2, CLASSIFIER, QWEN3, GEMMA = "tiny_qwen2", "tiny_qwen2_classifier", "tiny_qwen3", "tiny_gemma"
INT8_DECODER = "tiny_qwen2_int8"
DECODERS = (*FP32_DECODERS, INT8_DECODER)
MAX_LENGTH = 384
MAX_BATCH_SIZE = 16

INTERMEDIATE = served.INTERMEDIATE / "decoders"


def build_decoders(repository: Path) -> Served:
    """Build every decoder as version 1 of `repository`."""
    with alone_in(INTERMEDIATE):
        checkpoints = {
            name: write_decoder(INTERMEDIATE / "checkpoints" / name, family) for name, family in FP32_DECODERS.items()
        }
        rows = {name: _row(name, checkpoints[name], family) for name, family in FP32_DECODERS.items()}
        for reranker in rows.values():
            _build(reranker, "cpu", repository)
        # Both start with the same two steps, which depend on no precision.
        for step in ("pairing", "export"):
            shutil.copytree(INTERMEDIATE / QWEN2 / step, INTERMEDIATE / INT8_DECODER / step, dirs_exist_ok=True)
        checkpoints[INT8_DECODER] = checkpoints[QWEN2]
        rows[INT8_DECODER] = _row(INT8_DECODER, checkpoints[QWEN2], "qwen2", precision="int8")
        _build(rows[INT8_DECODER], "cpu", repository)
        return Served(repository, rows, checkpoints)


def other_gemma_graph() -> Path:
    """Return the graph of a Gemma with other weights, which has as many bytes."""
    with alone_in(INTERMEDIATE):
        name = "another_gemma"
        graph = _build(
            _row(name, write_decoder(INTERMEDIATE / "checkpoints" / name, "gemma", seed=1), "gemma"),
            "onnx",
            INTERMEDIATE / "nothing-is-installed",
        )
        assert isinstance(graph, Path)
        return graph


def _row(name: str, checkpoint: Path, family: str, **overrides: Any) -> Reranker:
    # Two threads make several runs work side by side, and any machine has them.
    limits = {"max_length": MAX_LENGTH, "buckets": (128, 256, MAX_LENGTH), "max_batch_size": MAX_BATCH_SIZE}
    return decoder_row(name, checkpoint, family, **limits | {"precision": "fp32", "cpu_threads": 2} | overrides)


def _build(reranker: Reranker, target: Target, repository: Path) -> object:
    return build(BuildRequest(reranker, target, repository, INTERMEDIATE), Console(file=io.StringIO()))
