# SPDX-License-Identifier: Apache-2.0
"""A function that runs in a process of its own answers as it would here."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from build_engines import apart
from build_engines.apart import run_apart, run_apart_if_large
from build_engines.errors import CheckpointError, ExportError
from build_engines.export import export
from tests.unit.tiny_models import TinyModels


def chatty_process(text: str, *, times: int) -> tuple[int, str]:
    os.write(1, b"printed by a library\n")
    return os.getpid(), text * times


def refusing(name: str) -> None:
    raise CheckpointError(f"{name} is refused.")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_answer_comes_from_another_process_whatever_it_prints() -> None:
    process, text = run_apart(chatty_process, "ab", times=2)
    assert process != os.getpid()
    assert text == "abab"


def test_its_refusal_is_raised_here() -> None:
    with pytest.raises(CheckpointError, match="tiny is refused"):
        run_apart(refusing, "tiny")


def test_a_process_without_memory_is_said_to_be_one() -> None:
    with pytest.raises(ExportError, match=r"test_apart.killed ended with status -9: the memory of this machine"):
        run_apart(killed)


def test_only_what_is_large_runs_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.onnx").write_bytes(b"graph")
    (tmp_path / "model.onnx.data").write_bytes(b"weights")
    assert run_apart_if_large(tmp_path, os.getpid) == os.getpid()
    monkeypatch.setattr(apart, "LARGE_BYTES", len(b"graphweights"))
    assert run_apart_if_large(tmp_path, os.getpid) != os.getpid()


def test_an_export_apart_writes_the_same_graph(tiny: TinyModels, tmp_path: Path) -> None:
    model = tiny.model("bert")
    facts = run_apart(export, model.checkpoint, model.reranker, tmp_path)
    assert facts["parameters"] > 0
    assert (tmp_path / "model.onnx").read_bytes() == tiny.graph("bert").read_bytes()
