# SPDX-License-Identifier: Apache-2.0
"""The commands that finish a build in a container, run by a shell with a `docker` that writes down its arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from build_engines.__main__ import _parser
from build_engines.container import finish_command
from build_engines.places import REPOSITORY
from build_engines.table import DEFAULT_TABLE

CHECKOUT = Path(__file__).resolve().parents[2]
USER = f"{os.getuid()}:{os.getgid()}"
RUN = ["run", "--rm", "--gpus", "all", "--user", USER, "-v", f"{CHECKOUT}:{CHECKOUT}"]


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    """A folder for PATH."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >> "$0.log"\necho >> "$0.log"\n', encoding="utf-8")
    program.chmod(0o755)
    return program.parent


def arguments(docker: Path, build_folder: Path, repository: Path, table: Path | None = None) -> list[list[str]]:
    """Return what docker was called with by the commands for light_reranker."""
    environment = {"PATH": f"{docker}:{os.defpath}", "TRITON_IMAGE": "an-image:26.01-py3"}
    command = finish_command("light_reranker", build_folder, repository, table)
    subprocess.run(["/bin/sh", "-euc", command], cwd=CHECKOUT, env=environment, check=True)
    calls = (docker / "docker.log").read_text(encoding="utf-8").removesuffix("\n\n").split("\n\n")
    return [call.split("\n") for call in calls]


def test_the_image_is_built_and_then_builds_the_engine(docker: Path) -> None:
    build, run = arguments(docker, CHECKOUT / "build", REPOSITORY)
    image = ["build", "--target", "build", "--build-arg", "TRITON_IMAGE=an-image:26.01-py3"]
    assert build == [*image, "-t", "triton-rerank-build", "-f", "deploy/Dockerfile", "."]
    inner = ["python3", "-m", "build_engines", "build", "light_reranker", "--target", "gpu", "--engine-only"]
    assert run == [*RUN, "-w", str(CHECKOUT), "triton-rerank-build", *inner]


def test_what_runs_inside_is_a_command_of_the_project(docker: Path) -> None:
    _, run = arguments(docker, CHECKOUT / "other", CHECKOUT / "my models")
    parsed = _parser().parse_args(run[run.index("build_engines") + 1 :])
    assert (parsed.name, parsed.target, parsed.engine_only) == ("light_reranker", "gpu", True)
    assert (parsed.build_folder, parsed.repository) == (Path("other"), Path("my models"))


def test_folders_outside_the_checkout_are_mounted_where_they_are(docker: Path, tmp_path: Path) -> None:
    _, run = arguments(docker, tmp_path / "my build", tmp_path / "models")
    paths = [str(tmp_path / "my build"), str(tmp_path / "models")]
    assert run[: len(RUN) + 4] == [*RUN, *(part for path in paths for part in ("-v", f"{path}:{path}"))]
    assert run[-4:] == ["--build-folder", paths[0], "--repository", paths[1]]


def test_a_build_folder_is_relative_to_where_the_command_is_given(
    docker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, run = arguments(docker, Path("build"), REPOSITORY)
    assert run[-2:] == ["--build-folder", str(tmp_path / "build")]
    monkeypatch.chdir(CHECKOUT)
    (docker / "docker.log").unlink()
    _, run = arguments(docker, Path("build"), Path("model_repository"))
    assert run[-1] == "--engine-only"


def test_another_table_is_mounted_and_named(docker: Path, tmp_path: Path) -> None:
    table = tmp_path / "my tables" / "rerankers.toml"
    _, run = arguments(docker, CHECKOUT / "build", REPOSITORY, table)
    assert run[: len(RUN) + 2] == [*RUN, "-v", f"{table}:{table}"]
    parsed = _parser().parse_args(run[run.index("build_engines") + 1 :])
    assert (parsed.table, parsed.build_folder, parsed.repository) == (table, Path("build"), REPOSITORY)


def test_a_table_inside_the_checkout_needs_no_mount(docker: Path) -> None:
    _, run = arguments(docker, CHECKOUT / "build", REPOSITORY, CHECKOUT / "own" / "rerankers.toml")
    assert "-v" not in run[len(RUN) :]
    assert run[-2:] == ["--table", "own/rerankers.toml"]


@pytest.mark.parametrize(
    "table", [None, DEFAULT_TABLE, DEFAULT_TABLE.parent / ".." / "build_engines" / "rerankers.toml"]
)
def test_the_default_table_is_not_named(docker: Path, table: Path | None) -> None:
    _, run = arguments(docker, CHECKOUT / "build", REPOSITORY, table)
    assert run[-1] == "--engine-only"
