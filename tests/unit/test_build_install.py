# SPDX-License-Identifier: Apache-2.0
"""Versions appear whole or not at all, and serve only once they are pinned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from build_engines.__main__ import main
from build_engines.configs import pinned_version, repository_files
from build_engines.errors import EngineError, InstallError
from build_engines.install import Installed, installed_versions, pin, read_manifest
from build_engines.places import REPOSITORY, SCORER_CODE, TOKENIZER_CODE
from build_engines.table import find_reranker
from tests.unit.pretended_builds import Builds, engine_facts


@pytest.fixture
def builds(tmp_path: Path) -> Builds:
    return Builds(tmp_path, find_reranker("bge_reranker"))


def test_the_first_build_is_version_one_and_live(builds: Builds) -> None:
    assert builds.install("a") == Installed(1, live=True, new=True)
    name, found = builds.reranker.name, builds.snapshot()
    code = {f"{name}_tokenizer/1/{file.name}" for file in TOKENIZER_CODE.glob("*.py")}
    code |= {f"{name}_scorer/1/{file.name}" for file in SCORER_CODE.glob("*.py")}
    built = {f"{name}_tokenizer/1/{file}" for file in ("pairing.json", "tokenizer.json", "manifest.json")}
    built |= {f"{name}_scorer/1/{file}" for file in ("model.onnx", "manifest.json")}
    assert set(found) == code | built | set(repository_files(builds.reranker, 1)) | {f"{name}/1/.gitkeep"}
    assert found[f"{name}_scorer/1/model.onnx"] == b"model.onnx a"


def test_the_same_build_again_changes_nothing(builds: Builds) -> None:
    builds.install("a")
    before = builds.snapshot()
    assert builds.install("a") == Installed(1, live=True, new=False)
    assert builds.snapshot() == before


def test_another_build_becomes_the_next_version_and_serves_only_when_pinned(builds: Builds) -> None:
    builds.install("a")
    before = builds.snapshot()
    assert builds.install("b") == Installed(2, live=False, new=True)
    after = builds.snapshot()
    assert {name: after[name] for name in before} == before
    pin(builds.repository, builds.reranker, 2)
    assert pinned_version(builds.repository, builds.reranker) == 2
    texts = {name: after.decode() for name, after in builds.snapshot().items() if name.endswith(".pbtxt")}
    assert texts == repository_files(builds.reranker, 2)
    assert builds.install("b") == Installed(2, live=True, new=False)
    assert builds.install("a") == Installed(1, live=False, new=False)


def test_the_same_files_in_another_precision_are_another_version(builds: Builds) -> None:
    builds.install("a", precision="fp32")
    assert builds.install("a", precision="int8").version == 2


def test_weights_beside_the_graph_are_installed_with_it(builds: Builds) -> None:
    builds.install("a", external=True)
    assert f"{builds.reranker.scorer}/1/model.onnx.data" in builds.snapshot()


def test_a_build_for_gpu_installs_its_plan(builds: Builds) -> None:
    builds.install("a")
    assert builds.install("a", engine=engine_facts(builds.reranker)) == Installed(2, live=False, new=True)
    scorer = builds.repository / builds.reranker.scorer / "2"
    code = {file.name for file in SCORER_CODE.glob("*.py")}
    assert {path.name for path in scorer.iterdir()} == code | {"model.plan", "manifest.json"}
    assert (scorer / "model.plan").read_text(encoding="utf-8") == "model.plan a"


def test_a_plan_that_the_config_cannot_serve_is_not_installed(builds: Builds) -> None:
    builds.install("a")
    before = builds.snapshot()
    with pytest.raises(EngineError, match=r"has the profiles 32 tokens x 64 pairs, .*wants .* 1024 tokens x 64 pairs"):
        builds.install("b", engine=engine_facts(builds.reranker) | {"profiles": [{"length": 32, "max_batch": 64}]})
    assert builds.snapshot() == before


@pytest.mark.parametrize("half", ["tokenizer", "scorer"])
def test_changed_serving_code_is_a_new_version(builds: Builds, half: str) -> None:
    builds.install("a")
    (builds.repository / f"{builds.reranker.name}_{half}" / "1" / "model.py").write_text("# old\n", encoding="utf-8")
    assert builds.install("a") == Installed(2, live=False, new=True)


def test_a_committed_skeleton_keeps_its_links(tmp_path: Path) -> None:
    builds = Builds(tmp_path, find_reranker("bge_reranker"))
    for path in REPOSITORY.iterdir():
        skeleton = shutil.ignore_patterns("*.json", "*.onnx*", "[2-9]*", "__pycache__")
        shutil.copytree(path, builds.repository / path.name, symlinks=True, ignore=skeleton)
    assert builds.install("a") == Installed(1, live=True, new=True)
    for model, code in ((builds.reranker.tokenizer, TOKENIZER_CODE), (builds.reranker.scorer, SCORER_CODE)):
        for file in code.glob("*.py"):
            link = builds.repository / model / "1" / file.name
            assert link.is_symlink()
            assert link.resolve() == builds.repository / code.parent.name / "1" / file.name


@contextmanager
def full_disk_after(files: int) -> Iterator[None]:
    """Let copying fail after so many files."""
    copy, copied = shutil.copyfile, iter(range(files))

    def copyfile(source: Any, target: Any, **settings: Any) -> Any:
        if next(copied, None) is None:
            raise OSError("No space left on device")
        return copy(source, target, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "copyfile", copyfile)
        yield


def test_a_failed_copy_leaves_no_version_behind(builds: Builds) -> None:
    builds.install("a")
    before = builds.snapshot()
    folders = {path for path in builds.repository.rglob("*") if path.is_dir()}
    for copied in range(7):  # four of code, three built
        with full_disk_after(copied), pytest.raises(OSError, match="No space left"):
            builds.install("b")
        assert builds.snapshot() == before
        assert {path for path in builds.repository.rglob("*") if path.is_dir()} == folders
    assert builds.install("b").version == 2


def test_a_failed_first_install_is_repeated_as_version_one(builds: Builds) -> None:
    for copied in range(7):
        with full_disk_after(copied), pytest.raises(OSError, match="No space left"):
            builds.install("a")
        assert installed_versions(builds.repository, builds.reranker) == []
        assert not list(builds.repository.glob("*_tokenizer/*/")) + list(builds.repository.glob("*_scorer/[!c]*/"))
    assert builds.install("a") == Installed(1, live=True, new=True)


def test_a_version_that_is_not_installed_cannot_be_pinned(builds: Builds) -> None:
    builds.install("a")
    with pytest.raises(InstallError, match=r"has no installed version 3 .* installed: 1\. Build one"):
        pin(builds.repository, builds.reranker, 3)


def test_half_a_version_does_not_count(builds: Builds) -> None:
    builds.install("a")
    (builds.repository / builds.reranker.tokenizer / "1" / "manifest.json").unlink()
    assert installed_versions(builds.repository, builds.reranker) == []


def test_a_damaged_manifest_is_named(builds: Builds) -> None:
    builds.install("a")
    path = builds.repository / builds.reranker.scorer / "1" / "manifest.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InstallError, match="Delete the version folder and build again"):
        read_manifest(builds.repository, builds.reranker, 1)


@pytest.mark.parametrize("text", ["not a config {", 'name: "x"', "ensemble_scheduling { step { model_version: -1 } }"])
def test_an_ensemble_that_pins_no_version_is_refused(builds: Builds, text: str) -> None:
    builds.install("a")
    path = builds.repository / builds.reranker.name / "config.pbtxt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InstallError, match=str(path)):
        builds.install("b")


def test_the_command_line_lists_and_pins_versions(builds: Builds, capsys: pytest.CaptureFixture[str]) -> None:
    builds.install("a")
    builds.install("b", precision="int8", engine=engine_facts(builds.reranker))
    for version, content in ((1, "a"), (2, "b")):
        path = builds.repository / builds.reranker.scorer / str(version) / "manifest.json"
        shown = {"checkpoint": {"source": f"source-{content}"}, "built_at": "2024-01-01"}
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | shown), encoding="utf-8")
    place = ["--repository", str(builds.repository)]
    assert main(["pin", "bge_reranker", "2", *place]) == 0
    assert main(["pin", "bge_reranker", "7", *place]) == 1
    assert "has no installed version 7" in capsys.readouterr().err
    assert main(["list", *place]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "cpu", "fp32", "source-a", "2024-01-01"] in lines
    assert ["serves", "2", "gpu", "int8", "source-b", "2024-01-01"] in lines
