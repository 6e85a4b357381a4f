# SPDX-License-Identifier: Apache-2.0
"""Run build steps: each writes one folder, is skipped while its inputs are unchanged, and says what it did."""

from __future__ import annotations

import importlib.metadata
import json
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from build_engines.errors import InstallError
from build_engines.hashing import sha256_file, sha256_value

# The libraries whose version changes what a step writes.
_TOOLS = ("numpy", "onnx", "onnxruntime", "onnxscript", "tokenizers", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class StepResult:
    """A finished step: its folder, what it reported, and the sha256 of each file it wrote."""

    folder: Path
    facts: Mapping[str, Any]
    files: Mapping[str, str]


class Steps:
    """The steps of one reranker, below `build/<name>/`."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder = folder
        self.console = console

    def run(self, name: str, inputs: Mapping[str, Any], make: Callable[[Path], dict[str, Any]]) -> StepResult:
        """Run `make` on an empty folder and keep the folder when it returns; reuse the last one for equal inputs.

        `make` writes files into the folder it is given and returns facts for the manifest. Errors pass through, and
        leave the last good folder as it was.
        """
        fingerprint = sha256_value([dict(inputs), tool_versions()])
        folder = self.folder / name
        kept = _finished(folder, fingerprint)
        if kept is not None:
            self._say(name, "unchanged, kept", kept)
            return kept
        work = self.folder / f".{name}.work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        started = time.monotonic()
        with self.console.status(f"{name} ..."):
            facts = make(work)
        seconds = time.monotonic() - started
        files = {file.name: sha256_file(file) for file in sorted(work.iterdir())}
        manifest = {
            "step": name,
            "fingerprint": fingerprint,
            "inputs": dict(inputs),
            "tools": tool_versions(),
            "seconds": round(seconds, 2),
            # Of the build's processes until now: a step that needs less than an earlier one does not show.
            "peak_memory_gib": round(
                max(map(_peak_kib, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))) / (1 << 20), 2
            ),
            "facts": facts,
            "files": files,
        }
        (work / "step.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
        result = StepResult(folder, facts, files)
        self._say(name, f"{seconds:.1f} s", result)
        return result

    def finished(self, name: str) -> StepResult:
        """Return a step as it was left, whatever it was made by; raise InstallError where it is not there whole."""
        folder = self.folder / name
        result = _finished(folder, None)
        if result is None:
            raise InstallError(f"{folder} does not hold a finished step, or a file of it has changed. Build again.")
        return result

    def _say(self, name: str, how: str, result: StepResult) -> None:
        shown = ", ".join(
            f"{key.replace('_', ' ')} {_short(value)}"
            for key, value in result.facts.items()
            if isinstance(value, int | float)
        )
        self.console.print(f"[bold]{name:9}[/bold] {how}; {shown + '; ' if shown else ''}{_relative(result.folder)}")


def tool_versions() -> dict[str, str]:
    """Return the versions of the libraries that decide what the steps write; "absent" for those not installed."""
    return {name: _version(name) for name in _TOOLS}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def code_hash(*paths: Path) -> str:
    """Return one hash of the modules that a step runs, so that a change to its code builds anew."""
    return sha256_value([sha256_file(path) for path in paths])


def _peak_kib(whose: int) -> int:
    return resource.getrusage(whose).ru_maxrss


def _finished(folder: Path, fingerprint: str | None) -> StepResult | None:
    try:
        manifest = json.loads((folder / "step.json").read_text(encoding="utf-8"))
        same = fingerprint in (None, manifest["fingerprint"])
        whole = all(sha256_file(folder / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return StepResult(folder, manifest["facts"], manifest["files"]) if same and whole else None


def _short(value: float) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}"


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
