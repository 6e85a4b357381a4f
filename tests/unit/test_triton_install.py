# SPDX-License-Identifier: Apache-2.0
"""Finding a tritonserver, its environment, and options that cannot be meant; nothing is started."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from build_engines import triton_install
from build_engines.triton_server import ServerError, ServerOptions, TritonInstallation, find_tritonserver


def test_without_any_installation_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"pip install --no-deps nvidia-pytriton==0\.7\.0") as caught:
        find_tritonserver()
    assert "PATH" in str(caught.value)
    assert "container" in str(caught.value)


def test_a_server_on_path_comes_first_and_keeps_its_own_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = tmp_path / "bin" / "tritonserver"
    stub = tmp_path / "backends" / "python" / "triton_python_backend_stub"
    for path, content in ((executable, b"#!/bin/sh\n"), (stub, b"\0libpython3.1.so.1.0\0")):
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    executable.chmod(0o755)
    monkeypatch.setenv("PATH", str(executable.parent))
    found = find_tritonserver()
    assert (found.executable, found.backend_directory) == (executable, tmp_path / "backends")
    assert triton_install.link_backends(found, tmp_path / "unused") == tmp_path / "backends"
    # Built for a Python that is not this one: our packages would break it.
    environment = triton_install.child_environment(found, {"PATH": "/bin", "HOME": "/root"}, None)
    assert environment == {"PATH": "/bin", "HOME": "/root", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}


def test_the_environment_keeps_what_was_there_and_never_adds_the_current_folder() -> None:
    found = TritonInstallation(Path("tritonserver"), "test", (Path("/libs"),), python_packages=(Path("/packages"),))
    environment = triton_install.child_environment(found, {"PATH": "/bin", "PYTHONPATH": ""}, Path("/scratch/bin"))
    assert environment["PATH"] == "/scratch/bin:/bin"
    assert environment["PYTHONPATH"] == "/packages"
    assert environment["LD_LIBRARY_PATH"] == "/libs"


def test_a_wheel_beside_numpy_2_is_refused_with_the_command_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "2.4.6")
    with pytest.raises(ServerError, match=re.escape('pip install "numpy>=1.26,<2"')):
        triton_install._check_numpy()


def test_a_python_without_a_shared_library_is_told_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path / "nowhere"))
    with pytest.raises(ServerError, match=r"needs libpython3\.\d+\.so\.1\.0, which is in none of .*nowhere"):
        triton_install._libpython_directory()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"models": ()}, "at least one model"),
        ({"models": ("*",)}, r"names are letters.*'\*'"),
        ({"models": ("../echo",)}, "names are letters"),
        ({"config_name": ""}, "names are letters"),
        ({"host": "::1"}, "host is an IPv4 address"),
        ({"grpc_port": 0}, "distinct numbers of 1 to 65535"),
        ({"grpc_port": 8001, "http_port": 8001}, "distinct numbers"),
        ({"startup_timeout_s": 0.0}, "seconds above 0"),
        ({"log_verbose": -1}, "log_verbose is 0"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerOptions(**{"repository": Path("models"), "models": ("echo",), **wrong})
