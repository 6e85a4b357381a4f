# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint to an installed version, again for nothing, and again for a checkpoint that changed."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from build_engines.__main__ import main
from build_engines.build import build
from build_engines.configs import repository_files
from build_engines.errors import PairsError
from build_engines.hashing import sha256_file
from build_engines.install import Installed
from build_engines.request import BuildRequest
from build_engines.serving_code import graph_scoring, pair_encoding
from build_engines.table import Gates
from tests.checkpoints import row, write_xlm_roberta
from tests.unit.test_build_export import own_scores

STEPS = ("pairing", "export", "quantize", "verify")


@dataclass(frozen=True, slots=True)
class Built:
    request: BuildRequest
    installed: Installed | Path
    said: str

    @property
    def checkpoint(self) -> Path:
        return Path(self.request.reranker.checkpoint)


def run(request: BuildRequest) -> Built:
    said = io.StringIO()
    installed = build(request, Console(file=said, width=1000, highlight=False))
    return Built(request, installed, said.getvalue())


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Built:
    root = tmp_path_factory.mktemp("first")
    checkpoint = write_xlm_roberta(root / "checkpoint", layers=1)
    reranker = row("tiny", checkpoint, precision="int8")
    return run(BuildRequest(reranker, "cpu", root / "repository", root / "build"))


@pytest.fixture
def again(first: Built, tmp_path: Path) -> BuildRequest:
    """The first build's folders, to be built on; the checkpoint is shared."""
    shutil.copytree(first.request.repository, tmp_path / "repository")
    shutil.copytree(first.request.build_folder, tmp_path / "build")
    return replace(first.request, repository=tmp_path / "repository", build_folder=tmp_path / "build")


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_the_first_build_is_version_one_and_serves(first: Built) -> None:
    assert first.installed == Installed(1, live=True, new=True)
    assert "version 1 (new)" in first.said
    assert "ships INT8" in first.said
    for name, text in repository_files(first.request.reranker, 1).items():
        assert (first.request.repository / name).read_text(encoding="utf-8") == text


def test_the_manifest_names_what_is_installed(first: Built) -> None:
    reranker, repository = first.request.reranker, first.request.repository
    for model in (reranker.tokenizer, reranker.scorer):
        manifest = json.loads((repository / model / "1" / "manifest.json").read_text(encoding="utf-8"))
        for name, known in manifest["files"].items():
            (path,) = repository.glob(f"*/1/{name}")
            assert known == {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        assert (manifest["precision"], manifest["max_length"], manifest["reranker"]) == ("int8", 512, "tiny")
        checkpoint = manifest["checkpoint"]
        assert checkpoint["files"]["model.safetensors"] == sha256_file(first.checkpoint / "model.safetensors")
        assert {"torch", "onnx", "onnxruntime", "transformers"} <= set(manifest["tools"])


def test_what_is_installed_scores_texts_like_the_checkpoint(first: Built) -> None:
    repository, reranker = first.request.repository, first.request.reranker
    encoder = pair_encoding.PairEncoder.load(
        repository / reranker.tokenizer / "1", cache_bytes=1 << 20, max_text_bytes=10_000
    )
    pairs = encoder.encode([b"what is a panda?"] * 3, [b"a bear species", "大熊猫".encode(), b"bread " * 300])
    arrays = {"input_ids": pairs.input_ids, "attention_mask": pairs.attention_mask}
    scorer = graph_scoring.GraphScorer(repository / reranker.scorer / "1" / "model.onnx", threads=1, tokens_per_run=0)
    scores = scorer.score([graph_scoring.PaddedPairs.check(arrays, graph_scoring.Limits(335, 512))])[0]
    # INT8 against FP32: close, not equal.
    np.testing.assert_allclose(scores, own_scores(first.checkpoint, arrays), atol=0.1)


def test_the_repository_holds_nothing_half_built(first: Built) -> None:
    assert not list(first.request.repository.rglob(".*/"))
    assert not list(first.request.build_folder.rglob(".*"))
    assert {path.name for path in first.request.repository.iterdir()} == {"tiny", "tiny_tokenizer", "tiny_scorer"}


def test_a_second_build_keeps_every_step_and_the_version(again: BuildRequest) -> None:
    before = snapshot(again.repository), snapshot(again.build_folder)
    second = run(again)
    assert second.installed == Installed(1, live=True, new=False)
    for step in STEPS:
        assert any(line.split()[:2] == [step, "unchanged,"] for line in second.said.splitlines()), step
    assert "version 1 (already there)" in second.said
    assert (snapshot(again.repository), snapshot(again.build_folder)) == before


@pytest.mark.parametrize("step", ["pairing", "verify"])
def test_a_damaged_intermediate_file_is_made_again(again: BuildRequest, step: str) -> None:
    name = {"pairing": "tokenizer.json", "verify": "report.json"}[step]
    (again.build_folder / "tiny" / step / name).write_text("damaged", encoding="utf-8")
    second = run(again)
    assert second.installed == Installed(1, live=True, new=False)
    assert f"{step:9} unchanged" not in second.said


def test_other_pairs_are_verified_without_building_again(again: BuildRequest, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"query": "panda", "documents": ["a bear", "bread", "sea"]}), encoding="utf-8")
    second = run(replace(again, pairs=pairs))
    assert second.installed == Installed(1, live=True, new=False)
    assert "queries 1" in second.said
    assert "export    unchanged" in second.said


