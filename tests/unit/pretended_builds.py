# SPDX-License-Identifier: Apache-2.0
"""Versions that look built: files with a few bytes, and a manifest that is true of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from build_engines.hashing import sha256_file
from build_engines.install import Installed, install
from build_engines.table import Reranker


def engine_facts(reranker: Reranker, **overrides: Any) -> dict[str, Any]:
    """Return what a manifest says of a plan that was built on an H200 by TensorRT 11.4.0."""
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if reranker.segment_ids else [])]
    facts = {
        "tensorrt": "11.4.0.106",
        "gpu": "NVIDIA H200",
        "compute_capability": "9.0",
        "version_compatible": False,
        "hardware_compatibility": "none",
        "profiles": [{"length": bucket, "opt_batch": 16, "max_batch": 64} for bucket in reranker.buckets],
        "inputs": dict.fromkeys(names, "INT64"),
        "outputs": {"SCORE": "FLOAT"},
    }
    return facts | overrides


class Builds:
    """Pretended results of the build's steps; `content` tells one build from another."""

    def __init__(self, root: Path, reranker: Reranker) -> None:
        self.root = root
        self.reranker = reranker
        self.repository = root / "repository"

    def install(
        self, content: str, *, precision: str = "fp32", external: bool = False, engine: dict[str, Any] | None = None
    ) -> Installed:
        """Install a build for cpu, or one for gpu where `engine` says what was built."""
        pairing, graph = (self.root / self.reranker.name / content / name for name in ("pairing", "graph"))
        written = {pairing / "pairing.json", pairing / "tokenizer.json"}
        written |= {graph / ("model.onnx" if engine is None else "model.plan")}
        written |= {graph / "model.onnx.data"} if external else set()
        for path in written:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{path.name} {content}", encoding="utf-8")
        files = {path.name: {"sha256": sha256_file(path), "bytes": path.stat().st_size} for path in written}
        manifest: dict[str, Any] = {"files": files, "precision": precision, "content": content}
        if engine is not None:
            manifest |= {"target": "gpu", "engine": engine}
        return install(self.repository, self.reranker, pairing=pairing, graph=graph, manifest=manifest)

    def snapshot(self) -> dict[str, bytes]:
        """Return every file of the repository."""
        paths = sorted(self.repository.rglob("*")) if self.repository.exists() else []
        return {str(path.relative_to(self.repository)): path.read_bytes() for path in paths if path.is_file()}
