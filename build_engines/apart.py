# SPDX-License-Identifier: Apache-2.0
"""Run one function in a process of its own, so that its memory is given back when it is done.

PyTorch's exporter keeps the weights of the last model that it exported, and onnxruntime's quantiser leaves a heap of
the same size: gigabytes that the later steps of a large model's build would miss.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from build_engines.errors import ExportError

P = ParamSpec("P")
R = TypeVar("R")

# Starting Python and importing PyTorch takes seconds; below this a build does not need the memory.
LARGE_BYTES = 1 << 30

_CHILD = "from build_engines.apart import child; child()"


def run_apart_if_large(weights: Path, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function of a module: in a process of its own where the folder `weights` holds LARGE_BYTES of them."""
    files = [file for kind in ("*.safetensors", "*.onnx*") for file in weights.glob(kind)]
    if sum(file.stat().st_size for file in files) < LARGE_BYTES:
        return function(*args, **kwargs)
    return run_apart(function, *args, **kwargs)


def run_apart(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return what a function of a module returns, or raise what it raises; ExportError where its process is killed."""
    # Not multiprocessing: its children import the caller's main module again, which a script must be written for.
    process = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=pickle.dumps((function, args, kwargs)),
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    if process.returncode != 0:
        killed = process.returncode == -signal.SIGKILL
        raise ExportError(
            f"The process of {function.__module__}.{function.__name__} ended with status {process.returncode}"
            + (": the memory of this machine was not enough, most likely. Build on a larger one." if killed else ".")
        )
    result, error = pickle.loads(process.stdout)  # noqa: S301 - from our own child
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def child() -> None:
    """The other end: read the call, make it, write what came of it."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not mix with the answer
    function, args, kwargs = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent
    result, error = None, None
    try:
        result = function(*args, **kwargs)
    except Exception as raised:  # it is raised again by the parent
        error = raised
    try:
        answer = pickle.dumps((result, error))
        pickle.loads(answer)  # noqa: S301 - what some libraries raise cannot be made again
    except Exception:
        answer = pickle.dumps((None, ExportError(f"{type(error).__name__}: {error}")))
    with answers:
        answers.write(answer)
