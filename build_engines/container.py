# SPDX-License-Identifier: Apache-2.0
"""The commands that finish a gpu build in the image of deploy/Dockerfile, where the machine itself has no TensorRT."""

from __future__ import annotations

import shlex
from pathlib import Path

from build_engines.places import REPOSITORY
from build_engines.table import DEFAULT_TABLE

IMAGE = "triton-rerank-build"
_CHECKOUT = REPOSITORY.parent


def finish_command(name: str, build_folder: Path, repository: Path, table: Path | None = None) -> str:
    """Return shell commands, to be run in the checkout, that build the image and in it the engine of a reranker.

    The checkout is mounted under its own path, and so is what lies outside of it: paths mean the same on both sides.
    """
    mounts, options = ['-v "$PWD":"$PWD"'], ""
    for option, given, default in (
        ("--build-folder", build_folder, _CHECKOUT / "build"),
        ("--repository", repository, REPOSITORY),
        ("--table", table or DEFAULT_TABLE, DEFAULT_TABLE),
    ):
        path = given.resolve()
        if path == default.resolve():
            continue
        if path.is_relative_to(_CHECKOUT):
            options += f" {option} {shlex.quote(str(path.relative_to(_CHECKOUT)))}"
        else:
            mounts.append(f"-v {shlex.quote(f'{path}:{path}')}")
            options += f" {option} {shlex.quote(str(path))}"
    return (
        "# TRITON_IMAGE: NVIDIA's tritonserver image that will serve, tag YY.MM-py3\n"
        f'docker build --target build --build-arg TRITON_IMAGE="$TRITON_IMAGE" -t {IMAGE} -f deploy/Dockerfile .\n'
        f'docker run --rm --gpus all --user "$(id -u):$(id -g)" {" ".join(mounts)} -w "$PWD" {IMAGE} '
        f"python3 -m build_engines build {name} --target gpu --engine-only{options}"
    )
