# SPDX-License-Identifier: Apache-2.0
"""The end of a gpu build: verified graph -> engine -> held against FP32 on the GPU -> installed version.

It needs TensorRT and a GPU but neither PyTorch nor a checkpoint, so it also runs alone (`build --engine-only`), in the
container whose TensorRT will serve the engine. Where the machine has no GPU it says how to finish elsewhere.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from build_engines.container import finish_command
from build_engines.engine import build_plan, profiles_of
from build_engines.errors import EngineError, InstallError
from build_engines.gpu import Gpu, find_gpu, installed_tensorrt
from build_engines.install import Installed, install
from build_engines.request import BuildRequest, code, described, row
from build_engines.steps import StepResult, Steps
from build_engines.table import Reranker
from build_engines.verify import MINIMUM_SPEEDUP
from build_engines.verify_plan import verify_plan

HANDOVER = "handover.json"


def write_handover(request: BuildRequest, manifest: Mapping[str, Any], steps: Iterable[StepResult]) -> None:
    """Keep what finishing needs: the manifest so far, the precisions asked for, and which files belong together."""
    handover = {
        "manifest": manifest,
        "row": row(request.reranker, "precision", "base_precision"),
        "shape": _shape(request),
        "steps": {step.folder.name: dict(step.files) for step in steps},
    }
    (request.folder / HANDOVER).write_text(json.dumps(handover, indent=2), encoding="utf-8")


def finish(request: BuildRequest, console: Console, *, engine_only: bool = False) -> Installed | Path:
    """Build the engine from what the earlier steps left, verify and install it; raise a BuildError where that fails.

    Without a GPU or TensorRT, return the verified graph and print the commands that finish the build; with
    `engine_only` that is an EngineError.
    """
    steps = Steps(request.folder, console)
    manifest, reranker, earlier = _read_handover(request, steps)
    graph = earlier["convert"]
    gpu = find_gpu()
    lacks = _lacks(gpu)
    if gpu is None or lacks:
        if engine_only:
            raise EngineError(f"{reranker.name}: {lacks}. Finish in the container:\n{_command(request)}")
        console.print(f"[bold]engine   [/bold] not built: {lacks}. The verified graph is {graph.folder / 'model.onnx'}")
        console.print("          Finish where the engine will be served:\n")
        console.print(_command(request), markup=False)
        return graph.folder / "model.onnx"
    reference = earlier["verify-gpu"].folder / "reference.npz"
    precision, plan = str(manifest["precision"]), _engine(request, steps, "engine", graph, gpu)
    gates = reranker.gates if precision == "int8" else reranker.base_gates
    measured = verify_plan(reranker, plan.folder / "model.plan", reference, gates)
    if precision == "int8" and reranker.precision == "auto":
        base = _engine(request, steps, "engine-base", earlier["convert-base"], gpu)
        beside = verify_plan(reranker, base.folder / "model.plan", reference, reranker.base_gates)
        seconds = zip(measured["seconds_per_batch"], beside["seconds_per_batch"], strict=True)
        speedup = statistics.median(slower / faster for faster, slower in seconds)
        console.print(f"          INT8 is {speedup:.2f} x as fast as {reranker.base_precision.upper()}")
        manifest["int8_speedup"] = speedup
        if speedup < MINIMUM_SPEEDUP:
            precision, plan, measured = reranker.base_precision, base, beside
    pairing = earlier["pairing"]
    facts = {"gpu": gpu.name, "compute_capability": gpu.compute_capability, **dataclasses.asdict(reranker.engine)}
    manifest |= {
        "precision": precision,
        "engine": dict(plan.facts) | facts,
        "on_gpu": measured,
        "files": described(pairing, plan),
    }
    installed = install(request.repository, reranker, pairing=pairing.folder, graph=plan.folder, manifest=manifest)
    installed.say(console, reranker, request.repository)
    return installed


def _read_handover(request: BuildRequest, steps: Steps) -> tuple[dict[str, Any], Reranker, dict[str, StepResult]]:
    """Return the manifest so far, the row with the precisions that were asked for, and the earlier steps by name."""
    path, name = request.folder / HANDOVER, request.reranker.name
    command = f"python -m build_engines build {name} --target gpu --pairs FILE.jsonl"
    try:
        handover = json.loads(path.read_text(encoding="utf-8"))
        manifest, known, precisions = handover["manifest"], handover["steps"], handover["row"]
        shape = handover["shape"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InstallError(
            f"{path} cannot be read ({error}). First build up to the verified graph: {command}"
        ) from error
    earlier = {step: steps.finished(step) for step in known}
    changed = [step for step, result in earlier.items() if dict(result.files) != known[step]]
    if changed:
        raise InstallError(
            f"{request.folder / changed[0]} was made again after the graph of {name} was verified; they may not belong "
            f"together. Build up to the verified graph again: {command}"
        )
    if shape != _shape(request):
        raise InstallError(
            f"The graph of {name} was verified with {shape}, and its row of the table now says {_shape(request)}. "
            f"Build up to the verified graph again: {command}"
        )
    return manifest, dataclasses.replace(request.reranker, **precisions), earlier


def _shape(request: BuildRequest) -> dict[str, Any]:
    fields = row(request.reranker, "max_length", "buckets", "max_batch_size", "prompt")
    found: dict[str, Any] = json.loads(json.dumps(fields))  # as the file has it
    return found


def _lacks(gpu: Gpu | None) -> str:
    """Return what this machine lacks to build an engine; empty where nothing is missing."""
    if gpu is None:
        return "this machine has no NVIDIA GPU, or no driver for it"
    if not any(importlib.util.find_spec(name) for name in ("tensorrt", "tensorrt_bindings")):
        return "TensorRT is not installed here"
    return ""


def _command(request: BuildRequest) -> str:
    return finish_command(request.reranker.name, request.build_folder, request.repository, request.table)


def _engine(request: BuildRequest, steps: Steps, name: str, graph: StepResult, gpu: Gpu) -> StepResult:
    reranker = request.reranker

    def make(out: Path) -> dict[str, Any]:
        cache = request.build_folder / "timing.cache"
        return build_plan(graph.folder / "model.onnx", out, profiles_of(reranker), reranker.engine, cache)

    inputs = {
        "graph": dict(graph.files),
        "gpu": dataclasses.asdict(gpu),
        "tensorrt": installed_tensorrt(),
        "row": row(reranker, "buckets", "opt_batch_size", "max_batch_size", "engine"),
    }
    return steps.run(name, inputs | code("engine"), make)
