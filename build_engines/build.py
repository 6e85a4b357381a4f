# SPDX-License-Identifier: Apache-2.0
"""The whole way from a checkpoint to an installed version, step by step."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from build_engines.errors import PairsError
from build_engines.fetch import Checkpoint, fetch
from build_engines.hashing import sha256_file
from build_engines.install import Installed, install
from build_engines.pairs import SAMPLE, Candidates, read_pairs
from build_engines.places import SCORER_CODE, TOKENIZER_CODE
from build_engines.progress import bars
from build_engines.steps import StepResult, Steps, code_hash, tool_versions
from build_engines.table import Reranker

Target = Literal["cpu", "onnx"]

# Enough queries for a mean, few enough that a 568 M parameter model is verified in minutes on two cores.
MAX_VERIFY_PAIRS = 2000


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What to build and where to. `target` onnx stops at the FP32 graph, which equals PyTorch."""

    reranker: Reranker
    target: Target
    repository: Path
    build_folder: Path
    pairs: Path = SAMPLE


def build(request: BuildRequest, console: Console) -> Installed | Path:
    """Run the steps that are not done yet; return what was installed, or the FP32 graph for target onnx.

    Raises a BuildError that says which step refused, why, and what to do.
    """
    reranker = request.reranker
    steps = Steps(request.build_folder / reranker.name, console)
    # A mistake in this file should show before the long steps.
    given = read_pairs(request.pairs)
    console.print(f"Building [bold]{reranker.name}[/bold] for {request.target} from {reranker.checkpoint}")
    with console.status("fetch ..."):
        checkpoint = fetch(reranker)
    console.print(f"[bold]fetch    [/bold] {len(checkpoint.files)} files hashed; {checkpoint.folder}")
    shape = _row(reranker, "head", "segment_ids", "max_length", "buckets", "max_batch_size")
    source = {"checkpoint": dict(checkpoint.files), "row": shape}
    pairing = steps.run(
        "pairing", source | _code("pairing", "pair_encoding"), functools.partial(_pairing, checkpoint, reranker)
    )
    fp32 = steps.run("export", source | _code("export", "families"), functools.partial(_export, checkpoint, reranker))
    if request.target == "onnx":
        return fp32.folder / "model.onnx"
    int8 = None
    if reranker.precision != "fp32":
        quantize = functools.partial(_quantize, fp32.folder / "model.onnx")
        int8 = steps.run("quantize", {"graph": dict(fp32.files)} | _code("quantize"), quantize)
    report = _verify(request, given, steps, checkpoint, pairing, fp32, int8)
    shipped = int8 if int8 is not None and report.facts["precision"] == "int8" else fp32
    console.print(f"          ships {report.facts['precision'].upper()}: {report.facts['reason']}")
    installed = install(
        request.repository,
        reranker,
        pairing=pairing.folder,
        graph=shipped.folder,
        manifest=_manifest(reranker, checkpoint, pairing, shipped, report),
    )
    _say_installed(console, request, installed)
    return installed


def _pairing(checkpoint: Checkpoint, reranker: Reranker, out: Path) -> dict[str, Any]:
    from build_engines.pairing import write_pairing  # noqa: PLC0415

    return write_pairing(checkpoint, reranker, out)


def _export(checkpoint: Checkpoint, reranker: Reranker, out: Path) -> dict[str, Any]:
    from build_engines.export import export  # noqa: PLC0415 - torch takes seconds to import

    return export(checkpoint, reranker, out)


def _quantize(graph: Path, out: Path) -> dict[str, Any]:
    from build_engines.quantize import quantize_for_cpu  # noqa: PLC0415

    return quantize_for_cpu(graph, out)


def _verify(
    request: BuildRequest,
    given: list[Candidates],
    steps: Steps,
    checkpoint: Checkpoint,
    pairing: StepResult,
    fp32: StepResult,
    int8: StepResult | None,
) -> StepResult:
    from build_engines.verify import Verifier, verify  # noqa: PLC0415

    reranker = request.reranker
    candidates = _within_budget(given)
    if len(candidates) < len(given):
        steps.console.print(
            f"          verify uses the first {len(candidates)} of {len(given)} queries ({MAX_VERIFY_PAIRS} pairs)"
        )

    def make(out: Path) -> dict[str, Any]:
        verifier = Verifier(reranker, pairing.folder, int(checkpoint.config["vocab_size"]), candidates)
        total = (1 if int8 is None else 2) * len(candidates)
        with bars(steps.console)("verify", "queries", total) as advance:
            int8_graph = None if int8 is None else int8.folder / "model.onnx"
            return verify(verifier, fp32.folder / "model.onnx", int8_graph, out, advance)

    inputs = {
        "pairing": dict(pairing.files),
        "fp32": dict(fp32.files),
        "int8": dict(int8.files) if int8 else None,
        "pairs": sha256_file(request.pairs),
        "row": _row(reranker, "precision", "gates", "ndcg_above_chance"),
    } | _code("verify", "quality", "pair_encoding", "graph_scoring")
    return steps.run("verify", inputs, make)


def _within_budget(candidates: list[Candidates]) -> list[Candidates]:
    total = 0
    for index, query in enumerate(candidates):
        total += len(query.documents)
        if total > MAX_VERIFY_PAIRS:
            if index == 0:
                raise PairsError(f"The first query has {total} documents; at most {MAX_VERIFY_PAIRS} pairs are scored.")
            return candidates[:index]
    return candidates


def _code(*modules: str) -> dict[str, str]:
    """Return what a step's code hashes to; serving code counts like the build's own."""
    folders = (Path(__file__).parent, TOKENIZER_CODE, SCORER_CODE)
    paths = [folder / f"{module}.py" for module in modules for folder in folders]
    return {"code": code_hash(*(path for path in paths if path.exists()))}


def _row(reranker: Reranker, *names: str) -> dict[str, Any]:
    """Return the fields that a step depends on, so that a change to others does not build anew."""
    fields = dataclasses.asdict(reranker)
    return {name: fields[name] for name in names}


def _manifest(
    reranker: Reranker, checkpoint: Checkpoint, pairing: StepResult, shipped: StepResult, report: StepResult
) -> dict[str, Any]:
    built = {
        folder / name: digest
        for folder, files in ((pairing.folder, pairing.files), (shipped.folder, shipped.files))
        for name, digest in files.items()
    }
    return {
        "reranker": reranker.name,
        "checkpoint": {"source": checkpoint.source, "revision": checkpoint.revision, "files": dict(checkpoint.files)},
        "precision": report.facts["precision"],
        "vocabulary": int(checkpoint.config["vocab_size"]),
        "max_length": reranker.max_length,
        "files": {path.name: {"sha256": digest, "bytes": path.stat().st_size} for path, digest in built.items()},
        "tools": tool_versions(),
        "report": dict(report.facts),
        "built_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _say_installed(console: Console, request: BuildRequest, installed: Installed) -> None:
    name = request.reranker.name
    verb = "new" if installed.new else "already there"
    console.print(f"[bold]install  [/bold] version {installed.version} ({verb}); {request.repository}")
    if not installed.live:
        console.print(
            f"          {name} serves another version; to serve this one: python -m build_engines pin {name} "
            f"{installed.version}"
        )
