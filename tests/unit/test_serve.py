# SPDX-License-Identifier: Apache-2.0
"""What `serve` and `demo` find out before tritonserver starts; no server is started here."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from build_engines import serve
from build_engines.__main__ import main
from build_engines.errors import BuildError
from build_engines.gpu import Gpu
from build_engines.serve import Checked, check
from build_engines.table import Reranker, find_reranker
from build_engines.triton_install import TritonInstallation
from tests.unit.pretended_builds import Builds, engine_facts

LIGHT = find_reranker("light_reranker")
BGE = find_reranker("bge_reranker")
H200 = Gpu("NVIDIA H200", "9.0", 141 << 30)
L4 = Gpu("NVIDIA L4", "8.9", 23 << 30)


class Machine:
    """A pretended machine: its GPUs, its TensorRT, its tritonserver; and a repository."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.gpus = [H200]
        self.installation = TritonInstallation(folder / "tritonserver", "test", backend_directory=folder / "backends")
        (folder / "backends" / "tensorrt").mkdir(parents=True)
        patch.setattr(serve, "find_gpu", lambda index: dict(enumerate(self.gpus)).get(index))
        patch.setattr(serve, "installed_tensorrt", lambda: "11.4.0")
        patch.setattr(serve, "find_tritonserver", lambda: self.installation)
        self.cpu, self.gpu = (Builds(folder, row) for row in (LIGHT, BGE))

    def build(self, **engine: object) -> None:
        """Install light_reranker for cpu and bge_reranker for gpu."""
        self.cpu.install("a")
        self.gpu.install("a", engine=engine_facts(BGE, **engine))

    def check(self, builds: Builds) -> Checked:
        return check(builds.repository, [builds.reranker], Console(quiet=True))

    def refusal(self, builds: Builds) -> str:
        with pytest.raises(BuildError) as caught:
            self.check(builds)
        return str(caught.value)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def command(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str] | str]:
    """Run `serve`; return the names of the rerankers that it would start a server on, or what it refuses with."""

    def run(*arguments: str) -> list[str] | str:
        chosen: list[str] = []

        def stop(_repository: Path, rows: list[Reranker], _console: Console) -> Checked:
            chosen.extend(row.name for row in rows)
            raise BuildError

        monkeypatch.setattr(serve, "check", stop)
        assert main(["serve", *arguments, "--repository", str(machine.cpu.repository)]) == 1
        return chosen or capsys.readouterr().err

    return run


def test_a_version_for_cpu_is_served_with_the_configs_for_cpu(machine: Machine) -> None:
    machine.build()
    machine.gpus = []
    assert machine.check(machine.cpu) == Checked(("light_reranker",), "cpu", (), machine.installation)


def test_a_version_for_gpu_is_served_with_tritons_default_configs(machine: Machine) -> None:
    machine.build()
    assert machine.check(machine.gpu) == Checked(("bge_reranker",), None, (), machine.installation)


def test_a_version_compatible_plan_has_triton_allow_its_code(machine: Machine) -> None:
    machine.build(version_compatible=True, tensorrt="11.3.0.1")
    assert machine.check(machine.gpu).extra_args == ("--backend-config=tensorrt,version-compatible=true",)


def test_without_a_gpu_a_plan_is_refused(machine: Machine) -> None:
    machine.build()
    machine.gpus = []
    assert "needs a GPU of compute capability exactly 9.0; found no GPU" in machine.refusal(machine.gpu)


def test_every_gpu_must_run_the_plan_because_triton_uses_every_one(machine: Machine) -> None:
    machine.build()
    machine.gpus = [H200, L4]
    assert "exactly 9.0; found NVIDIA L4 with 8.9" in machine.refusal(machine.gpu)


def test_another_tensorrt_is_refused(machine: Machine) -> None:
    machine.build(tensorrt="10.13.3.9")
    assert "needs TensorRT exactly 10.13.3; found 11.4.0" in machine.refusal(machine.gpu)


def test_a_tritonserver_without_the_tensorrt_backend_is_refused(machine: Machine) -> None:
    machine.build()
    shutil.rmtree(machine.folder / "backends" / "tensorrt")
    refusal = machine.refusal(machine.gpu)
    assert f"there is no {machine.folder}/backends/tensorrt. Serve in the image of deploy/Dockerfile" in refusal
    machine.check(machine.cpu)


@pytest.mark.parametrize("path", ["bge_reranker_scorer/1/model.plan", "bge_reranker_tokenizer/1/tokenizer.json"])
def test_a_file_that_has_changed_is_refused(machine: Machine, path: str) -> None:
    machine.build()
    file = machine.gpu.repository / path
    file.write_bytes(file.read_bytes()[::-1])
    assert machine.refusal(machine.gpu).startswith(f"{file} has sha256 ")


def test_one_server_serves_one_target(machine: Machine, command: Callable[..., list[str] | str]) -> None:
    machine.build()
    mixed = "light_reranker for cpu, bge_reranker for gpu. Name rerankers of one target, or give --target cpu or"
    assert mixed in command()
    assert mixed in command("light_reranker", "bge_reranker")
    assert command("light_reranker") == command("--target", "cpu") == ["light_reranker"]
    assert command("bge_reranker") == command("--target", "gpu") == ["bge_reranker"]


def test_a_target_that_is_not_built_is_refused_with_what_is(
    machine: Machine, command: Callable[..., list[str] | str]
) -> None:
    machine.build()
    assert "--target gpu was given, and the served versions are: light_reranker for cpu." in command(
        "light_reranker", "--target", "gpu"
    )
    assert "build light_reranker --target gpu" in command("light_reranker", "bge_reranker", "--target", "gpu")


def test_the_demo_is_refused_like_serve(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.cpu.install("a", engine=engine_facts(LIGHT))
    machine.gpus = []
    assert main(["demo", "--repository", str(machine.cpu.repository)]) == 1
    assert "found no GPU" in capsys.readouterr().err
