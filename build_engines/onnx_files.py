# SPDX-License-Identifier: Apache-2.0
"""`model.onnx` on disk: one file, or with its weights beside it where protobuf could not hold them."""

from __future__ import annotations

from pathlib import Path

import onnx

# Protobuf cannot hold 2 GiB; above this the weights go to model.onnx.data.
INLINE_BYTES = 1_500_000_000


def size_bytes(path: Path) -> int:
    """Return the bytes of a model together with its external weights."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model into a folder that has none of this name; its weights go beside it where they are large."""
    external = sum(len(weight.raw_data) for weight in model.graph.initializer) > INLINE_BYTES
    onnx.save(
        model,
        path,
        save_as_external_data=external,
        all_tensors_to_one_file=True,
        location=f"{path.name}.data",
    )
