# SPDX-License-Identifier: Apache-2.0
"""`TritonServer` against a real tritonserver with small Python-backend models written for these tests."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tritonclient.grpc as triton

from build_engines import triton_options, triton_server
from build_engines.triton_server import (
    ServerError,
    ServerOptions,
    TritonInstallation,
    TritonServer,
)
from tests.server.echo_models import infer, loaded_models, write_repository

START_AND_STAY = """
import sys, time
from pathlib import Path
from build_engines.triton_server import ServerOptions, TritonServer

server = TritonServer(ServerOptions(repository=Path(sys.argv[1]), models=("echo",)))
server.start()
print(server.pid, server.shared_memory_prefix, flush=True)
time.sleep(600)
"""

Start = Callable[..., TritonServer]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    repository = tmp_path / "models"
    write_repository(repository)
    return repository


@pytest.fixture
def start(installation: TritonInstallation, repository: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as servers:

        def start(*models: str, **options: Any) -> TritonServer:
            server = TritonServer(ServerOptions(repository=repository, models=models, **options), installation)
            servers.callback(server.stop)
            server.start()
            return server

        yield start


def family(pid: int) -> list[psutil.Process]:
    server = psutil.Process(pid)
    return [server, *server.children(recursive=True)]


def assert_all_end(processes: list[psutil.Process], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while alive := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.05)


def shared_memory(prefix: str) -> list[Path]:
    return [Path("/dev/shm", name) for name in os.listdir("/dev/shm") if name.startswith(prefix)]  # noqa: S108


def taken_port() -> tuple[socket.socket, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


def test_an_ensemble_brings_its_steps_and_nothing_else_and_answers(start: Start) -> None:
    server = start("echo_ensemble")
    assert loaded_models(server) == {"echo_ensemble", "echo"}
    assert infer(server, "echo_ensemble", [1.5, -2.0]) == [1.5, -2.0]
    with urllib.request.urlopen(server.metrics_url, timeout=5) as response:  # noqa: S310 the address is our own
        assert 'nv_inference_request_success{model="echo_ensemble"' in response.read().decode()
    assert "Started GRPCInferenceService" in server.log_tail()
    assert len(server.log_tail(lines=3).splitlines()) == 3


def test_config_name_takes_the_named_config_where_a_model_has_one(start: Start) -> None:
    server = start("echo_ensemble", config_name="cpu")
    assert infer(server, "echo_ensemble", [1.5]) == [15.0]


def test_stop_leaves_no_process_no_shared_memory_and_no_litter_in_the_repository(
    start: Start, repository: Path
) -> None:
    before = sorted(repository.rglob("*"))
    server = start("echo_ensemble")
    processes = family(server.pid)
    assert len(processes) >= 2, "a server and the backend of echo"
    assert shared_memory(server.shared_memory_prefix), "the prefix reached the Python backend"
    infer(server, "echo", [1.0])
    server.stop()
    server.stop()
    assert not server.is_running()
    assert server.wait() == 0
    assert_all_end(processes, within_s=1.0)
    assert not shared_memory(server.shared_memory_prefix)
    assert sorted(repository.rglob("*")) == before


def test_a_stopped_server_starts_again(start: Start) -> None:
    server = start("echo")
    with pytest.raises(ServerError, match="already running"):
        server.start()
    server.stop()
    server.start()
    assert infer(server, "echo", [3.0]) == [3.0]


def test_two_servers_run_side_by_side(start: Start) -> None:
    one, two = start("echo"), start("echo", config_name="cpu")
    assert infer(one, "echo", [1.0]) == [1.0]
    assert infer(two, "echo", [1.0]) == [10.0]
    one.stop()
    assert two.is_running()
    assert infer(two, "echo", [2.0]) == [20.0]


def test_a_broken_model_is_reported_at_once_with_its_cause_first(start: Start) -> None:
    began = time.monotonic()
    with pytest.raises(ServerError) as caught:
        start("echo", "broken", startup_timeout_s=120)
    assert time.monotonic() - began < 30
    first, second, *_ = str(caught.value).splitlines()
    assert first == "tritonserver ended with exit code 1 while starting"
    assert second.startswith("failed to load 'broken' version 1: ")
    assert "the weights are upside down" in second


def test_an_unreadable_config_is_reported_with_its_line(start: Start, repository: Path) -> None:
    (repository / "echo" / "config.pbtxt").write_text('name: "echo"\nbakcend: "python"\n')
    with pytest.raises(ServerError, match=r'2:\d+: Message type "inference.ModelConfig" has no field named "bakcend"'):
        start("echo")


def test_a_model_that_is_not_in_the_repository_is_named_before_anything_starts(start: Start) -> None:
    with pytest.raises(ServerError, match=r"no model 'ehco' in .*models"):
        start("ehco")


def test_a_startup_that_takes_too_long_is_stopped(installation: TritonInstallation, repository: Path) -> None:
    options = ServerOptions(
        repository=repository, models=("echo", "slow"), startup_timeout_s=3.0, shutdown_timeout_s=2.0
    )
    server = TritonServer(options, installation)
    with pytest.raises(ServerError, match=r"not ready after 3 s(?s:.*)loading: slow:1"):
        server.start()
    assert not server.is_running()
    assert not shared_memory(server.shared_memory_prefix)


def test_a_server_that_is_killed_is_noticed_and_what_it_left_is_removed(start: Start) -> None:
    server = start("echo")
    processes = family(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(ServerError, match=r"ended by signal 9 \(Killed\)(?s:.*)Started Metrics Service"):
        server.wait()
    assert not server.is_running()
    assert_all_end(processes, within_s=1.0)
    assert not shared_memory(server.shared_memory_prefix)
    server.stop()


def test_a_backend_that_dies_in_a_request_does_not_outlive_stop(start: Start) -> None:
    # Triton waits for the lost request until half of this has passed.
    server = start("crashing", shutdown_timeout_s=6.0)
    processes = family(server.pid)
    with pytest.raises(triton.InferenceServerException):
        infer(server, "crashing", [1.0])
    assert server.is_running()
    server.stop()
    assert_all_end(processes, within_s=1.0)
    assert not shared_memory(server.shared_memory_prefix)


def test_a_server_that_does_not_heed_is_killed(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start("echo", shutdown_timeout_s=1.0)
    processes = family(server.pid)
    os.kill(server.pid, signal.SIGSTOP)
    with caplog.at_level(logging.WARNING):
        server.stop()
    assert "killing it" in caplog.text
    assert_all_end(processes, within_s=1.0)
    assert not shared_memory(server.shared_memory_prefix)


def test_wait_returns_when_another_thread_stops_the_server(start: Start) -> None:
    server = start("echo")
    stopper = threading.Timer(0.5, server.stop)
    stopper.start()
    assert server.wait() == 0
    stopper.join()


def test_a_parent_that_is_killed_takes_the_server_with_it(installation: TritonInstallation, repository: Path) -> None:
    command = [sys.executable, "-c", START_AND_STAY, str(repository)]
    # Killed, it cannot remove its temporary files.
    environment = {**os.environ, "TMPDIR": str(repository.parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid, prefix = parent.stdout.readline().split()
        processes = family(int(pid))
        parent.kill()
    assert_all_end(processes, within_s=15.0)
    assert not shared_memory(prefix)


@pytest.mark.parametrize("field", ["grpc_port", "http_port", "metrics_port"])
def test_a_fixed_port_that_is_taken_is_named_before_anything_starts(start: Start, field: str) -> None:
    listener, port = taken_port()
    what = rf"127.0.0.1:{port} is already in use. Choose another address or port for {field.removesuffix('_port')}"
    with listener, pytest.raises(ServerError, match=what):
        start("echo", **{field: port})


def test_a_free_port_lost_to_another_process_is_chosen_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    other = start("echo")
    stolen = other._listening
    real = triton_options.choose_ports
    offers = iter([stolen])
    # The other server answers on that very HTTP port and has the same model ready, which must not mislead us.
    monkeypatch.setattr(triton_server, "choose_ports", lambda options: next(offers, None) or real(options))
    server = start("echo", config_name="cpu")
    assert server.grpc_url != other.grpc_url
    assert infer(server, "echo", [1.0]) == [10.0]


def test_a_fixed_port_lost_during_the_start_is_named(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    stolen = start("echo")._listening
    monkeypatch.setattr(triton_server, "choose_ports", lambda options: stolen)
    with pytest.raises(ServerError, match=f"port {stolen.grpc} was taken by another process while"):
        start("echo", grpc_port=stolen.grpc)


def test_the_log_goes_where_it_is_asked_to(start: Start, tmp_path: Path) -> None:
    kept = start("echo", log_path=tmp_path / "logs" / "server.log", log_verbose=1)
    kept.stop()
    assert "Started HTTPService" in (tmp_path / "logs" / "server.log").read_text()


def test_properties_need_a_start(installation: TritonInstallation, repository: Path) -> None:
    server = TritonServer(ServerOptions(repository=repository, models=("echo",)), installation)
    assert not server.is_running()
    assert server.log_tail() == ""
    server.stop()
    for name in ("grpc_url", "http_url", "metrics_url", "pid"):
        with pytest.raises(ServerError, match="not been started"):
            getattr(server, name)
    with pytest.raises(ServerError, match="not been started"):
        server.wait()


def test_the_temporary_log_lives_as_long_as_the_object(installation: TritonInstallation) -> None:
    server = TritonServer(ServerOptions(repository=Path(), models=("echo",)), installation)
    scratch = server.log_path.parent
    assert scratch.is_dir()
    del server
    gc.collect()
    assert not scratch.exists()
