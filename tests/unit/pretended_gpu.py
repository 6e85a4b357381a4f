# SPDX-License-Identifier: Apache-2.0
"""A machine with a GPU and TensorRT, for the end of a gpu build.

A pretended engine is a copy of its graph. It scores as the FP32 graph does, plus what the test adds. tests/gpu runs
real ones.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

import build_engines.finish
import build_engines.verify_plan
from build_engines.engine import Profile
from build_engines.finish import finish
from build_engines.gpu import Gpu
from build_engines.install import Installed, read_manifest
from build_engines.request import BuildRequest
from build_engines.serving_code import graph_scoring
from build_engines.table import EngineOptions
from tests.unit.chosen_scores import drawn
from tests.unit.gpu_builds import BUCKETS
from tests.unit.pretended_builds import engine_facts

GPU = Gpu("NVIDIA Test", "9.0", 80 << 30)


@dataclass
class Machine:
    """A GPU with a TensorRT. `shift` is what an engine adds to scores, in their spread; `seconds` those of a batch."""

    request: BuildRequest
    gpu: Gpu | None = GPU
    shift: dict[str, float] = field(default_factory=lambda: {"engine": 0.0, "engine-base": 0.0})
    seconds: dict[str, Sequence[float]] = field(
        default_factory=lambda: {"engine": [0.1] * len(BUCKETS), "engine-base": [0.2] * len(BUCKETS)}
    )
    built: list[str] = field(default_factory=list)
    said: str = ""

    def pretend(self, patch: pytest.MonkeyPatch) -> None:
        """Let this be the machine that builds run on."""
        tensorrt = ModuleType("tensorrt")
        tensorrt.__spec__ = ModuleSpec("tensorrt", None)
        patch.setitem(sys.modules, "tensorrt", tensorrt)
        patch.setattr(build_engines.finish, "find_gpu", lambda: self.gpu)
        patch.setattr(build_engines.finish, "installed_tensorrt", lambda: "11.4.0")
        patch.setattr(build_engines.finish, "build_plan", self.build_plan)
        patch.setattr(build_engines.verify_plan, "PlanScorer", self.plan_scorer)

    def finish(self, request: BuildRequest | None = None, **options: Any) -> Installed | Path:
        said = io.StringIO()
        try:
            return finish(request or self.request, Console(file=said, width=2000, highlight=False), **options)
        finally:
            self.said = said.getvalue()

    def build_plan(
        self, graph: Path, out: Path, profiles: Sequence[Profile], options: EngineOptions, cache: Path
    ) -> dict[str, Any]:
        assert [(p.length, p.opt_batch, p.max_batch) for p in profiles] == [(bucket, 16, 64) for bucket in BUCKETS]
        assert (options, cache) == (self.request.reranker.engine, self.request.build_folder / "timing.cache")
        self.built.append(graph.parent.name)
        shutil.copyfile(graph, out / "model.plan")
        facts = engine_facts(self.request.reranker)
        return {name: facts[name] for name in ("tensorrt", "profiles", "inputs", "outputs")}

    def plan_scorer(self, plan: Path, buckets: Sequence[int], max_batch: int) -> PretendedScorer:
        assert (plan.name, tuple(buckets), max_batch) == ("model.plan", BUCKETS, 64)
        return PretendedScorer(self, plan.parent.name)

    def installed(self, version: int = 1) -> tuple[dict[str, Any], bytes]:
        """Return the manifest and the plan of a version."""
        repository, reranker = self.request.repository, self.request.reranker
        plan = repository / reranker.scorer / str(version) / "model.plan"
        return read_manifest(repository, reranker, version), plan.read_bytes()


class PretendedScorer:
    """What is used of PlanScorer."""

    def __init__(self, machine: Machine, engine: str) -> None:
        folder = machine.request.folder
        self.graph = graph_scoring.GraphScorer(folder / "export" / "model.onnx", threads=1, tokens_per_run=512)
        with np.load(folder / "verify-gpu" / "reference.npz") as reference:
            self.change = machine.shift[engine] * float(reference["scores"].std())
        self.seconds = dict(zip(BUCKETS, machine.seconds[engine], strict=True))

    def __enter__(self) -> PretendedScorer:
        return self

    def __exit__(self, *_: object) -> None:
        del self.graph

    def score(self, requests: list[graph_scoring.PaddedPairs]) -> list[NDArray[np.float32]]:
        signs = [np.where(drawn(request.arrays) < 0.5, -1, 1)[:, None] for request in requests]
        scores = self.graph.score(requests)
        return [(row + self.change * sign).astype(np.float32) for row, sign in zip(scores, signs, strict=True)]

    def seconds_per_batch(self, pairs: graph_scoring.PaddedPairs, bucket: int, batch: int) -> float:
        assert batch == 16
        assert len(pairs.lengths) == 18
        return self.seconds[bucket]
