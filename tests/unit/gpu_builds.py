# SPDX-License-Identifier: Apache-2.0
"""Builds of tiny random checkpoints for the gpu target, and files of random pairs for them."""

from __future__ import annotations

import dataclasses
import io
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import build_engines.build_gpu
from build_engines import calibrate, verify_gpu
from build_engines.build import build
from build_engines.install import Installed
from build_engines.pairs import Candidates
from build_engines.request import BuildRequest
from build_engines.table import Gates, Reranker
from build_engines.verify import Verifier
from tests.checkpoints import CORPUS, row

BUCKETS = (16, 32, 48, 64, 96, 128)
LOOSE = Gates(ndcg_drop=1.0, top1_agreement=0.0, kendall_tau=-1.0, max_score_shift=100.0)
# What a random head with a few layers keeps in INT8, and does not where a layer is lost.
FIRM = Gates(ndcg_drop=1.0, top1_agreement=0.0, kendall_tau=0.6, max_score_shift=1.5)
IMPOSSIBLE = Gates(ndcg_drop=0.0, top1_agreement=1.01, kendall_tau=1.01, max_score_shift=0.0)
_WORDS = " ".join(CORPUS[:9]).split()


@dataclass(frozen=True, slots=True)
class Built:
    """A build, what came of it and what it said."""

    request: BuildRequest
    result: Installed | Path
    said: str

    @property
    def folder(self) -> Path:
        return self.request.folder

    def step(self, name: str) -> dict[str, Any]:
        """What step.json says of a step."""
        found: dict[str, Any] = read_json(self.folder / name / "step.json")
        return found


def run(request: BuildRequest) -> Built:
    """Build, and keep what is printed."""
    said = io.StringIO()
    result = build(request, Console(file=said, width=2000, highlight=False))
    return Built(request, result, said.getvalue())


@dataclass(frozen=True, slots=True)
class Watched:
    """A build, the ids of each pair that its graph ran to calibrate, and the queries that it was judged by."""

    built: Built
    calibrating: list[list[int]]
    judging: list[str]


def watch(request: BuildRequest) -> Watched:
    """Build, and see what the steps are given."""
    seen: dict[str, Any] = {}

    def watch_calibrate(reranker: Any, graph: Path, chosen: Any, out: Path, advance: Any) -> dict[str, Any]:
        seen["calibrating"] = [pair.arrays["input_ids"][0].tolist() for pair in chosen]
        return calibrate.calibrate(reranker, graph, chosen, out, advance)

    def watch_verify(verifier: Verifier, *others: Any) -> dict[str, Any]:
        seen["judging"] = [candidates.query for candidates in verifier.candidates]
        facts: dict[str, Any] = verify_gpu.verify_for_tensorrt(verifier, *others)
        return facts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_engines.build_gpu, "calibrate", watch_calibrate)
        patch.setattr(build_engines.build_gpu, "verify_for_tensorrt", watch_verify)
        return Watched(run(request), **seen)


def gpu_request(root: Path, checkpoint: Path, pairs: Path, **overrides: Any) -> BuildRequest:
    """Ask for a build with small buckets; everything lies below `root`."""
    fields: dict[str, Any] = {"max_length": BUCKETS[-1], "buckets": BUCKETS, "gates": LOOSE} | overrides
    return BuildRequest(row("tiny", checkpoint, **fields), "gpu", root / "repository", root / "build", pairs)


def random_candidates(queries: int, *, seed: int, graded: bool = False, documents: int = 18) -> list[Candidates]:
    """Return queries of two words and a number, each with documents for every bucket in turn."""
    rng = random.Random(seed)
    found = []
    for query in range(queries):
        lengths = [rng.randrange(1, BUCKETS[document % len(BUCKETS)] // 2) for document in range(documents)]
        texts = tuple(" ".join(rng.choices(_WORDS, k=length)) for length in lengths)
        grades = tuple(float(rng.randrange(3)) for _ in texts) if graded else None
        found.append(Candidates(f"{' '.join(rng.sample(_WORDS, 2))} {seed}{query}", texts, grades))
    return found


def write_pairs(path: Path, candidates: list[Candidates]) -> Path:
    """Write the candidates as JSON lines."""
    rows = [{"query": c.query, "documents": c.documents, "relevance": c.relevance} for c in candidates]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def read_json(path: Path) -> Any:
    """Read a file of JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_table(path: Path, request: BuildRequest) -> Path:
    """Write a table with the one row of a request, for the command line."""
    path.write_text(f"[{request.reranker.name}]\n" + "\n".join(_toml(request.reranker)), encoding="utf-8")
    return path


def _toml(reranker: Reranker) -> list[str]:
    lines = []
    fields = dataclasses.asdict(reranker) | {"prompt": reranker.prompt and reranker.prompt.name}
    for field, value in fields.items():
        if isinstance(value, dict):
            inner = ", ".join(f"{name} = {json.dumps(part)}" for name, part in value.items())
            lines.append(f"{field} = {{ {inner} }}")
        elif field != "name" and value is not None:
            lines.append(f"{field} = {json.dumps(value)}")
    return lines
