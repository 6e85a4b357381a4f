# SPDX-License-Identifier: Apache-2.0
"""The gpu target on a machine without a GPU: from a checkpoint to a verified graph and the command that finishes it."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from transformers import AutoTokenizer

import build_engines.build_gpu
import build_engines.finish
from build_engines.__main__ import NOT_FINISHED, main
from build_engines.calibrate import calibrate as real_calibrate
from build_engines.container import finish_command
from build_engines.errors import GateError
from build_engines.hashing import sha256_file
from build_engines.pairs import SAMPLE
from build_engines.request import BuildRequest
from tests.checkpoints import write_xlm_roberta
from tests.unit.gpu_builds import (
    FIRM,
    Built,
    Watched,
    gpu_request,
    random_candidates,
    read_json,
    run,
    watch,
    write_pairs,
    write_table,
)
from tests.unit.test_build_end_to_end import snapshot
from tests.unit.test_build_export import batch, own_scores
from tests.unit.test_build_export import run as scores_of

STEPS = ["pairing", "export", "calibrate", "quantize-gpu", "verify-gpu", "convert", "convert-base"]
GIVEN = random_candidates(48, seed=1)
# The products of one layer: query, key, value, what follows attention, and two of the feed-forward part.
PRODUCTS = 6


pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, no_gpu: None) -> Watched:
    root = tmp_path_factory.mktemp("first")
    checkpoint = write_xlm_roberta(root / "checkpoint", layers=1)
    return watch(gpu_request(root, checkpoint, write_pairs(root / "pairs.jsonl", GIVEN)))


@pytest.fixture(scope="module")
def first(watched: Watched) -> Built:
    return watched.built


@pytest.fixture
def again(first: Built, tmp_path: Path) -> BuildRequest:
    """The first build's folder, to be built on; the checkpoint and the pairs are shared."""
    shutil.copytree(first.request.build_folder, tmp_path / "build")
    return replace(first.request, repository=tmp_path / "repository", build_folder=tmp_path / "build")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let calibration find ranges a thousand times too large for each tensor whose name holds a text."""

    def break_ranges(part: str) -> None:
        def calibrate(reranker: Any, graph: Path, chosen: Any, out: Path, advance: Any) -> dict[str, Any]:
            facts = real_calibrate(reranker, graph, chosen, out, advance)
            ranges = read_json(out / "ranges.json")
            assert any(part in name for name in ranges)
            changed = {name: value * 1000 if part in name else value for name, value in ranges.items()}
            (out / "ranges.json").write_text(str(changed).replace("'", '"'), encoding="utf-8")
            return facts

        monkeypatch.setattr(build_engines.build_gpu, "calibrate", calibrate)

    return break_ranges


def steps_of(said: str) -> list[tuple[str, bool]]:
    """Return the steps in the order that they were reported, and whether each was kept."""
    found = [(line.split(" ")[0], " unchanged, kept;" in line) for line in said.splitlines()]
    return [(name, kept) for name, kept in found if name in STEPS]


def changed(request: BuildRequest, **fields: Any) -> BuildRequest:
    return replace(request, reranker=replace(request.reranker, **fields))


def query_ids(built: Built, queries: list[str]) -> set[tuple[int, ...]]:
    """Return the ids of queries by the checkpoint's own tokenizer; all differ."""
    tokenizer = AutoTokenizer.from_pretrained(built.request.reranker.checkpoint)
    ids = {tuple(tokenizer(query, add_special_tokens=False)["input_ids"]) for query in queries}
    assert len(ids) == len(queries)
    return ids


def query_of(ids: list[int]) -> tuple[int, ...]:
    """Return a pair's query: <s> QUERY </s></s> DOCUMENT </s>."""
    return tuple(ids[1 : ids.index(2)])


def test_the_steps_run_in_order(first: Built) -> None:
    assert steps_of(first.said) == [(step, False) for step in STEPS]
    assert {path.name for path in first.folder.iterdir()} == {*STEPS, "handover.json"}


def test_a_second_build_keeps_every_step(first: Built, again: BuildRequest) -> None:
    before = [snapshot(again.folder / step) for step in STEPS]
    assert steps_of(run(again).said) == [(step, True) for step in STEPS]
    assert [snapshot(again.folder / step) for step in STEPS] == before


def test_it_ends_at_the_verified_graph_with_the_command_that_finishes_it(first: Built) -> None:
    request = first.request
    assert first.result == first.folder / "convert" / "model.onnx"
    assert "engine    not built: this machine has no NVIDIA GPU" in first.said
    command = finish_command("tiny", request.build_folder, request.repository, request.table)
    assert first.said.endswith(f"\n\n{command}\n")
    assert not request.repository.exists()


