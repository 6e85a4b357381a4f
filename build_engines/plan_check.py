# SPDX-License-Identifier: Apache-2.0
"""Whether what is installed can be served here: a manifest held against files, GPU, TensorRT and the row.

Triton would refuse the same things, but in a log, and some only when the first request comes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from build_engines.configs import scorer_inputs
from build_engines.errors import EngineError, InstallError
from build_engines.gpu import Gpu
from build_engines.hashing import sha256_file
from build_engines.table import Reranker

# What a manifest says of a plan, under "engine".
_FACTS = {
    "tensorrt",
    "gpu",
    "compute_capability",
    "version_compatible",
    "hardware_compatibility",
    "profiles",
    "inputs",
    "outputs",
}
_AMPERE = (8, 0)


def target_of(manifest: Mapping[str, Any]) -> str:
    """Return "cpu" or "gpu"; manifests from before there were two name none."""
    return str(manifest.get("target", "cpu"))


def check_files(folders: Sequence[Path], manifest: Mapping[str, Any]) -> None:
    """Raise InstallError unless each file that a manifest names lies in one of a version's folders, unchanged."""
    again = "Delete manifest.json of this version and build again."
    for name, wanted in manifest["files"].items():
        paths = [folder / name for folder in folders if (folder / name).is_file()]
        if not paths:
            raise InstallError(f"{name} is missing: it is in none of {', '.join(map(str, folders))}. {again}")
        for path in paths:
            size = path.stat().st_size
            if size != wanted["bytes"]:
                raise InstallError(f"{path} has {size} bytes, and its manifest says {wanted['bytes']}. {again}")
            digest = sha256_file(path)
            if digest != wanted["sha256"]:
                raise InstallError(f"{path} has sha256 {digest}, and its manifest says {wanted['sha256']}. {again}")


def check_plan(manifest: Mapping[str, Any], gpu: Gpu | None, tensorrt: str | None, reranker: Reranker) -> None:
    """Raise EngineError unless this GPU, this TensorRT and the row's config.pbtxt can serve the plan of a manifest.

    `tensorrt` is None where it could not be found out; then Triton's own loader decides.
    """
    check_row(manifest, reranker)
    engine = _engine(manifest, reranker)
    _check_gpu(engine, gpu, reranker)
    if tensorrt is not None:
        _check_tensorrt(engine, tensorrt, reranker)


def check_row(manifest: Mapping[str, Any], reranker: Reranker) -> None:
    """Raise EngineError unless a plan has the profiles and tensors that the row's config.pbtxt declares."""
    engine = _engine(manifest, reranker)
    again = f"Build again: {_build_command(reranker)}"
    wanted = [(bucket, reranker.max_batch_size) for bucket in reranker.buckets]
    found = [(profile["length"], profile["max_batch"]) for profile in engine["profiles"]]
    if found != wanted:
        # Profiles are numbered, and config.pbtxt lists the numbers: order counts.
        raise EngineError(
            f"The plan of {reranker.name} has the profiles {_profiles(found)}, and its row of the table, from which "
            f"config.pbtxt is made, wants {_profiles(wanted)}. {again}"
        )
    for kind, tensors in (("inputs", dict.fromkeys(scorer_inputs(reranker), "INT64")), ("outputs", {"SCORE": "FLOAT"})):
        if engine[kind] != tensors:
            raise EngineError(
                f"The plan of {reranker.name} has the {kind} {_tensors(engine[kind])}, and config.pbtxt declares "
                f"{_tensors(tensors)}. Correct segment_ids in the table if that is wrong. {again}"
            )


def _engine(manifest: Mapping[str, Any], reranker: Reranker) -> Mapping[str, Any]:
    engine: Mapping[str, Any] = manifest.get("engine", {})
    missing = sorted(_FACTS - set(engine))
    if missing:
        raise EngineError(
            f"The manifest of {reranker.name} does not say what its plan was built for: engine lacks "
            f"{', '.join(missing)}. Build again: {_build_command(reranker)}"
        )
    return engine


def _check_gpu(engine: Mapping[str, Any], gpu: Gpu | None, reranker: Reranker) -> None:
    built, level = engine["compute_capability"], engine["hardware_compatibility"]
    allowed = "8.0 (Ampere) or later" if level == "ampere_plus" else f"exactly {built}"
    needs = f"The plan of {reranker.name}, built on {engine['gpu']}, needs a GPU of compute capability {allowed}"
    if gpu is None:
        raise EngineError(
            f"{needs}; found no GPU. Look at nvidia-smi, and start containers with --gpus all; or build and pin a "
            f"version for this machine: python -m build_engines build {reranker.name} --target cpu"
        )
    found = _numbers(gpu.compute_capability)
    if not (found >= _AMPERE if level == "ampere_plus" else found == _numbers(built)):
        raise EngineError(
            f"{needs}; found {gpu.name} with {gpu.compute_capability}. Build on this GPU: {_build_command(reranker)}; "
            "or let the plan run on more GPUs with engine.hardware_compatibility in the table."
        )


def _check_tensorrt(engine: Mapping[str, Any], tensorrt: str, reranker: Reranker) -> None:
    # The loader of a plan compares three numbers; the fourth counts builds of one release.
    built, found = _numbers(engine["tensorrt"])[:3], _numbers(tensorrt)[:3]
    if engine["version_compatible"]:
        allowed = f"{'.'.join(map(str, built))} or later" + (", or 11" if built[0] == 10 else f", below {built[0] + 1}")
        fits = (found >= built and found[0] == built[0]) or (built[0], found[0]) == (10, 11)
    else:
        allowed, fits = f"exactly {'.'.join(map(str, built))}", found == built
    if not fits:
        raise EngineError(
            f"The plan of {reranker.name} needs TensorRT {allowed}; found {tensorrt}. Build in the image that serves: "
            f"{_build_command(reranker)}; or serve with the image that it was built in."
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _profiles(profiles: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{length} tokens x {batch} pairs" for length, batch in profiles) or "none"


def _tensors(tensors: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in tensors.items()) or "none"


def _build_command(reranker: Reranker) -> str:
    return f"python -m build_engines build {reranker.name} --target gpu"
