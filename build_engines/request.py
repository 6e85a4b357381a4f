# SPDX-License-Identifier: Apache-2.0
"""What is asked of a build, and what its steps share."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from build_engines.errors import PairsError
from build_engines.fetch import Checkpoint
from build_engines.hashing import sha256_value
from build_engines.pairs import SAMPLE, Candidates
from build_engines.places import SCORER_CODE, TOKENIZER_CODE
from build_engines.steps import StepResult, Steps, code_hash, tool_versions
from build_engines.table import DEFAULT_TABLE, Reranker

Target = Literal["cpu", "gpu", "onnx"]


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What to build and where to. `target` onnx stops at the FP32 graph, which equals PyTorch.

    `calibration` is for the gpu target; without it `pairs` is parted in two, for calibration and for verification.
    `table` is where the reranker's row comes from.
    """

    reranker: Reranker
    target: Target
    repository: Path
    build_folder: Path
    pairs: Path = SAMPLE
    calibration: Path | None = None
    table: Path = DEFAULT_TABLE

    @property
    def folder(self) -> Path:
        """Where the steps of this reranker lie."""
        return self.build_folder / self.reranker.name


@dataclass(frozen=True, slots=True)
class Exported:
    """A build as far as both targets go the same way: what was asked for, and the steps up to the FP32 graph."""

    request: BuildRequest
    given: list[Candidates]
    steps: Steps
    checkpoint: Checkpoint
    pairing: StepResult
    fp32: StepResult

    @property
    def reranker(self) -> Reranker:
        """The row that is built."""
        return self.request.reranker

    @property
    def graph(self) -> Path:
        """The FP32 graph."""
        return self.fp32.folder / "model.onnx"

    @property
    def vocabulary(self) -> int:
        """Ids are below this."""
        return int(self.checkpoint.config["vocab_size"])


def within_budget(reranker: Reranker, candidates: list[Candidates], console: Console) -> list[Candidates]:
    """Return the first candidates that make the row's `verify_pairs`, and say if that is not all of them."""
    total, budget = 0, reranker.verify_pairs
    for index, query in enumerate(candidates):
        total += len(query.documents)
        if total > budget:
            if index == 0:
                raise PairsError(
                    f"The first query has {total} documents; at most {budget} pairs are scored. "
                    "Raise verify_pairs in rerankers.toml, or list fewer documents."
                )
            console.print(f"          verify uses the first {index} of {len(candidates)} queries ({budget} pairs)")
            return candidates[:index]
    return candidates


def pairs_hash(candidates: Iterable[Candidates]) -> str:
    """Return what a step that is judged by these pairs depends on."""
    return sha256_value([[c.query, list(c.documents), c.relevance] for c in candidates])


def code(*modules: str) -> dict[str, str]:
    """Return what a step's code hashes to; serving code counts like the build's own."""
    folders = (Path(__file__).parent, TOKENIZER_CODE, SCORER_CODE)
    paths = [folder / f"{module}.py" for module in modules for folder in folders]
    return {"code": code_hash(*(path for path in paths if path.exists()))}


def row(reranker: Reranker, *names: str) -> dict[str, Any]:
    """Return the fields that a step depends on, so that a change to others does not build anew."""
    fields = dataclasses.asdict(reranker)
    return {name: fields[name] for name in names}


def described(*steps: StepResult) -> dict[str, dict[str, Any]]:
    """Return a manifest's entry for each file that some steps wrote: its sha256 and size."""
    return {
        name: {"sha256": digest, "bytes": (step.folder / name).stat().st_size}
        for step in steps
        for name, digest in step.files.items()
    }


def manifest(common: Exported, report: StepResult, files: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an installed version says of itself."""
    reranker, checkpoint = common.reranker, common.checkpoint
    asked = {}
    if reranker.prompt is not None:
        asked = {"prompt": dataclasses.asdict(reranker.prompt), "verdict": common.fp32.facts.get("verdict")}
    return {
        "reranker": reranker.name,
        "target": common.request.target,
        "checkpoint": {"source": checkpoint.source, "revision": checkpoint.revision, "files": dict(checkpoint.files)},
        "precision": report.facts["precision"],
        "vocabulary": common.vocabulary,
        **asked,
        "max_length": reranker.max_length,
        "files": dict(files),
        "tools": tool_versions(),
        "report": dict(report.facts),
        "built_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