def test_what_is_handed_over_names_its_sources(first: Built, watched: Watched) -> None:
    handover = read_json(first.folder / "handover.json")["manifest"]
    checkpoint = Path(first.request.reranker.checkpoint)
    assert (handover["target"], handover["precision"], handover["max_length"]) == ("gpu", "int8", 128)
    assert handover["checkpoint"]["files"]["model.safetensors"] == sha256_file(checkpoint / "model.safetensors")
    assert handover["calibration"]["file_sha256"] == sha256_file(first.request.pairs)
    ids = [np.array([row], dtype=np.int64) for row in watched.calibrating]
    assert handover["calibration"]["ids_sha256"] == hashlib.sha256(b"".join(map(bytes, ids))).hexdigest()


@pytest.mark.parametrize(("step", "quantised", "tolerance"), [("convert", PRODUCTS, 1.0), ("convert-base", 0, 0.05)])
def test_the_converted_graphs_score_like_the_checkpoint(
    first: Built, step: str, quantised: int, tolerance: float
) -> None:
    graph, arrays = first.folder / step / "model.onnx", batch([128, 7, 60, 33, 16, 5, 99, 40], "xlm_roberta")
    expected = own_scores(Path(first.request.reranker.checkpoint), arrays)
    found = scores_of(graph, arrays)
    assert np.abs(found - expected).max() < tolerance * expected.std()
    assert found.dtype == np.float32
    model = onnx.load(graph)
    types = Counter(weight.data_type for weight in model.graph.initializer if len(weight.dims) == 2)
    # One scale and one INT8 matrix for each; the embeddings are FP16, and the head's two matrices FP32.
    assert types[TensorProto.INT8] == quantised
    assert types[TensorProto.FLOAT16] >= 2
    assert types[TensorProto.FLOAT] == 2
    producers = {output: node.op_type for node in model.graph.node for output in node.output}
    reading = [
        node for node in model.graph.node if [producers.get(i) for i in node.input[:2]] == ["DequantizeLinear"] * 2
    ]
    assert len(reading) == quantised


