# SPDX-License-Identifier: Apache-2.0
"""`python -m build_engines serve`: a real tritonserver on the rerankers that are built."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from build_engines.configs import pinned_version
from build_engines.errors import ServerError
from build_engines.gpu import find_gpu, installed_tensorrt
from build_engines.install import installed_versions, read_manifest
from build_engines.plan_check import check_files, check_plan, target_of
from build_engines.table import Reranker, find_reranker, read_table
from build_engines.triton_install import CONTAINER_BIN_DIRECTORY, TritonInstallation, find_tritonserver
from build_engines.triton_server import ServerOptions, TritonServer


@dataclass(frozen=True, slots=True)
class Checked:
    """A choice of rerankers that can be served here, and what their server is to be told."""

    models: tuple[str, ...]
    config_name: str | None
    extra_args: tuple[str, ...]
    installation: TritonInstallation


def add_serve_arguments(command: argparse.ArgumentParser) -> None:
    """Declare what `serve` takes, besides the repository and the table."""
    command.add_argument("names", nargs="*", help="rerankers to serve (default: all that are built)")
    command.add_argument(
        "--target",
        choices=["auto", "cpu", "gpu"],
        default="auto",
        help="what the served versions are built for (default: auto, what they are; all must be the same)",
    )
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    for service, port in (("grpc", 8001), ("http", 8000), ("metrics", 8002)):
        command.add_argument(f"--{service}-port", type=int, default=port, help=f"default: {port}; 0 for a free one")
    command.add_argument(
        "--log", type=Path, default=Path("build/tritonserver.log"), help="the server's log (build/tritonserver.log)"
    )
    command.add_argument("--startup-timeout-s", type=float, default=300.0, help="seconds to wait for the models (300)")


def serve(arguments: argparse.Namespace, console: Console) -> int:
    """Serve until Ctrl-C or SIGTERM; raise a BuildError when the server cannot start here, does not, or dies."""
    checked = check(arguments.repository, _choose(arguments), console)
    try:
        options = ServerOptions(
            repository=arguments.repository,
            models=checked.models,
            config_name=checked.config_name,
            host=arguments.host,
            grpc_port=arguments.grpc_port or None,
            http_port=arguments.http_port or None,
            metrics_port=arguments.metrics_port or None,
            startup_timeout_s=arguments.startup_timeout_s,
            log_path=arguments.log,
            extra_args=checked.extra_args,
        )
    except ValueError as error:
        raise ServerError(f"{error}. See python -m build_engines serve --help.") from error
    # Service managers send SIGTERM; it ends the server as cleanly as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), TritonServer(options, checked.installation) as server:
        console.print(f"Serving {', '.join(checked.models)}; Ctrl-C stops.")
        console.print(f"  gRPC    {server.grpc_url}\n  HTTP    {server.http_url}\n  metrics {server.metrics_url}")
        console.print(f"  log     {server.log_path}")
        status = server.wait()
        console.print(f"tritonserver ended with exit code {status}")
    return 0


def served_manifests(repository: Path, rows: Sequence[Reranker]) -> dict[str, dict[str, Any]]:
    """Return the manifest of each reranker's served version, by name; rerankers that have none are left out."""
    manifests = {}
    for row in rows:
        version = pinned_version(repository, row)
        if version in installed_versions(repository, row):
            manifests[row.name] = read_manifest(repository, row, version)
    return manifests


def check(repository: Path, rows: Sequence[Reranker], console: Console) -> Checked:
    """Hold built rerankers of one target against this machine; raise a BuildError that says what does not fit.

    Cheap checks come first; the last reads every file.
    """
    installation = find_tritonserver()
    manifests = served_manifests(repository, rows)
    for_gpu = target_of(manifests[rows[0].name]) == "gpu"
    if for_gpu:
        _check_gpus(rows, manifests)
        _check_backend(installation)
    for row in rows:
        version = str(pinned_version(repository, row))
        with console.status(f"checking the files of {row.name} ..."):
            check_files([repository / model / version for model in (row.tokenizer, row.scorer)], manifests[row.name])
    # Such a plan brings code along, which TensorRT runs only if it is told that it may.
    compatible = for_gpu and any(manifest["engine"]["version_compatible"] for manifest in manifests.values())
    return Checked(
        models=tuple(manifests),
        config_name=None if for_gpu else "cpu",
        extra_args=("--backend-config=tensorrt,version-compatible=true",) if compatible else (),
        installation=installation,
    )


def _choose(arguments: argparse.Namespace) -> list[Reranker]:
    """Return the built rerankers that are asked for; raise ServerError unless they are of one target."""
    named = [find_reranker(name, arguments.table) for name in arguments.names]
    rows = named or list(read_table(arguments.table).values())
    manifests = served_manifests(arguments.repository, rows)
    missing = [row.name for row in rows if row.name not in manifests]
    if not manifests or (named and missing):
        raise ServerError(
            f"Not built in {arguments.repository}: {', '.join(missing)}. "
            f"Build first: python -m build_engines build {missing[0]}"
        )
    targets = {name: target_of(manifest) for name, manifest in manifests.items()}
    listed = ", ".join(f"{name} for {target}" for name, target in targets.items())
    if arguments.target == "auto" and len(set(targets.values())) > 1:
        raise ServerError(
            f"One server serves one target, and the served versions are of two: {listed}. Name rerankers of one "
            "target, or give --target cpu or --target gpu."
        )
    others = [name for name, target in targets.items() if arguments.target not in ("auto", target)]
    if others and (named or len(others) == len(targets)):
        raise ServerError(
            f"--target {arguments.target} was given, and the served versions are: {listed}. Leave --target out, or "
            f"build and pin another version: python -m build_engines build {others[0]} --target {arguments.target}"
        )
    return [row for row in rows if row.name in targets and row.name not in others]


def _check_gpus(rows: Sequence[Reranker], manifests: Mapping[str, Mapping[str, Any]]) -> None:
    # Triton puts an instance on every GPU that it sees, so each must be able to run the plan.
    gpus = list(itertools.takewhile(lambda gpu: gpu is not None, map(find_gpu, itertools.count())))
    tensorrt = installed_tensorrt()
    for row, gpu in itertools.product(rows, gpus or [None]):
        check_plan(manifests[row.name], gpu, tensorrt, row)


def _check_backend(installation: TritonInstallation) -> None:
    backends = installation.backend_directory or Path(CONTAINER_BIN_DIRECTORY).with_name("backends")
    if not (backends / "tensorrt").is_dir():
        raise ServerError(
            f"Versions for gpu need Triton's TensorRT backend, and {installation.origin} has none: there is no "
            f"{backends / 'tensorrt'}. Serve in the image of deploy/Dockerfile, or a version for cpu."
        )
