# SPDX-License-Identifier: Apache-2.0
"""The end of a gpu build, beside a pretended GPU and TensorRT: which engine is installed, and what stops it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import build_engines.finish
import build_engines.verify_plan
from build_engines.__main__ import main
from build_engines.errors import BuildError, EngineError, GateError, InstallError
from build_engines.hashing import sha256_file
from build_engines.install import Installed
from build_engines.plan_check import check_plan
from build_engines.request import BuildRequest
from build_engines.table import EngineOptions
from tests.checkpoints import write_xlm_roberta
from tests.unit.gpu_builds import (
    BUCKETS,
    LOOSE,
    gpu_request,
    random_candidates,
    read_json,
    run,
    write_pairs,
    write_table,
)
from tests.unit.pretended_gpu import GPU, Machine

STRICT = replace(LOOSE, max_score_shift=0.5)


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> BuildRequest:
    """A build for gpu as far as it comes without one; its INT8 passes."""
    root = tmp_path_factory.mktemp("verified")
    checkpoint = write_xlm_roberta(root / "checkpoint", layers=1)
    request = gpu_request(root, checkpoint, write_pairs(root / "pairs.jsonl", random_candidates(48, seed=1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_engines.finish, "find_gpu", lambda: None)
        run(request)
    return request


@pytest.fixture
def machine(verified: BuildRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    shutil.copytree(verified.build_folder, tmp_path / "build")
    made = Machine(replace(verified, repository=tmp_path / "repository", build_folder=tmp_path / "build"))
    made.pretend(monkeypatch)
    return made


def changed(request: BuildRequest, **fields: Any) -> BuildRequest:
    return replace(request, reranker=replace(request.reranker, **fields))


def built_as(machine: Machine, **fields: Any) -> BuildRequest:
    """Build up to the verified graph with another row, without the GPU."""
    request = changed(machine.request, **fields)
    gpu, machine.gpu = machine.gpu, None
    run(request)
    machine.gpu = gpu
    return request


def test_int8_is_installed_where_it_is_faster(machine: Machine) -> None:
    request = machine.request
    machine.shift["engine"] = 0.25
    assert machine.finish() == Installed(1, live=True, new=True)
    assert machine.built == ["convert", "convert-base"]
    manifest, plan = machine.installed()
    assert plan == (request.folder / "convert" / "model.onnx").read_bytes()
    assert (manifest["target"], manifest["precision"], manifest["int8_speedup"]) == ("gpu", "int8", pytest.approx(2.0))
    facts = {"gpu": "NVIDIA Test", "compute_capability": "9.0", "tensorrt": "11.4.0.106", "optimization_level": 3}
    assert manifest["engine"].items() >= facts.items()
    gates = {gate["name"]: gate for gate in manifest["on_gpu"]["gates"]}
    assert set(gates) == {"largest score shift / spread", "Kendall tau", "top-1 agreement"}
    assert gates["largest score shift / spread"]["found"] == pytest.approx(0.25, rel=1e-3)
    assert all(gate["passed"] for gate in gates.values())
    assert manifest["on_gpu"]["seconds_per_batch"] == [0.1] * len(BUCKETS)
    assert manifest["report"]["int8_layers"]
    assert "INT8 is 2.00 x as fast as FP16" in machine.said
    for name, known in manifest["files"].items():
        (path,) = request.repository.glob(f"*/1/{name}")
        assert known == {"sha256": sha256_file(path), "bytes": path.stat().st_size}
    assert set(manifest["files"]) == {"model.plan", "pairing.json", "tokenizer.json"}


@pytest.mark.parametrize(
    ("int8", "ships"),
    [
        ([0.2 / 1.11] * 6, "int8"),
        ([0.2 / 1.09] * 6, "fp16"),
        ([0.4] * 6, "fp16"),
        # The middle of six buckets decides: here 1.0 and 1.3, there 1.0 and 1.0.
        ([0.2 / ratio for ratio in (0.9, 1.3, 1.0, 1.4, 0.8, 1.5)], "int8"),
        ([0.2 / ratio for ratio in (0.9, 1.0, 1.0, 9.0, 0.8, 9.0)], "fp16"),
    ],
)
def test_int8_that_is_hardly_faster_gives_way_to_the_base(machine: Machine, int8: list[float], ships: str) -> None:
    machine.seconds["engine"] = int8
    machine.shift = {"engine": 0.25, "engine-base": 0.125}
    assert machine.finish() == Installed(1, live=True, new=True)
    manifest, plan = machine.installed()
    step, shift = {"int8": ("convert", 0.25), "fp16": ("convert-base", 0.125)}[ships]
    assert plan == (machine.request.folder / step / "model.onnx").read_bytes()
    assert manifest["precision"] == ships
    assert manifest["on_gpu"]["gates"][0]["found"] == pytest.approx(shift, rel=1e-3)
    assert manifest["on_gpu"]["seconds_per_batch"] == (int8 if ships == "int8" else [0.2] * 6)
    assert manifest["int8_speedup"] == pytest.approx(np.median([0.2 / seconds for seconds in int8]))


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_a_precision_that_was_asked_for_needs_one_engine(machine: Machine, precision: str) -> None:
    machine.seconds["engine"] = [9.0] * 6
    built_as(machine, precision=precision)
    # The command that finishes does not repeat --precision: the row says auto again.
    assert machine.request.reranker.precision == "auto"
    assert machine.finish(engine_only=True) == Installed(1, live=True, new=True)
    assert machine.built == ["convert"]
    manifest, plan = machine.installed()
    assert manifest["precision"] == precision
    assert plan == (machine.request.folder / "convert" / "model.onnx").read_bytes()
    assert "int8_speedup" not in manifest


def test_a_whole_build_on_a_machine_with_a_gpu_ends_installed(machine: Machine) -> None:
    built = run(machine.request)
    assert built.result == Installed(1, live=True, new=True)
    assert "install   version 1 (new)" in built.said


@pytest.mark.parametrize(
    ("engine", "shift", "message"),
    [
        (
            "engine",
            0.6,
            "/engine/model.plan is outside its gates on this GPU, though its graph was inside: largest",
        ),
        ("engine", np.nan, r"612 scores of .*/engine/model.plan are not finite on this GPU, though the graph's were"),
        ("engine", np.inf, "612 scores of .*/engine/model.plan are not finite"),
        ("engine-base", 0.6, "/engine-base/model.plan is outside its gates on this GPU"),
        ("engine-base", np.nan, "612 scores of .*/engine-base/model.plan are not finite"),
    ],
)
def test_an_engine_outside_the_gates_is_not_installed(
    machine: Machine, engine: str, shift: float, message: str
) -> None:
    machine.shift[engine] = shift
    # The graph is not verified again: the gates are for the engine alone.
    request = changed(machine.request, gates=STRICT, base_gates=STRICT)
    with pytest.raises(GateError, match=message):
        machine.finish(request)
    assert not machine.request.repository.exists()
    machine.shift[engine] = 0.4
    assert machine.finish(request) == Installed(1, live=True, new=True)


@pytest.mark.parametrize("engine", ["engine", "engine-base"])
def test_each_engine_has_gates_of_its_own(machine: Machine, engine: str) -> None:
    """A shift of 0.6 is inside the loose gates of the other precision."""
    machine.shift = dict.fromkeys(("engine", "engine-base"), 0.6)
    gates = {"gates": LOOSE, "base_gates": LOOSE} | {"gates" if engine == "engine" else "base_gates": STRICT}
    with pytest.raises(GateError, match=f"/{engine}/model.plan is outside its gates"):
        machine.finish(changed(machine.request, **gates))


@pytest.mark.parametrize("step", ["pairing", "verify-gpu", "convert", "convert-base"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_step_that_has_changed_since_is_refused(machine: Machine, step: str, whole: bool) -> None:
    """Either a file is not what its step wrote, or the step was made again, by a build that went no further."""
    folder = machine.request.folder / step
    state = read_json(folder / "step.json")
    (folder / next(iter(state["files"]))).write_text("{}", encoding="utf-8")
    expected = f"{folder} does not hold a finished step, or a file of it has changed"
    if whole:
        state["files"] = {name: sha256_file(folder / name) for name in state["files"]}
        (folder / "step.json").write_text(json.dumps(state), encoding="utf-8")
        expected = f"{folder} was made again after the graph of tiny was verified"
    with pytest.raises(InstallError, match=expected):
        machine.finish()
    assert machine.built == []
    assert not machine.request.repository.exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"target": "gpu"}'])
def test_a_damaged_handover_is_refused(machine: Machine, text: str) -> None:
    (machine.request.folder / "handover.json").write_text(text, encoding="utf-8")
    with pytest.raises(
        InstallError, match=r"handover\.json cannot be read .* First build up to the verified graph: python"
    ):
        machine.finish()


def test_what_is_installed_is_served_on_the_same_gpu_alone(machine: Machine) -> None:
    machine.finish()
    manifest, _ = machine.installed()
    check_plan(manifest, GPU, "11.4.0", machine.request.reranker)
    with pytest.raises(EngineError, match=r"exactly 9\.0; found NVIDIA Test with 8\.9"):
        check_plan(manifest, replace(GPU, compute_capability="8.9"), "11.4.0", machine.request.reranker)
    with pytest.raises(EngineError, match=r"exactly 11\.4\.0; found 11\.5\.0"):
        check_plan(manifest, GPU, "11.5.0", machine.request.reranker)


def test_options_of_the_row_reach_the_manifest(machine: Machine) -> None:
    engine = EngineOptions(hardware_compatibility="ampere_plus", version_compatible=True)
    machine.request = changed(machine.request, engine=engine)
    machine.finish()
    manifest, _ = machine.installed()
    check_plan(manifest, replace(GPU, compute_capability="8.6"), "11.5.0", machine.request.reranker)


def test_engines_are_kept_for_the_gpu_that_they_were_built_on(machine: Machine) -> None:
    machine.finish()
    assert machine.finish() == Installed(1, live=True, new=False)
    assert machine.built == ["convert", "convert-base"]
    assert "engine    unchanged, kept" in machine.said
    machine.gpu = replace(GPU, compute_capability="8.9")
    machine.finish()
    assert machine.built == ["convert", "convert-base"] * 2


def test_the_command_line_finishes(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = machine.request
    table = write_table(tmp_path / "rerankers.toml", request)
    places = ["--repository", str(request.repository), "--build-folder", str(request.build_folder)]
    command = ["build", "tiny", "--target", "gpu", "--engine-only", "--table", str(table), *places]
    assert main(command) == 0
    assert "version 1 (new)" in capsys.readouterr().out
    machine.shift["engine"] = np.nan
    assert main(command) == 1
    assert "refused tiny: 612 scores of" in capsys.readouterr().err


def test_without_tensorrt_the_command_of_the_container_is_given(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert machine.finish() == machine.request.folder / "convert" / "model.onnx"
    assert "engine    not built: TensorRT is not installed here." in machine.said
    assert "--engine-only" in machine.said
    with pytest.raises(
        BuildError, match=r"tiny: TensorRT is not installed here\. Finish in the container:\n# TRITON_IMAGE"
    ):
        machine.finish(engine_only=True)