def test_the_command_line_ends_with_a_status_of_its_own(
    again: BuildRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_table(tmp_path / "my rerankers.toml", again)
    places = ["--repository", str(again.repository), "--build-folder", str(again.build_folder), "--table", str(table)]
    assert main(["build", "tiny", "--target", "gpu", "--pairs", str(again.pairs), *places]) == NOT_FINISHED == 3
    said = capsys.readouterr().out
    assert steps_of(said) == [(step, True) for step in STEPS]
    assert finish_command("tiny", again.build_folder, again.repository, table) in said
    assert f"--table '{table}'" in said
    assert not again.repository.exists()
    assert main(["build", "tiny", "--target", "gpu", "--engine-only", *places]) == 1
    refused = capsys.readouterr().err
    assert "refused tiny: this machine has no NVIDIA GPU, or no driver for it. Finish in the container:" in refused
    assert finish_command("tiny", again.build_folder, again.repository, table) in refused


def test_engine_only_needs_an_earlier_build_and_the_gpu_target(
    again: BuildRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_table(tmp_path / "rerankers.toml", again)
    places = ["--engine-only", "--build-folder", str(tmp_path / "nothing"), "--table", str(table)]
    assert main(["build", "tiny", "--target", "gpu", *places]) == 1
    refused = " ".join(capsys.readouterr().err.split())
    assert f"{tmp_path / 'nothing' / 'tiny' / 'handover.json'} cannot be read" in refused
    advice = "First build up to the verified graph: python -m build_engines build tiny --target gpu --pairs FILE.jsonl"
    assert advice in refused
    assert main(["build", "tiny", *places]) == 1
    assert "--engine-only finishes a gpu build; give --target gpu as well." in capsys.readouterr().err


@pytest.mark.parametrize(("precision", "kind"), [("fp16", TensorProto.FLOAT16), ("bf16", TensorProto.BFLOAT16)])
def test_without_int8_the_sample_does_and_nothing_is_calibrated(
    again: BuildRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str, kind: int
) -> None:
    for step in STEPS[2:]:
        shutil.rmtree(again.folder / step)
    table = write_table(tmp_path / "rerankers.toml", again)
    places = ["--repository", str(again.repository), "--build-folder", str(again.build_folder), "--table", str(table)]
    assert main(["build", "tiny", "--target", "gpu", "--precision", precision, *places]) == NOT_FINISHED
    ran = ["pairing", "export", "quantize-gpu", "verify-gpu", "convert"]
    assert [step for step, _ in steps_of(capsys.readouterr().out)] == ran
    handover = read_json(again.folder / "handover.json")["manifest"]
    assert handover["precision"] == precision
    assert "calibration" not in handover
    assert handover["report"]["queries"] == len(SAMPLE.read_text(encoding="utf-8").splitlines())
    weights = onnx.load(again.folder / "convert" / "model.onnx").graph.initializer
    assert {weight.data_type for weight in weights if len(weight.dims) == 2} == {kind, TensorProto.FLOAT}


def test_one_file_is_parted_by_its_queries(watched: Watched) -> None:
    others = [candidates.query for candidates in GIVEN if candidates.query not in watched.judging]
    assert 5 < len(others) < len(watched.judging)
    found = {query_of(ids) for ids in watched.calibrating}
    assert len(found) > 5
    assert found <= query_ids(watched.built, others)


def test_queries_that_judge_never_calibrate(again: BuildRequest, tmp_path: Path) -> None:
    others = random_candidates(16, seed=2)
    calibration = write_pairs(tmp_path / "calibration.jsonl", [*GIVEN[:40], *others])
    seen = watch(replace(again, calibration=calibration))
    assert seen.judging == [candidates.query for candidates in GIVEN]
    found = {query_of(ids) for ids in seen.calibrating}
    assert len(found) > 5
    assert found <= query_ids(seen.built, [candidates.query for candidates in others])
    handover = read_json(again.folder / "handover.json")["manifest"]
    assert handover["calibration"]["file_sha256"] == sha256_file(calibration)


def test_other_pairs_to_judge_by_calibrate_nothing_anew(again: BuildRequest, tmp_path: Path) -> None:
    calibration = write_pairs(tmp_path / "calibration.jsonl", random_candidates(16, seed=2))
    run(replace(again, calibration=calibration))
    built = run(replace(again, calibration=calibration, pairs=write_pairs(tmp_path / "pairs.jsonl", GIVEN[:5])))
    assert [step for step, kept in steps_of(built.said) if kept] == STEPS[:4]
    assert built.step("verify-gpu")["facts"]["queries"] == 5


def test_broken_ranges_ship_the_base_precision_and_the_report_says_why(
    again: BuildRequest, broken: Callable[[str], None]
) -> None:
    shutil.rmtree(again.folder / "calibrate")
    broken("")
    built = run(changed(again, gates=FIRM))
    facts = built.step("verify-gpu")["facts"]
    assert (facts["precision"], facts["int8_layers"]) == ("fp16", [])
    story = facts["reason"]
    assert story.startswith("tiny: INT8 in every layer is outside its gates (")
    assert "; still so with the most layers back that search_budget 0.25 allows: " in story
    assert f"          FP16: {story}\n" in built.said
    # A quarter of six layers is one.
    assert [candidate["name"] for candidate in facts["candidates"]] == ["fp16", "int8", "int8, 1 layers back"]
    assert "DequantizeLinear" not in {
        node.op_type for node in onnx.load(built.folder / "convert/model.onnx").graph.node
    }
    before = snapshot(again.folder / "convert")
    with pytest.raises(
        GateError, match=r"search_budget 0\.25 allows: .*raise search_budget, or set precision = \"auto\""
    ):
        run(changed(again, gates=FIRM, precision="int8"))
    assert snapshot(again.folder / "convert") == before


def test_a_layer_whose_range_is_broken_goes_back(again: BuildRequest, broken: Callable[[str], None]) -> None:
    graph = onnx.load(again.folder / "export" / "model.onnx").graph
    products = [node for node in graph.node if node.name in read_json(again.folder / "quantize-gpu" / "layers.json")]
    (last,) = [node for node in products if node.input[0] == products[-1].input[0]]
    shutil.rmtree(again.folder / "calibrate")
    broken(last.input[0])
    built = run(changed(again, gates=FIRM, precision="int8"))
    facts = built.step("verify-gpu")["facts"]
    assert facts["high_precision_layers"] == [last.name]
    assert facts["int8_layers"] == [node.name for node in products if node.name != last.name]
    found = onnx.load(built.folder / "convert" / "model.onnx").graph
    types = Counter(weight.data_type for weight in found.initializer if len(weight.dims) == 2)
    assert types[TensorProto.INT8] == PRODUCTS - 1
    assert [step for step, _ in steps_of(built.said)] == STEPS[:-1], "nothing to fall back on is converted"


def test_true_ranges_are_inside_the_gates_that_broken_ones_are_outside_of(first: Built) -> None:
    candidates = first.step("verify-gpu")["facts"]["candidates"]
    (int8,) = [candidate for candidate in candidates if candidate["name"] == "int8"]
    assert int8["kendall_tau"] > FIRM.kendall_tau
    assert int8["gates"][0]["found"] < FIRM.max_score_shift
