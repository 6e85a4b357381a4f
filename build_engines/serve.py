# SPDX-License-Identifier: Apache-2.0
"""`python -m build_engines serve`: a real tritonserver on the rerankers that are built."""

from __future__ import annotations

import argparse
import contextlib
import signal
from pathlib import Path

from rich.console import Console

from build_engines.configs import pinned_version
from build_engines.errors import ServerError
from build_engines.install import installed_versions
from build_engines.table import Reranker, find_reranker, read_table
from build_engines.triton_server import ServerOptions, TritonServer


def add_serve_arguments(command: argparse.ArgumentParser) -> None:
    """Declare what `serve` takes, besides the repository and the table."""
    command.add_argument("names", nargs="*", help="rerankers to serve (default: all that are built)")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    for service, port in (("grpc", 8001), ("http", 8000), ("metrics", 8002)):
        command.add_argument(f"--{service}-port", type=int, default=port, help=f"default: {port}; 0 for a free one")
    command.add_argument(
        "--log", type=Path, default=Path("build/tritonserver.log"), help="the server's log (build/tritonserver.log)"
    )
    command.add_argument("--startup-timeout-s", type=float, default=300.0, help="seconds to wait for the models (300)")


def serve(arguments: argparse.Namespace, console: Console) -> int:
    """Serve until Ctrl-C or SIGTERM; raise ServerError when the server does not start or dies."""
    rows = [find_reranker(name, arguments.table) for name in arguments.names] or list(
        read_table(arguments.table).values()
    )
    built = built_rerankers(arguments.repository, rows)
    missing = [row.name for row in rows if row.name not in built]
    if not built or (arguments.names and missing):
        raise ServerError(
            f"Not built in {arguments.repository}: {', '.join(missing)}. "
            f"Build first: python -m build_engines build {missing[0]}"
        )
    try:
        options = ServerOptions(
            repository=arguments.repository,
            models=tuple(built),
            config_name="cpu",
            host=arguments.host,
            grpc_port=arguments.grpc_port or None,
            http_port=arguments.http_port or None,
            metrics_port=arguments.metrics_port or None,
            startup_timeout_s=arguments.startup_timeout_s,
            log_path=arguments.log,
        )
    except ValueError as error:
        raise ServerError(f"{error}. See python -m build_engines serve --help.") from error
    # Service managers send SIGTERM; it ends the server as cleanly as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), TritonServer(options) as server:
        console.print(f"Serving {', '.join(built)}; Ctrl-C stops.")
        console.print(f"  gRPC    {server.grpc_url}\n  HTTP    {server.http_url}\n  metrics {server.metrics_url}")
        console.print(f"  log     {server.log_path}")
        status = server.wait()
        console.print(f"tritonserver ended with exit code {status}")
    return 0


def built_rerankers(repository: Path, rows: list[Reranker]) -> list[str]:
    """Return the names of those whose served version is installed."""
    return [row.name for row in rows if pinned_version(repository, row) in installed_versions(repository, row)]
