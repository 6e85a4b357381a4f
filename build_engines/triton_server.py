# SPDX-License-Identifier: Apache-2.0
"""Run a real `tritonserver` on a model repository, and be sure that it ends.

    with TritonServer(ServerOptions(repository=Path("model_repository"), models=("light_reranker",))) as server:
        reranker = connect(server.grpc_url)

How its end is made certain:

- `stop()` sends SIGINT once, waits, then kills the server's process group, Python backends included.
- A server whose parent dies gets SIGTERM from the kernel. The kernel takes the *thread* that called `start()` for the
  parent: call it from a thread that lives as long as the server shall.
- Shared memory carries a name of this server's own, so what a killed server leaves is found and removed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from build_engines.errors import ServerError
from build_engines.triton_install import (
    TritonInstallation,
    child_environment,
    find_tritonserver,
    link_backends,
    link_python,
)
from build_engines.triton_options import Ports, ServerOptions, choose_ports, dying_with_parent, server_command

__all__ = ["ServerError", "ServerOptions", "TritonInstallation", "TritonServer", "find_tritonserver"]

_log = logging.getLogger(__name__)

_POLL_S = 0.1
# A lost race for a port is rare; five in a row mean something else.
_ATTEMPTS = 5
# What SIGKILL takes at most, unless a process is stuck in the kernel.
_KILL_TIMEOUT_S = 10.0
_TAIL_BYTES = 256 * 1024
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 where POSIX shared memory lies on Linux, not a temporary file

_PORT_TAKEN = re.compile(r"failed to start \w+ service: Unavailable - Socket '\S*:(\d+)' already in use")
# Where Triton names a cause, best first: what a stub says is all there is while Triton still waits for that stub.
_CAUSES = (
    re.compile(r"failed to load '[^']*' version \d+: .*|Poll failed for model directory .*|\[libprotobuf ERROR .*"),
    re.compile(r"Failed to (?:pre)?initialize Python stub: .*"),
    re.compile(r"(?<=^error: ).*", re.MULTILINE),
)


class TritonServer:
    """A running tritonserver, as a context manager or with `start()` and `stop()`."""

    def __init__(self, options: ServerOptions, installation: TritonInstallation | None = None) -> None:
        """Start nothing yet. Raises ServerError if `installation` is None and no tritonserver is found."""
        self.options = options
        self._installation = find_tritonserver() if installation is None else installation
        # Also the prefix of its shared memory; 12 digits keep it short, names there are limited.
        self._identity = f"rerank-{uuid.uuid4().hex[:12]}"
        self._scratch = Path(tempfile.mkdtemp(prefix=f"{self._identity}-"))
        # Not at stop(): the log is most wanted afterwards.
        weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        self._backends = link_backends(self._installation, self._scratch / "backends")
        self._python_bin = link_python(self._installation, self._scratch / "python")
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: Ports | None = None
        self._stopping = False
        self._reaping = threading.Lock()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def grpc_url(self) -> str:
        """Host and port for gRPC clients."""
        return f"{self.options.connect_host}:{self._listening.grpc}"

    @property
    def http_url(self) -> str:
        """Host and port for HTTP clients."""
        return f"{self.options.connect_host}:{self._listening.http}"

    @property
    def metrics_url(self) -> str:
        """The address to scrape."""
        return f"http://{self.options.connect_host}:{self._listening.metrics}/metrics"

    @property
    def pid(self) -> int:
        """The server's process; its group has the same number."""
        return self._started.pid

    @property
    def shared_memory_prefix(self) -> str:
        """How the names of this server's files in /dev/shm begin."""
        return self._identity

    @property
    def log_path(self) -> Path:
        """The file that everything the server prints goes to."""
        return self.options.log_path or self._scratch / "tritonserver.log"

    def log_tail(self, lines: int = 40) -> str:
        """The last `lines` lines of the log; empty if there is none yet."""
        return "\n".join(self._log_text().splitlines()[-lines:])

    def is_running(self) -> bool:
        """Whether the server's process is alive."""
        return self._process is not None and self._exit_code() is None

    def start(self) -> None:
        """Start the server and return once every model is ready.

        Raises ServerError, with the cause and the end of the log and nothing left running, if a fixed port is taken, a
        model does not load, the server dies, or `startup_timeout_s` passes.
        """
        if self.is_running():
            raise ServerError(f"tritonserver (pid {self.pid}) is already running; stop() it before another start()")
        for name in self.options.models:
            if not (self.options.repository / name).is_dir():
                raise ServerError(f"no model {name!r} in {self.options.repository.resolve()}")
        for _ in range(_ATTEMPTS):
            self._ports = choose_ports(self.options)
            self._spawn(self._ports)
            try:
                if self._await_ready():
                    return
            except BaseException:
                self.stop()
                raise
        raise ServerError(f"free ports were taken by others {_ATTEMPTS} times in a row\n{self._report()}")

    def stop(self) -> None:
        """End the server and everything it started; a second call does nothing."""
        if self._process is None:
            return
        self._stopping = True
        try:
            if self._exit_code() is None:
                os.kill(self._process.pid, signal.SIGINT)
                self._await_exit(self.options.shutdown_timeout_s)
        finally:
            # Also reached by a second Ctrl-C, which wants the end now.
            if self._exit_code() is None:
                _log.warning("tritonserver (pid %d) did not end in time, killing it", self._process.pid)
                _kill_group(self._process.pid)
                self._await_exit(_KILL_TIMEOUT_S)

    def wait(self) -> int:
        """Block until the server ends and return its exit code.

        Raises ServerError, with the end of the log, if it fails without having been told to stop.
        """
        pid = self._started.pid
        while (code := self._exit_code()) is None:
            time.sleep(_POLL_S)
        if code != 0 and not self._stopping:
            raise ServerError(f"tritonserver (pid {pid}) {_ending(code)}\n{self._report()}")
        return code

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server has not been started")
        return self._process

    @property
    def _listening(self) -> Ports:
        if self._ports is None:
            raise ServerError("the server has not been started; its ports are chosen by start()")
        return self._ports

    def _spawn(self, ports: Ports) -> None:
        command = server_command(
            self._installation, self.options, ports, identity=self._identity, backend_directory=self._backends
        )
        self._stopping = False
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.write_bytes(b"")
        # Appending: server and backends write on their own, and none may leave a hole in the file.
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                dying_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(self._installation, os.environ, self._python_bin),
                # Ctrl-C in a terminal goes to the foreground group; the server hears of it from stop() alone.
                start_new_session=True,
            )
        _log.info("tritonserver (pid %d) from %s, log %s", self.pid, self._installation.origin, self.log_path)

    def _await_ready(self) -> bool:
        """True once all models are ready, False if a port that we chose was lost to another process."""
        deadline = time.monotonic() + self.options.startup_timeout_s
        while (code := self._exit_code()) is None:
            missing = self._unready()
            if not missing:
                _log.info("tritonserver is ready: gRPC %s, HTTP %s", self.grpc_url, self.http_url)
                return True
            if time.monotonic() > deadline:
                self.stop()
                waited = f"not ready after {self.options.startup_timeout_s:g} s, waiting for {', '.join(missing)}"
                raise ServerError(f"tritonserver was {waited}\n{self._report()}")
            time.sleep(_POLL_S)
        taken = _PORT_TAKEN.search(self._log_text())
        if taken is None:
            raise ServerError(f"tritonserver {_ending(code)} while starting\n{self._report()}")
        if int(taken.group(1)) in {self.options.grpc_port, self.options.http_port, self.options.metrics_port}:
            raise ServerError(f"port {taken.group(1)} was taken by another process while tritonserver started")
        _log.info("port %s was taken by another process, choosing again", taken.group(1))
        return False

    def _unready(self) -> list[str]:
        """What the server does not answer for yet."""
        connection = http.client.HTTPConnection(self.options.connect_host, self._listening.http, timeout=1.0)
        metrics = (self.options.connect_host, self._listening.metrics)
        with contextlib.closing(connection):
            try:
                # Another server may hold the port that ours is about to fail on, with models of the same names.
                if json.loads(_get(connection, "/v2")[1]).get("name") != self._identity:
                    return ["this server's own answer over HTTP"]
                missing = [m for m in self.options.models if _get(connection, f"/v2/models/{m}/ready")[0] != 200]
                # Metrics are the last service to be started.
                with socket.create_connection(metrics, timeout=1.0):
                    return missing
            except (OSError, http.client.HTTPException, ValueError):
                return ["an answer over HTTP", *self.options.models]

    def _exit_code(self) -> int | None:
        """The exit code, or None while the server runs; whoever sees its end first also removes what it left."""
        process = self._started
        with self._reaping:
            if process.returncode is None:
                ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None:
                    return None
                # Not reaped yet, so the number still is this group's: backends that outlived the server end here.
                _kill_group(process.pid)
                process.wait()
                for region in _SHARED_MEMORY.glob(f"{self._identity}*"):
                    region.unlink(missing_ok=True)
            return process.returncode

    def _await_exit(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._exit_code() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _log_text(self) -> str:
        if not self.log_path.is_file():
            return ""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace")

    def _report(self) -> str:
        """The causes that the log names, then its end without the tables that Triton prints."""
        text = self._log_text()
        causes = next(filter(None, (pattern.findall(text) for pattern in _CAUSES)), [])
        readable = [cause.rstrip('"').replace("\\n", "\n    ").rstrip() for cause in dict.fromkeys(causes)]
        lines = [line for line in text.splitlines() if line and not line.startswith(("|", "+"))]
        return "\n".join([*readable, f"--- end of {self.log_path}", *lines[-40:]])


def _get(connection: http.client.HTTPConnection, path: str) -> tuple[int, bytes]:
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read()


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _ending(code: int) -> str:
    return f"was ended by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with exit code {code}"
