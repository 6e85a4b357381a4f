# SPDX-License-Identifier: Apache-2.0
"""What the server tests serve: four rerankers, built through the build's own interface.

Intermediate files lie in build/server-tests, which git ignores: a step is kept only while the hashes of its inputs, its
code and its tools are unchanged, so that a second session builds nothing and never sees anything stale.
"""

from __future__ import annotations

import dataclasses
import io
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from build_engines.build import build
from build_engines.fetch import fetch
from build_engines.request import BuildRequest
from build_engines.table import Reranker, find_reranker
from tests.checkpoints import row, write_bert, write_xlm_roberta
from tests.locks import alone_in

LIGHT = "light_reranker"
INT8 = "light_int8"
XLM_R = "tiny_xlm_roberta"
BERT = "tiny_bert"
FP32 = (LIGHT, XLM_R, BERT)
ALL = (*FP32, INT8)

INTERMEDIATE = Path(__file__).resolve().parents[2] / "build" / "server-tests"
# Enough to make several runs work side by side, few enough for any machine.
_THREADS = 2


@dataclass(frozen=True, slots=True)
class Served:
    """A model repository, the rows of the table it was built from, and the folders of their checkpoints."""

    repository: Path
    rows: Mapping[str, Reranker]
    checkpoints: Mapping[str, Path]


def build_all(repository: Path) -> Served:
    """Build every reranker as version 1 of `repository`."""
    with alone_in(INTERMEDIATE):
        light = find_reranker(LIGHT)
        rows = {
            LIGHT: dataclasses.replace(light, precision="fp32"),
            INT8: dataclasses.replace(light, name=INT8, precision="int8"),
            XLM_R: row(XLM_R, write_xlm_roberta(INTERMEDIATE / "checkpoints" / XLM_R), precision="fp32"),
            BERT: row(BERT, write_bert(INTERMEDIATE / "checkpoints" / BERT), precision="fp32"),
        }
        for reranker in rows.values():
            _build(reranker, repository, "first")
            _limit_threads(repository, reranker)
        return Served(repository, rows, {name: fetch(reranker).folder for name, reranker in rows.items()})


def build_second_version(served: Served) -> tuple[Reranker, Path]:
    """Add version 2 of the tiny XLM-R, which has other weights; return its row and its checkpoint."""
    with alone_in(INTERMEDIATE):
        checkpoint = write_xlm_roberta(INTERMEDIATE / "checkpoints" / "another_xlm_roberta", seed=1)
        second = row(XLM_R, checkpoint, precision="fp32")
        _build(second, served.repository, "second")
        return second, checkpoint


def copy_of(served: Served, name: str, folder: Path) -> Served:
    """Copy one reranker into a repository of its own."""
    reranker = served.rows[name]
    for model in (name, reranker.tokenizer, reranker.scorer):
        shutil.copytree(served.repository / model, folder / model, ignore=shutil.ignore_patterns("__pycache__"))
    return Served(folder, {name: reranker}, {name: served.checkpoints[name]})


def _build(reranker: Reranker, repository: Path, generation: str) -> None:
    said = io.StringIO()
    build(BuildRequest(reranker, "cpu", repository, INTERMEDIATE / generation), Console(file=said))


def _limit_threads(repository: Path, reranker: Reranker) -> None:
    config = repository / reranker.scorer / "configs" / "cpu.pbtxt"
    text = config.read_text(encoding="utf-8")
    before = 'key: "threads"\n  value {\n    string_value: "0"'
    assert before in text, f"{config} no longer sets threads"
    config.write_text(text.replace(before, before.replace('"0"', f'"{_THREADS}"')), encoding="utf-8")
