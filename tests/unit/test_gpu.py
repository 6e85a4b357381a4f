# SPDX-License-Identifier: Apache-2.0
"""A GPU and a TensorRT library are recognised through libraries of C, compiled here, that answer like NVIDIA's."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from build_engines.gpu import Gpu, Loader, find_gpu, installed_tensorrt

# Two devices; the size of the memory does not fit into 32 bits, and handles are not indices.
DRIVER = """
#include <stddef.h>
#include <string.h>
#ifndef INIT
#define INIT 0
#endif
static int ready;
int cuInit(unsigned flags) { ready = flags == 0 && INIT == 0; return INIT; }
int cuDeviceGetCount(int *count) { *count = 2; return ready ? 0 : 3; }
int cuDeviceGet(int *device, int index) { *device = 40 + index; return index < 0 || index > 1 ? 101 : 0; }
int cuDeviceGetName(char *name, int size, int device) {
  const char *of = device == 41 ? "NVIDIA L4" : "NVIDIA H200";
  if (size < (int)strlen(of) + 1) return 1;
  strcpy(name, of);
  return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  if (attribute == 75) *value = device == 41 ? 8 : 9;
  else if (attribute == 76) *value = device == 41 ? 9 : 0;
  else return 1;
  return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) {
  *bytes = device == 41 ? 23034ul << 20 : 143771ul << 20;
  return 0;
}
"""

Compile = Callable[..., Any]


@pytest.fixture
def compiled(tmp_path: Path) -> Compile:
    """Compile C source and open the library."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc or clang) to make the libraries with")

    def library(source: str, *flags: str) -> Any:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.so"
        command = [compiler, "-shared", "-fPIC", *flags, "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=source, text=True, check=True)
        return ctypes.CDLL(str(path))

    return library


def loader(**libraries: Any) -> Loader:
    """Open only these: `cuda` for libcuda.so.1, `nvinfer_11` for libnvinfer.so.11."""
    names = {"libcuda.so.1": "cuda", "libnvinfer.so.11": "nvinfer_11", "libnvinfer.so.10": "nvinfer_10"}

    def load(name: str) -> Any:
        if names[name] not in libraries:
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        return libraries[names[name]]

    return load


def test_a_gpu_is_known_by_name_capability_and_whole_memory(compiled: Compile) -> None:
    load = loader(cuda=compiled(DRIVER))
    assert find_gpu(load=load) == Gpu("NVIDIA H200", "9.0", 143771 << 20)
    assert find_gpu(1, load) == Gpu("NVIDIA L4", "8.9", 23034 << 20)


def test_a_device_that_is_not_there_is_none(compiled: Compile) -> None:
    load = loader(cuda=compiled(DRIVER))
    assert find_gpu(2, load) is None
    assert find_gpu(-1, load) is None


def test_a_machine_without_a_driver_has_no_gpu() -> None:
    assert find_gpu(load=loader()) is None


def test_a_driver_that_sees_no_device_has_no_gpu(compiled: Compile) -> None:
    # CUDA_ERROR_NO_DEVICE, as in a container without --gpus.
    assert find_gpu(load=loader(cuda=compiled(DRIVER, "-DINIT=100"))) is None


@pytest.mark.parametrize(
    ("number", "version"), [(110400, "11.4.0"), (101601, "10.16.1"), (101303, "10.13.3"), (100000, "10.0.0")]
)
def test_the_version_of_tensorrt_is_decoded(compiled: Compile, number: int, version: str) -> None:
    library = compiled(f"int getInferLibVersion(void) {{ return {number}; }}")
    assert installed_tensorrt(loader(nvinfer_10=library)) == version


def test_the_newer_of_two_libraries_counts(compiled: Compile) -> None:
    new, old = (compiled(f"int getInferLibVersion(void) {{ return {number}; }}") for number in (110400, 101601))
    assert installed_tensorrt(loader(nvinfer_11=new, nvinfer_10=old)) == "11.4.0"


def test_a_machine_without_tensorrt_has_no_version() -> None:
    assert installed_tensorrt(loader()) is None
