# SPDX-License-Identifier: Apache-2.0
"""deploy/Dockerfile, as far as it can be held to anything without Docker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from build_engines.__main__ import _parser

CHECKOUT = Path(__file__).resolve().parents[2]
FILE = CHECKOUT / "deploy" / "Dockerfile"
TEXT = FILE.read_text(encoding="utf-8")
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def instructions() -> list[tuple[str, str]]:
    """Return each instruction and its arguments, comments left out and continued lines joined."""
    lines = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))
    joined = lines.replace("\\\n", "")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def of(kind: str) -> list[str]:
    return [arguments for instruction, arguments in instructions() if instruction == kind]


def test_every_instruction_is_one_that_docker_knows() -> None:
    assert {kind for kind, _ in instructions()} <= {"ARG", "FROM", "ENV", "RUN", "EXPOSE", "USER", "WORKDIR", "COPY"}


def test_the_image_must_be_named_and_serve_and_build_come_from_it() -> None:
    first, *_ = instructions()
    assert first == ("ARG", "TRITON_IMAGE"), "an ARG that FROM reads comes before it; it has no default"
    assert of("FROM") == ["${TRITON_IMAGE} AS serve", "serve AS build"]


def test_no_registry_and_no_moving_tag_is_named() -> None:
    for path in (FILE, FILE.with_name("Dockerfile.dockerignore"), CHECKOUT / "build_engines" / "container.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"://|\b[\w-]+\.(?:io|com|org|dev|net)\b|:latest\b", text), path


def test_everything_copied_is_in_the_checkout_and_let_through() -> None:
    lines = FILE.with_name("Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert "*" in lines
    sources = [source for arguments in of("COPY") for source in arguments.split()[:-1]]
    assert sources
    for source in sources:
        assert (CHECKOUT / source).exists()
        assert any(fnmatch(source, pattern) for pattern in kept), f"{source} is ignored"
    assert set(kept) == set(sources)


def test_a_wheel_can_be_made_of_what_is_copied_before_it() -> None:
    order = [kind for kind, arguments in instructions() if kind == "COPY" or '".[build]"' in arguments]
    assert order == ["COPY", "COPY", "RUN"]
    copied = {source for arguments in of("COPY") for source in arguments.split()[:-1]}
    tools = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    needed = {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]}
    needed |= {
        path.split("/")[0] for path in (*tools["build"]["targets"]["wheel"]["packages"], tools["version"]["path"])
    }
    assert copied == needed


def test_every_pin_is_pyprojects() -> None:
    pins = re.findall(r"\b([a-z][\w-]*)==(\d[\w.]*)", TEXT)
    extras = PROJECT["optional-dependencies"]
    assert pins == [("tokenizers", "0.23.3")]
    for extra in ("server", "build"):
        assert {f"{name}=={version}" for name, version in pins} <= set(extras[extra])
    assert set(re.findall(r"\.\[(\w+)\]", TEXT)) <= set(extras)


def test_commands_of_the_project_that_are_named_exist() -> None:
    named = re.findall(r"python3 -m (build_engines .*)", TEXT)
    assert named
    for command in named:
        module, *arguments = command.split()
        assert (CHECKOUT / module / "__main__.py").is_file()
        _parser().parse_args(arguments)


def test_tritons_ports_are_exposed_and_it_does_not_run_as_root() -> None:
    assert of("EXPOSE") == ["8000 8001 8002"]
    stages = TEXT.split("\nFROM ")[1:]
    assert [re.findall(r"^USER (.*)$", stage, re.MULTILINE)[-1] for stage in stages] == ["1000:1000", "1000:1000"]
    assert "--shm-size=1g" in TEXT


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Packages of an image, with the bindings that pip would install; and its programs, of which pip only says what."""
    (tmp_path / "packages" / "tensorrt_bindings").mkdir(parents=True)
    module = tmp_path / "packages" / "tensorrt_bindings" / "__init__.py"
    module.write_text("__version__ = 'of the bindings'\n", encoding="utf-8")
    programs = {
        "dpkg-query": 'printf "$DEBIAN_VERSIONS"',
        "python3": f'if [ "$2" = pip ]; then echo "$@"; else exec {sys.executable} "$@"; fi',
    }
    (tmp_path / "bin").mkdir()
    for name, script in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def install_bindings(image: Path, versions: str) -> subprocess.CompletedProcess[str]:
    (script,) = (arguments for arguments in of("RUN") if "dpkg-query" in arguments)
    environment = {
        "PATH": f"{image / 'bin'}:{os.defpath}",
        "PYTHONPATH": str(image / "packages"),
        "DEBIAN_VERSIONS": versions,
    }
    return subprocess.run(["/bin/sh", "-c", script], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("debian", "package"),
    [
        ("10.13.3.9-1+cuda13.0 ", "tensorrt-cu13-bindings==10.13.3.9"),
        ("10.8.0.43-1+cuda12.8 ", "tensorrt-cu12-bindings==10.8.0.43"),
        (" 11.4.0.106-1+cuda13.4 ", "tensorrt-cu13-bindings==11.4.0.106"),  # a package that is known, not installed
    ],
)
def test_the_bindings_are_those_of_the_images_tensorrt(image: Path, debian: str, package: str) -> None:
    done = install_bindings(image, debian)
    assert done.returncode == 0, done.stderr
    pip, version = done.stdout.splitlines()
    assert pip == f"-m pip install --no-cache-dir --no-deps {package}"
    assert version == "of the bindings"
    assert (image / "packages" / "tensorrt").readlink() == Path("tensorrt_bindings")


@pytest.mark.parametrize("versions", ["", "10.13.3.9-1+cuda13.0 11.4.0.106-1+cuda13.4 "])
def test_an_image_without_one_tensorrt_is_refused(image: Path, versions: str) -> None:
    done = install_bindings(image, versions)
    assert done.returncode == 1
    assert f"This image has {len(versions.split())} packages libnvinfer10 or libnvinfer11" in done.stderr
    assert done.stdout == ""
