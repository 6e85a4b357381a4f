# SPDX-License-Identifier: Apache-2.0
"""A plan is served only where it can run, and what does not fit is said with what was expected and what was found."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from build_engines.engine import profiles_of
from build_engines.errors import EngineError, InstallError
from build_engines.gpu import Gpu
from build_engines.plan_check import check_files, check_plan, check_row, target_of
from build_engines.table import find_reranker
from tests.unit.pretended_builds import engine_facts

BGE = find_reranker("bge_reranker_base")
LIGHT = find_reranker("light_reranker")


def check(*, on: str = "9.0", found: str | None = "11.4.0", **engine: Any) -> None:
    """Check a plan of BGE on a GPU of capability `on` beside TensorRT `found`."""
    manifest = {"target": "gpu", "engine": engine_facts(BGE, **engine)}
    check_plan(manifest, Gpu("NVIDIA Test", on, 80 << 30), found, BGE)


def test_a_plan_fits_the_gpu_and_the_tensorrt_that_built_it() -> None:
    check()


def test_without_a_gpu_the_one_that_is_needed_is_named() -> None:
    with pytest.raises(EngineError, match=r"built on NVIDIA H200, needs .* exactly 9\.0; found no GPU") as caught:
        check_plan({"engine": engine_facts(BGE)}, None, None, BGE)
    assert "python -m build_engines build bge_reranker_base --target cpu" in str(caught.value)


@pytest.mark.parametrize(
    ("level", "built", "found", "fits"),
    [
        ("none", "9.0", "9.0", True),
        ("none", "9.0", "8.9", False),
        ("none", "9.0", "10.0", False),
        ("same_compute_capability", "8.9", "8.9", True),
        ("same_compute_capability", "8.9", "9.0", False),
        ("ampere_plus", "9.0", "8.0", True),
        ("ampere_plus", "8.0", "10.0", True),  # as text, 10.0 would come before 8.0
        ("ampere_plus", "9.0", "7.5", False),
    ],
)
def test_which_gpus_may_run_a_plan(level: str, built: str, found: str, fits: bool) -> None:
    if fits:
        check(on=found, compute_capability=built, hardware_compatibility=level)
        return
    needed = "8.0 (Ampere) or later" if level == "ampere_plus" else f"exactly {built}"
    with pytest.raises(EngineError, match=re.escape(f"{needed}; found NVIDIA Test with {found}. Build on this GPU")):
        check(on=found, compute_capability=built, hardware_compatibility=level)


@pytest.mark.parametrize(
    ("built", "found", "compatible", "needed"),
    [
        ("11.4.0.106", "11.4.0", False, None),
        ("11.4.0.106", "11.4.0.999", False, None),
        ("11.4.0.106", None, False, None),
        ("11.4.0.106", "11.4.1", False, "exactly 11.4.0"),
        ("11.4.0.106", "10.16.1", False, "exactly 11.4.0"),
        ("11.4.0.106", "11.10.0", True, None),
        ("11.4.0.106", "11.3.9", True, "11.4.0 or later, below 12"),
        ("11.4.0.106", "12.0.0", True, "11.4.0 or later, below 12"),
        ("11.4.0.106", "10.16.1", True, "11.4.0 or later, below 12"),
        ("10.13.3.9", "10.16.1", True, None),
        ("10.13.3.9", "11.0.0", True, None),
        ("10.13.3.9", "10.13.2", True, "10.13.3 or later, or 11"),
        ("10.13.3.9", "12.0.0", True, "10.13.3 or later, or 11"),
    ],
)
def test_which_tensorrt_may_run_a_plan(built: str, found: str | None, compatible: bool, needed: str | None) -> None:
    if needed is None:
        check(found=found, tensorrt=built, version_compatible=compatible)
        return
    with pytest.raises(EngineError, match=re.escape(f"needs TensorRT {needed}; found {found}. Build in the image")):
        check(found=found, tensorrt=built, version_compatible=compatible)


def test_the_profiles_that_the_build_makes_are_those_that_the_row_wants() -> None:
    for row in (BGE, LIGHT):
        profiles = [dataclasses.asdict(profile) for profile in profiles_of(row)]
        check_row({"engine": engine_facts(row, profiles=profiles)}, row)


@pytest.mark.parametrize(
    "profiles",
    [
        [],
        [{"length": length, "max_batch": 64} for length in (32, 64, 128, 256)],
        [{"length": length, "max_batch": 64} for length in (64, 32, 128, 256, 512)],  # config.pbtxt counts on the order
        [{"length": length, "max_batch": 32} for length in (32, 64, 128, 256, 512)],
        [{"length": length, "max_batch": 64} for length in (32, 64, 128, 256, 1024)],
    ],
)
def test_other_profiles_than_the_rows_are_refused_with_both(profiles: list[dict[str, int]]) -> None:
    found = ", ".join(f"{profile['length']} tokens x {profile['max_batch']} pairs" for profile in profiles) or "none"
    wanted = ", ".join(f"{length} tokens x 64 pairs" for length in (32, 64, 128, 256, 512))
    with pytest.raises(EngineError) as caught:
        check(profiles=profiles)
    assert f"has the profiles {found}, and" in str(caught.value)
    assert f"wants {wanted}. Build again" in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"inputs": {"input_ids": "INT32", "attention_mask": "INT32"}}, "inputs input_ids INT32, attention_mask INT32"),
        ({"inputs": {"input_ids": "INT64"}}, "inputs input_ids INT64, and config.pbtxt declares input_ids INT64, att"),
        ({"inputs": dict.fromkeys(["input_ids", "attention_mask", "token_type_ids"], "INT64")}, "token_type_ids INT64"),
        ({"outputs": {"SCORE": "HALF"}}, "outputs SCORE HALF, and config.pbtxt declares SCORE FLOAT"),
        ({"outputs": {"logits": "FLOAT"}}, "outputs logits FLOAT"),
    ],
)
def test_other_tensors_than_the_configs_are_refused(tensors: dict[str, Any], found: str) -> None:
    with pytest.raises(EngineError, match=re.escape(found)):
        check(**tensors)


def test_the_order_of_inputs_does_not_matter() -> None:
    check(inputs={"attention_mask": "INT64", "input_ids": "INT64"})


def test_a_manifest_that_says_nothing_of_its_engine_is_refused() -> None:
    with pytest.raises(EngineError, match=r"engine lacks compute_capability, gpu, .* Build again: python -m"):
        check_row({"target": "gpu"}, BGE)


def test_manifests_from_before_there_were_targets_are_for_cpu() -> None:
    assert (target_of({}), target_of({"target": "gpu"})) == ("cpu", "gpu")


@pytest.fixture
def version(tmp_path: Path) -> tuple[list[Path], dict[str, Any]]:
    """Two folders of a version, and its manifest; hashes are from sha256sum."""
    folders = [tmp_path / "tokenizer" / "1", tmp_path / "scorer" / "1"]
    for folder, name, content in zip(folders, ("pairing.json", "model.plan"), (b"{}", b"plan"), strict=True):
        folder.mkdir(parents=True)
        (folder / name).write_bytes(content)
    files = {
        "pairing.json": {"sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a", "bytes": 2},
        "model.plan": {"sha256": "64879f7d6b960a01909762d911a32d4582c20010c5641ee90278b644a9e3b525", "bytes": 4},
    }
    return folders, {"files": files}


def test_files_that_are_as_the_manifest_says_pass(version: tuple[list[Path], dict[str, Any]]) -> None:
    check_files(*version)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"plan and more", r"model\.plan has 13 bytes, and its manifest says 4\. Delete manifest\.json"),
        (
            b"plaN",
            r"model\.plan has sha256 4a4f35fe8d37\w+, and its manifest says 64879f7d6b96",
        ),
        (None, r"model\.plan is missing: it is in none of .*tokenizer/1, .*scorer/1"),
    ],
)
def test_files_that_have_changed_are_refused_with_both(
    version: tuple[list[Path], dict[str, Any]], content: bytes | None, message: str
) -> None:
    folders, manifest = version
    path = folders[1] / "model.plan"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(InstallError, match=message):
        check_files(folders, manifest)
