# SPDX-License-Identifier: Apache-2.0
"""What a server is told when it starts: options, ports, and the command line made of them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from build_engines.errors import ServerError
from build_engines.triton_install import TritonInstallation

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

# Runs in a fresh Python, which then becomes the server: unlike code between fork and exec, it may allocate memory while
# other threads of ours hold locks. Signals that we ignore would stay ignored in the server, so they are set back.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent died before the server began")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What to serve and where. A port that is None becomes a free one. Raises ValueError if it cannot be meant."""

    repository: Path
    models: tuple[str, ...]  # loading an ensemble loads its steps
    config_name: str | None = None  # "cpu": configs/cpu.pbtxt in place of config.pbtxt, for models that have one
    host: str = "127.0.0.1"
    grpc_port: int | None = None
    http_port: int | None = None
    metrics_port: int | None = None
    startup_timeout_s: float = 120.0
    shutdown_timeout_s: float = 30.0
    log_path: Path | None = None  # None: a temporary file that goes when the TritonServer does
    log_verbose: int = 0
    extra_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_names()
        self._check_ports()
        if self.startup_timeout_s <= 0 or self.shutdown_timeout_s <= 0:
            raise ValueError(
                f"timeouts are seconds above 0, got startup_timeout_s={self.startup_timeout_s}, "
                f"shutdown_timeout_s={self.shutdown_timeout_s}"
            )
        if self.log_verbose < 0:
            raise ValueError(f"log_verbose is 0 (off) or more, got {self.log_verbose}")

    @property
    def connect_host(self) -> str:
        """Where a client on this machine reaches the server."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host  # noqa: S104 compared, not bound

    def _check_names(self) -> None:
        if not self.models:
            raise ValueError("models names at least one model; a server without any is never ready for anything")
        for name in (*self.models, *(() if self.config_name is None else (self.config_name,))):
            if not _NAME.fullmatch(name):
                raise ValueError(f"names are letters, digits, '_', '-' and '.', got {name!r}")
        if not self.host or ":" in self.host or self.host != self.host.strip():
            raise ValueError(f"host is an IPv4 address or a host name, got {self.host!r}")

    def _check_ports(self) -> None:
        ports = [port for port in (self.grpc_port, self.http_port, self.metrics_port) if port is not None]
        if not all(1 <= port <= 65535 for port in ports) or len(set(ports)) < len(ports):
            raise ValueError(f"fixed ports are distinct numbers of 1 to 65535, got {ports}; None is a free port")


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the server listens."""

    grpc: int
    http: int
    metrics: int


def choose_ports(options: ServerOptions) -> Ports:
    """The fixed ports, and free ones for the rest; raise ServerError if a fixed one cannot be listened on."""
    # All stay bound until the last is chosen, or one port could be given out twice.
    with contextlib.ExitStack() as bound:
        return Ports(
            grpc=_bind(bound, options.host, options.grpc_port, "grpc_port"),
            http=_bind(bound, options.host, options.http_port, "http_port"),
            metrics=_bind(bound, options.host, options.metrics_port, "metrics_port"),
        )


def server_command(
    installation: TritonInstallation,
    options: ServerOptions,
    ports: Ports,
    *,
    identity: str,
    backend_directory: Path | None,
) -> list[str]:
    """The command line; every flag in it exists since 2.51 at the latest."""
    command = [
        str(installation.executable),
        f"--id={identity}",
        f"--model-repository={options.repository.resolve()}",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in options.models),
        # Mistakes in a repository are to stop the server, not to be guessed around.
        "--disable-auto-complete-config",
        "--exit-on-error=true",
        "--strict-readiness=true",
        # Half of our patience for requests in flight, so that the other half is left for unloading.
        f"--exit-timeout-secs={max(1, int(options.shutdown_timeout_s / 2))}",
        f"--backend-config=python,shm-region-prefix-name={identity}",
        f"--log-verbose={options.log_verbose}",
    ]
    for service, port in (("grpc", ports.grpc), ("http", ports.http), ("metrics", ports.metrics)):
        command += [f"--allow-{service}=true", f"--{service}-address={options.host}", f"--{service}-port={port}"]
    if options.config_name is not None:
        command.append(f"--model-config-name={options.config_name}")
    if backend_directory is not None:
        command.append(f"--backend-directory={backend_directory}")
    if installation.cache_directory is not None:
        command.append(f"--cache-directory={installation.cache_directory}")
    return [*command, *options.extra_args]


def dying_with_parent(command: list[str]) -> list[str]:
    """`command`, started so that the kernel sends it SIGTERM when the thread that starts it is gone."""
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


def _bind(bound: contextlib.ExitStack, host: str, port: int | None, field: str) -> int:
    listener = bound.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    # The server sets it too; without it a port closed a moment ago would seem taken.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port or 0))
    except OSError as error:
        why = "is already in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {error.strerror}"
        where = f"{host}:{port}" if port is not None else host
        what = field.removesuffix("_port")
        raise ServerError(
            f"{where} {why}. Choose another address or port for {what}, or let a free port be chosen."
        ) from error
    return int(listener.getsockname()[1])
