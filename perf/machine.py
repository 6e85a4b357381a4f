# SPDX-License-Identifier: Apache-2.0
"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from build_engines.serving_code import graph_scoring


def stamp() -> str:
    """Return the command, the machine, the commit and the libraries, for the head of a result."""
    module = sys.modules["__main__"].__spec__
    command = shlex.join(["python", "-m", module.name if module else sys.argv[0], *sys.argv[1:]])
    libraries = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "tokenizers", "tritonclient"))
    machine = f"{_cpu()}, {len(os.sched_getaffinity(0))} CPUs"
    return f"$ {command}\n{machine}; Python {platform.python_version()}, {libraries}; {_commit()}"


def _cpu() -> str:
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = next((line.partition(":")[2].strip() for line in facts.splitlines() if line.startswith("model name")), "")
    # INT8 is twice as fast with it.
    return f"{model or platform.processor()} ({'with' if graph_scoring.has_vnni() else 'without'} VNNI)"


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return "commit " + subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
