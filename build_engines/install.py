# SPDX-License-Identifier: Apache-2.0
"""Step `install`: built files -> the next version of a tokenizer and a scorer, each put in place by one rename."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from build_engines.configs import pinned_version, write_configs
from build_engines.errors import InstallError
from build_engines.places import SCORER_CODE, TOKENIZER_CODE
from build_engines.plan_check import check_row, target_of
from build_engines.table import Reranker

MANIFEST = "manifest.json"
# What a scorer loads; weights of more than 2 GB lie beside an ONNX graph.
_GRAPHS = {"cpu": "model.onnx*", "gpu": "model.plan"}


@dataclass(frozen=True, slots=True)
class Installed:
    """Where a build ended up. `live` tells whether the ensemble serves this version."""

    version: int
    live: bool
    new: bool

    def say(self, console: Console, reranker: Reranker, repository: Path) -> None:
        """Tell where the build ended up, and how it is served where it is not yet."""
        verb = "new" if self.new else "already there"
        console.print(f"[bold]install  [/bold] version {self.version} ({verb}); {repository}")
        if not self.live:
            console.print(
                f"          {reranker.name} serves another version; to serve this one: python -m build_engines pin "
                f"{reranker.name} {self.version}"
            )


def install(
    repository: Path, reranker: Reranker, *, pairing: Path, graph: Path, manifest: Mapping[str, Any]
) -> Installed:
    """Install a tokenizer and a scorer as one version; an equal one that is already there is kept.

    `manifest` names the hashes of every file; it is written last, so that a folder with a manifest is whole. Raises
    EngineError for a plan that the row's config.pbtxt cannot serve.
    """
    if target_of(manifest) == "gpu":
        check_row(manifest, reranker)
    live = pinned_version(repository, reranker)
    versions = installed_versions(repository, reranker)
    for version in versions:
        installed = read_manifest(repository, reranker, version)
        if _same(installed, manifest) and _same_code(repository, reranker, version):
            told = ("report", "prompt", "verdict")  # verified anew, on other pairs, or asked otherwise in equal ids
            if any(installed.get(key) != manifest.get(key) for key in told):
                for model in (reranker.tokenizer, reranker.scorer):
                    _write_manifest(repository / model / str(version), manifest)
            return Installed(version, version == live, new=False)
    # The version that the ensemble names comes first; its folder holds nothing but code until then.
    version = live if live not in versions else max(_folders(repository, reranker)) + 1
    write_configs(repository, reranker, live)
    tokenizer, scorer = (repository / model / str(version) for model in (reranker.tokenizer, reranker.scorer))
    halves = (
        (tokenizer, TOKENIZER_CODE, [pairing / "tokenizer.json", pairing / "pairing.json"]),
        (scorer, SCORER_CODE, sorted(graph.glob(_GRAPHS[target_of(manifest)]))),
    )
    with ExitStack() as leftovers:
        # Both halves are whole before either is put in place.
        works = [_prepare(leftovers, *half, manifest) for half in halves]
        for work, (target, _, _) in zip(works, halves, strict=True):
            _place(work, target)
    return Installed(version, version == live, new=True)


def pin(repository: Path, reranker: Reranker, version: int) -> list[Path]:
    """Make the ensemble serve `version`; return the files changed. A running server sees it when it loads again."""
    check_installed(repository, reranker, version)
    return write_configs(repository, reranker, version)


def check_installed(repository: Path, reranker: Reranker, version: int) -> None:
    """Raise InstallError unless both halves of a version are there."""
    versions = installed_versions(repository, reranker)
    if version not in versions:
        raise InstallError(
            f"{reranker.name} has no installed version {version} in {repository}; installed: "
            f"{', '.join(map(str, versions)) or 'none'}. Build one: python -m build_engines build {reranker.name}"
        )


def installed_versions(repository: Path, reranker: Reranker) -> list[int]:
    """Return the versions of which both halves are whole, lowest first."""
    return [
        version
        for version in sorted(_folders(repository, reranker))
        if all(
            (repository / model / str(version) / MANIFEST).exists() for model in (reranker.tokenizer, reranker.scorer)
        )
    ]


def read_manifest(repository: Path, reranker: Reranker, version: int) -> dict[str, Any]:
    """Return what an installed version says of itself; raise InstallError when it cannot be read."""
    path = repository / reranker.scorer / str(version) / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InstallError(f"{path} cannot be read ({error}). Delete the version folder and build again.") from error
    return manifest


def _same(installed: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    # Reports hold timings and differ from run to run; what is served is decided by the files.
    return bool(installed.get("files") == wanted["files"] and installed.get("precision") == wanted["precision"])


def _same_code(repository: Path, reranker: Reranker, version: int) -> bool:
    places = ((reranker.tokenizer, TOKENIZER_CODE), (reranker.scorer, SCORER_CODE))
    for model, code in places:
        names = [file.name for file in code.glob("*.py")]
        same, _, _ = filecmp.cmpfiles(code, repository / model / str(version), names, shallow=False)
        if len(same) < len(names):
            return False
    return True


def _folders(repository: Path, reranker: Reranker) -> set[int]:
    models = (repository / model for model in (reranker.tokenizer, reranker.scorer))
    return {int(entry.name) for model in models if model.is_dir() for entry in model.iterdir() if entry.name.isdigit()}


def _prepare(
    leftovers: ExitStack, target: Path, code: Path, built: Iterable[Path], manifest: Mapping[str, Any]
) -> Path:
    # Triton ignores a folder whose name does not begin with a digit, so the work can lie on the target's own disk.
    work = target.with_name(f".installing-{target.name}-{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    leftovers.callback(shutil.rmtree, work, ignore_errors=True)
    if target.exists():
        # The committed skeleton of a version: its code may be links, which stay links.
        shutil.copytree(target, work, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        work.mkdir(parents=True)
        for file in sorted(code.glob("*.py")):
            shutil.copyfile(file, work / file.name)
    for file in built:
        shutil.copyfile(file, work / file.name)
    _write_manifest(work, manifest)
    return work


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    temporary = folder / f".{MANIFEST}"
    temporary.write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    temporary.replace(folder / MANIFEST)


def _place(work: Path, target: Path) -> None:
    if target.exists():
        # Nothing loads a version without a manifest, so this moment without a folder is seen by nobody.
        aside = target.with_name(f".replaced-{target.name}-{os.getpid()}")
        target.rename(aside)
        work.rename(target)
        shutil.rmtree(aside)
    else:
        work.rename(target)
