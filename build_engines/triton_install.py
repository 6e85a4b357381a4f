# SPDX-License-Identifier: Apache-2.0
"""Find a `tritonserver` and what it needs to run: libraries, backends, a Python for its Python backend.

Two places are looked at, in this order:

1. `tritonserver` on PATH or in /opt/tritonserver/bin, as in NVIDIA's container. It keeps its own backends.
2. The wheel nvidia-pytriton, which carries a CPU server. It is never imported, only located: importing it starts
   things and needs dependencies that this project has no use for.

The Python backend of that wheel is older than what surrounds it, in two ways that it does not report:

- It was built before NumPy 2 (python_backend pull request 384). With NumPy 2 every input reads as its first element
  and every output is empty, so it is refused beside NumPy 2.
- It embeds Python in isolated mode, which heeds neither PYTHONPATH nor PYTHONDONTWRITEBYTECODE. It does look for a
  virtual environment around the `python3` on PATH, so it gets one, made of a few links.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import site
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from build_engines.errors import ServerError

CONTAINER_BIN_DIRECTORY = "/opt/tritonserver/bin"
INSTALL_COMMAND = "pip install --no-deps nvidia-pytriton==0.7.0"

_STUB = "triton_python_backend_stub"


@dataclass(frozen=True, slots=True)
class TritonInstallation:
    """A tritonserver and where its parts are. None means: the place that the server looks at by default."""

    executable: Path
    origin: str  # for people: "PATH", or the wheel
    library_dirs: tuple[Path, ...] = ()
    backend_directory: Path | None = None
    cache_directory: Path | None = None
    python_stub: Path | None = None  # set if the stub is not inside `backend_directory` and must be joined to it
    python_packages: tuple[Path, ...] = ()  # where models import from, first wins; empty: the stub's own Python


def find_tritonserver() -> TritonInstallation:
    """The server on PATH, else the one that nvidia-pytriton carries.

    Raises ServerError if there is none, or if the running Python does not fit the one that was found.
    """
    search_path = os.pathsep.join([os.environ.get("PATH", os.defpath), CONTAINER_BIN_DIRECTORY])
    executable = shutil.which("tritonserver", path=search_path)
    if executable is not None:
        return _system_installation(Path(executable))
    package = _pytriton_package()
    if package is None:
        raise ServerError(
            f"no tritonserver: looked for `tritonserver` on PATH and in {CONTAINER_BIN_DIRECTORY}, and for the Python "
            f"package `pytriton` in {sys.prefix}. Install the CPU server with `{INSTALL_COMMAND}`, "
            "or run inside NVIDIA's tritonserver container."
        )
    return _wheel_installation(package)


def child_environment(
    installation: TritonInstallation, base: Mapping[str, str], python_bin: Path | None
) -> dict[str, str]:
    """`base` and what the server needs on top of it; `python_bin` is what `link_python` has returned."""
    environment = {
        **base,
        # A __pycache__ inside a model repository is litter that changes what is deployed.
        "PYTHONDONTWRITEBYTECODE": "1",
        # A server that loads models never asks a hub for anything.
        "HF_HUB_OFFLINE": "1",
    }
    if installation.library_dirs:
        _prepend(environment, "LD_LIBRARY_PATH", installation.library_dirs)
    if installation.python_packages:
        _prepend(environment, "PYTHONPATH", installation.python_packages)
    if python_bin is not None:
        _prepend(environment, "PATH", (python_bin,))
    return environment


def link_python(installation: TritonInstallation, target: Path) -> Path | None:
    """Make `target` a virtual environment for a stub that is deaf to PYTHONPATH, and return its folder for PATH.

    None, and nothing made, for an installation with a stub of its own.
    """
    if installation.python_stub is None:
        return None
    packages = target / "lib" / f"python{_running_version()}" / "site-packages"
    packages.mkdir(parents=True)
    lines = ["import sys; sys.dont_write_bytecode = True", *map(str, installation.python_packages)]
    (packages / "server.pth").write_text("\n".join(lines) + "\n")
    (target / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
    (target / "bin").mkdir()
    (target / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    return target / "bin"


def link_backends(installation: TritonInstallation, target: Path) -> Path | None:
    """What to pass as --backend-directory: the installation's own, or links under `target` that add the stub to it.

    The server wants the stub beside the Python backend's library; the wheel keeps one per Python version elsewhere,
    and an installed package is not ours to change.
    """
    source, stub = installation.backend_directory, installation.python_stub
    if source is None or stub is None:
        return source
    target.mkdir()
    for backend in source.iterdir():
        if backend.name != "python":
            (target / backend.name).symlink_to(backend)
    python_backend = target / "python"
    python_backend.mkdir()
    for part in (source / "python").iterdir():
        if part.name not in {"__pycache__", _STUB}:
            (python_backend / part.name).symlink_to(part)
    (python_backend / _STUB).symlink_to(stub)
    return target


def _system_installation(executable: Path) -> TritonInstallation:
    prefix = executable.resolve().parent.parent
    backends, caches = prefix / "backends", prefix / "caches"
    stub = backends / "python" / _STUB
    return TritonInstallation(
        executable=executable,
        origin=f"tritonserver on PATH ({executable})",
        backend_directory=backends if backends.is_dir() else None,
        cache_directory=caches if caches.is_dir() else None,
        # Packages of another Python would break a stub; without them it has those of its own Python.
        python_packages=_site_packages() if stub.is_file() and _built_for(stub) == _running_version() else (),
    )


def _pytriton_package() -> Path | None:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _wheel_installation(package: Path) -> TritonInstallation:
    root = package / "tritonserver"
    executable = root / "bin" / "tritonserver"
    if not os.access(executable, os.X_OK):
        raise ServerError(
            f"{executable} is missing or not executable. Install it anew with `{INSTALL_COMMAND} --force-reinstall`."
        )
    _check_numpy()
    stub = root / "python_backend_stubs" / _running_version() / _STUB
    if not stub.is_file():
        built_for = ", ".join(sorted((p.parent.name for p in root.glob(f"python_backend_stubs/*/{_STUB}")), key=len))
        raise ServerError(
            f"nvidia-pytriton in {package.parent} has Python backends for Python {built_for or 'no version'}, "
            f"and this is {_running_version()}. Use one of those, or run inside NVIDIA's tritonserver container."
        )
    return TritonInstallation(
        executable=executable,
        origin=f"the wheel nvidia-pytriton ({package})",
        library_dirs=(package.parent / "nvidia_pytriton.libs", _libpython_directory()),
        backend_directory=root / "backends",
        cache_directory=root / "caches",
        python_stub=stub,
        python_packages=_site_packages(),
    )


def _check_numpy() -> None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("numpy")
        if not version.startswith("1."):
            raise ServerError(
                f"NumPy {version} is installed, and the Python backend of nvidia-pytriton 0.7.0 reads and writes wrong "
                'tensors with NumPy 2. Run: pip install "numpy>=1.26,<2"'
            )


def _libpython_directory() -> Path:
    """The folder of the running Python's shared library, which the stub is linked with."""
    name = f"libpython{_running_version()}.so.1.0"
    library_dir = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    multiarch = str(sysconfig.get_config_var("MULTIARCH") or "")
    # A relocated Python remembers where it was built; what lies beside the interpreter comes first.
    candidates = [Path(sys.base_prefix) / "lib", library_dir, library_dir / multiarch, Path("/usr/lib") / multiarch]
    for directory in candidates:
        if (directory / name).is_file():
            return directory
    looked_at = ", ".join(dict.fromkeys(str(directory) for directory in candidates))
    raise ServerError(
        f"Triton's Python backend needs {name}, which is in none of {looked_at}. "
        f"Debian and Ubuntu have it as `apt-get install libpython{_running_version()}`; with pyenv, build Python with "
        f"PYTHON_CONFIGURE_OPTS=--enable-shared; `uv python install {_running_version()}` brings it along."
    )


def _built_for(stub: Path) -> str | None:
    """The Python version whose library `stub` is linked with."""
    match = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    return match.group(1).decode() if match else None


def _running_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _site_packages() -> tuple[Path, ...]:
    directories = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        directories.append(site.getusersitepackages())
    return tuple(path for path in map(Path, dict.fromkeys(directories)) if path.is_dir())


def _prepend(environment: dict[str, str], name: str, directories: tuple[Path, ...]) -> None:
    # An empty entry means the current folder, to the linker and to Python alike; none may arise.
    before = [entry for entry in environment.get(name, "").split(os.pathsep) if entry]
    environment[name] = os.pathsep.join([*map(str, directories), *before])
