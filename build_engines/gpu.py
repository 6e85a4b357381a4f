# SPDX-License-Identifier: Apache-2.0
"""The GPU and the TensorRT of this machine, asked through their C libraries: no CUDA package for Python is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# A function that opens a shared library by name, and raises OSError where the loader finds none.
Loader = Callable[[str], Any]

_DRIVER = "libcuda.so.1"
# Newest first. Before 10 the number that the library returns is put together differently.
_TENSORRT_LIBRARIES = ("libnvinfer.so.11", "libnvinfer.so.10")

# CUdevice_attribute in cuda.h: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device: its name, its compute capability such as "9.0", and its whole memory."""

    name: str
    compute_capability: str
    memory_bytes: int


class _DriverError(Exception):
    """A driver call has returned something else than CUDA_SUCCESS."""


def find_gpu(index: int = 0, load: Loader = ctypes.CDLL) -> Gpu | None:
    """Return device `index` as the driver counts; None where there is no driver, or it shows no such device."""
    try:
        driver = load(_DRIVER)
    except OSError:
        return None
    try:
        return _ask(driver, index)
    except _DriverError:
        return None


def installed_tensorrt(load: Loader = ctypes.CDLL) -> str | None:
    """Return the version of the libnvinfer that the loader finds, such as "11.4.0"; None where it finds none."""
    for name in _TENSORRT_LIBRARIES:
        try:
            library = load(name)
        except OSError:
            continue
        number = int(library.getInferLibVersion())
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return None


def _ask(driver: Any, index: int) -> Gpu | None:
    _call(driver.cuInit, ctypes.c_uint(0))
    count, device = ctypes.c_int(), ctypes.c_int()
    _call(driver.cuDeviceGetCount, ctypes.byref(count))
    if not 0 <= index < count.value:
        return None
    _call(driver.cuDeviceGet, ctypes.byref(device), ctypes.c_int(index))
    name = ctypes.create_string_buffer(256)
    _call(driver.cuDeviceGetName, name, ctypes.c_int(len(name)), device)
    capability = [ctypes.c_int(), ctypes.c_int()]
    for value, attribute in zip(capability, (_CAPABILITY_MAJOR, _CAPABILITY_MINOR), strict=True):
        _call(driver.cuDeviceGetAttribute, ctypes.byref(value), ctypes.c_int(attribute), device)
    memory = ctypes.c_size_t()
    # The call without _v2 has 32-bit sizes.
    _call(driver.cuDeviceTotalMem_v2, ctypes.byref(memory), device)
    return Gpu(
        name=name.value.decode(errors="replace"),
        compute_capability=".".join(str(part.value) for part in capability),
        memory_bytes=memory.value,
    )


def _call(function: Callable[..., int], *arguments: Any) -> None:
    if function(*arguments) != 0:
        raise _DriverError
