# SPDX-License-Identifier: Apache-2.0
"""The whole way from a checkpoint to an installed version, step by step."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from rich.console import Console

from build_engines.apart import run_apart_if_large
from build_engines.errors import TableError
from build_engines.fetch import Checkpoint, fetch
from build_engines.install import Installed, install
from build_engines.pairs import read_pairs
from build_engines.progress import bars
from build_engines.request import (
    BuildRequest,
    Exported,
    code,
    described,
    manifest,
    pairs_hash,
    row,
    within_budget,
)
from build_engines.steps import StepResult, Steps
from build_engines.table import Reranker


def build(request: BuildRequest, console: Console) -> Installed | Path:
    """Run the steps that are not done yet; return what was installed, or the graph where the build ends there.

    Target onnx ends at the FP32 graph; target gpu at the verified one where there is no GPU or no TensorRT. Raises a
    BuildError that says which step refused, why, and what to do.
    """
    reranker = request.reranker
    if request.target == "cpu" and reranker.precision in ("fp16", "bf16"):
        raise TableError(
            f"{reranker.name}: precision {reranker.precision} is for the gpu target; for cpu use auto, int8 or fp32."
        )
    steps = Steps(request.folder, console)
    # A mistake in this file should show before the long steps.
    given = read_pairs(request.pairs)
    console.print(f"Building [bold]{reranker.name}[/bold] for {request.target} from {reranker.checkpoint}")
    with console.status("fetch ..."):
        checkpoint = fetch(reranker)
    console.print(f"[bold]fetch    [/bold] {len(checkpoint.files)} files hashed; {checkpoint.folder}")
    if request.target == "gpu":
        from build_engines.build_gpu import build_for_gpu, share_out  # noqa: PLC0415

        shares = share_out(request, given, checkpoint)
    shape = row(reranker, "head", "segment_ids", "max_length", "buckets", "max_batch_size", "prompt", "verdict_floor")
    source = {"checkpoint": dict(checkpoint.files), "row": shape}
    pairing = steps.run(
        "pairing",
        source | code("pairing", "table", "prompts", "prompt_layout", "pair_encoding", "text_ids"),
        functools.partial(_pairing, checkpoint, reranker),
    )
    fp32 = steps.run(
        "export",
        source | code("export", "table", "families", "decoders", "prompts", "prompt_layout"),
        functools.partial(_export, checkpoint, reranker),
    )
    if request.target == "onnx":
        return fp32.folder / "model.onnx"
    common = Exported(request, given, steps, checkpoint, pairing, fp32)
    if request.target == "gpu":
        return build_for_gpu(common, shares)
    return _build_for_cpu(common)


def _build_for_cpu(common: Exported) -> Installed:
    reranker, steps, pairing, fp32 = common.reranker, common.steps, common.pairing, common.fp32
    int8 = None
    if reranker.precision != "fp32":
        quantize = functools.partial(_quantize, common.graph)
        int8 = steps.run("quantize", {"graph": dict(fp32.files)} | code("quantize"), quantize)
    report = _verify(common, int8)
    shipped = int8 if int8 is not None and report.facts["precision"] == "int8" else fp32
    steps.console.print(f"          ships {report.facts['precision'].upper()}: {report.facts['reason']}")
    repository = common.request.repository
    installed = install(
        repository,
        reranker,
        pairing=pairing.folder,
        graph=shipped.folder,
        manifest=manifest(common, report, described(pairing, shipped)),
    )
    installed.say(steps.console, reranker, repository)
    return installed


def _pairing(checkpoint: Checkpoint, reranker: Reranker, out: Path) -> dict[str, Any]:
    from build_engines.pairing import write_pairing  # noqa: PLC0415

    return write_pairing(checkpoint, reranker, out)


def _export(checkpoint: Checkpoint, reranker: Reranker, out: Path) -> dict[str, Any]:
    from build_engines.export import export  # noqa: PLC0415 - torch takes seconds to import

    return run_apart_if_large(checkpoint.folder, export, checkpoint, reranker, out)


def _quantize(graph: Path, out: Path) -> dict[str, Any]:
    from build_engines.quantize import quantize_for_cpu  # noqa: PLC0415

    return run_apart_if_large(graph.parent, quantize_for_cpu, graph, out)


def _verify(common: Exported, int8: StepResult | None) -> StepResult:
    from build_engines.verify import Verifier, verify  # noqa: PLC0415

    reranker, steps, pairing = common.reranker, common.steps, common.pairing
    candidates = within_budget(reranker, common.given, steps.console)

    def make(out: Path) -> dict[str, Any]:
        verifier = Verifier(reranker, pairing.folder, common.vocabulary, candidates)
        total = (1 if int8 is None else 2) * len(candidates)
        with bars(steps.console)("verify", "queries", total) as advance:
            int8_graph = None if int8 is None else int8.folder / "model.onnx"
            return verify(verifier, common.graph, int8_graph, out, advance)

    inputs = {
        "pairing": dict(pairing.files),
        "fp32": dict(common.fp32.files),
        "int8": dict(int8.files) if int8 else None,
        "pairs": pairs_hash(candidates),
        "row": row(reranker, "precision", "gates", "ndcg_above_chance"),
    } | code("verify", "quality", "pair_encoding", "text_ids", "graph_scoring")
    return steps.run("verify", inputs, make)