def test_pairs_beyond_the_budget_are_left_out_but_never_the_first_query(again: BuildRequest, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    lines = [json.dumps({"query": "panda", "documents": [f"bear {at}" for at in range(size)]}) for size in (5, 1996, 2)]
    pairs.write_text("\n".join(lines), encoding="utf-8")
    assert "pairs 5," in run(replace(again, pairs=pairs)).said
    pairs.write_text(json.dumps({"query": "panda", "documents": ["bear"] * 2001}), encoding="utf-8")
    with pytest.raises(PairsError, match="at most 2000 pairs"):
        run(replace(again, pairs=pairs))


def test_a_changed_checkpoint_becomes_version_two_which_serves_when_pinned(first: Built, again: BuildRequest) -> None:
    checkpoint = again.build_folder.parent / "checkpoint"
    shutil.copytree(first.checkpoint, checkpoint)
    write_xlm_roberta(checkpoint, layers=1, seed=1)
    impossible = Gates(ndcg_drop=0.0, top1_agreement=1.01, kendall_tau=1.01, max_score_shift=0.0)
    changed = replace(again.reranker, checkpoint=str(checkpoint), precision="auto", gates=impossible)
    before = snapshot(again.repository)
    second = run(replace(again, reranker=changed))
    assert second.installed == Installed(2, live=False, new=True)
    assert "ships FP32: INT8 is outside its gates" in second.said
    assert "python -m build_engines pin tiny 2" in second.said
    after = snapshot(again.repository)
    assert {name: after[name] for name in before} == before
    assert pinned_by_command(again, checkpoint) == 0
    assert "model_version: 2" in (again.repository / "tiny" / "config.pbtxt").read_text(encoding="utf-8")
    assert run(replace(again, reranker=changed)).installed == Installed(2, live=True, new=False)


def pinned_by_command(request: BuildRequest, checkpoint: Path) -> int:
    table = checkpoint.with_name("rerankers.toml")
    table.write_text(
        f"""[tiny]
checkpoint = "{checkpoint}"
head = "sequence_classification"
segment_ids = false
max_length = 512
buckets = [32, 64, 128, 256, 512]
max_batch_size = 64
precision = "auto"
gates = {{ ndcg_drop = 0.0, top1_agreement = 1.0, kendall_tau = 1.0, max_score_shift = 0.0 }}
""",
        encoding="utf-8",
    )
    return main(["pin", "tiny", "2", "--table", str(table), "--repository", str(request.repository)])


def test_fp32_and_onnx_skip_what_they_do_not_need(tmp_path: Path) -> None:
    checkpoint = write_xlm_roberta(tmp_path / "checkpoint", layers=1)
    request = BuildRequest(
        row("tiny", checkpoint, precision="fp32"), "onnx", tmp_path / "repository", tmp_path / "build"
    )
    graph = run(request)
    assert graph.installed == tmp_path / "build" / "tiny" / "export" / "model.onnx"
    assert not (tmp_path / "repository").exists()
    second = run(replace(request, target="cpu"))
    assert second.installed == Installed(1, live=True, new=True)
    assert "ships FP32: precision is set to fp32" in second.said
    assert "quantize" not in second.said
    assert {path.name for path in (tmp_path / "build" / "tiny").iterdir()} == {"pairing", "export", "verify"}
