# SPDX-License-Identifier: Apache-2.0
"""What the gpu target refuses: pairs that cannot calibrate, rows that it cannot build, heads without training."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from build_engines.errors import GateError, PairsError, TableError
from build_engines.pairs import SAMPLE, Candidates
from build_engines.request import BuildRequest
from tests.checkpoints import write_bert, write_xlm_roberta
from tests.unit.gpu_builds import LOOSE, gpu_request, random_candidates, run, write_pairs
from tests.unit.test_build_export import own_scores

pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> BuildRequest:
    """A request that would succeed. A refused build leaves nothing, so that all tests share its first steps."""
    root = tmp_path_factory.mktemp("refusals")
    checkpoint = write_xlm_roberta(root / "checkpoint", layers=1)
    pairs = write_pairs(root / "pairs.jsonl", random_candidates(64, seed=3, graded=True))
    return gpu_request(root, checkpoint, pairs)


def changed(request: BuildRequest, **fields: Any) -> BuildRequest:
    return replace(request, reranker=replace(request.reranker, **fields))


def nothing_calibrated(request: BuildRequest) -> bool:
    return not any((request.folder / name).exists() for name in ("calibrate", ".calibrate.work", "handover.json"))


def test_int8_needs_pairs_of_ones_own(asked: BuildRequest) -> None:
    with pytest.raises(PairsError) as caught:
        run(replace(asked, pairs=SAMPLE))
    message = str(caught.value)
    assert message.startswith("tiny: INT8 on the gpu target is calibrated on your own queries and documents; give them")
    assert "--pairs FILE.jsonl" in message
    assert "--calibration FILE.jsonl" in message
    assert message.endswith("Without INT8: --precision fp16.")
    assert nothing_calibrated(asked)


@pytest.mark.parametrize("option", ["pairs", "calibration"])
def test_a_constant_text_cannot_calibrate(asked: BuildRequest, tmp_path: Path, option: str) -> None:
    """The same pair in hundreds of lines: ranges that fit it would cut everything else."""
    path = write_pairs(tmp_path / "constant.jsonl", [Candidates("what is a panda?", ("a bear",) * 20)] * 20)
    if option == "pairs":  # the hash of the one query lets it calibrate, that of the other lets it judge
        write_pairs(path, [Candidates(query, ("a bear",) * 20) for query in ["panda 0", "panda 3"] * 20])
    with pytest.raises(PairsError) as caught:
        run(replace(asked, pairs=path) if option == "pairs" else replace(asked, calibration=path))
    assert f"tiny: {path} gives 1 different pairs to calibrate INT8 with" in str(caught.value)
    assert "at least 128 are needed. Give a larger file of real queries and documents" in str(caught.value)
    assert "--precision fp16" in str(caught.value)
    assert nothing_calibrated(asked)


def test_one_query_cannot_be_parted(asked: BuildRequest, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "one.jsonl", [Candidates("panda 0", ("a bear", "bread"))] * 9)
    with pytest.raises(PairsError, match=r"too few different queries to be parted in two; give --calibration too\."):
        run(replace(asked, pairs=path))


def test_a_calibration_file_of_the_judging_queries_alone_is_empty(asked: BuildRequest) -> None:
    with pytest.raises(PairsError, match="gives 0 different pairs to calibrate INT8 with"):
        run(replace(asked, calibration=asked.pairs))


@pytest.mark.parametrize(("precision", "base"), [("fp32", "fp16"), ("fp16", "bf16"), ("bf16", "fp16")])
def test_precisions_that_the_gpu_target_lacks(asked: BuildRequest, precision: str, base: str) -> None:
    expected = (
        f"tiny: precision {precision} with base_precision {base} is not for the gpu target; use auto, int8 or {base}"
    )
    with pytest.raises(TableError, match=expected):
        run(changed(asked, precision=precision, base_precision=base))
    assert nothing_calibrated(asked)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_precisions_that_the_cpu_target_lacks(asked: BuildRequest, precision: str) -> None:
    expected = f"tiny: precision {precision} is for the gpu target; for cpu use auto, int8 or fp32"
    with pytest.raises(TableError, match=expected):
        run(replace(changed(asked, precision=precision), target="cpu"))
    assert not asked.repository.exists()


@pytest.mark.parametrize(("hidden", "head"), [(256, 64), (272, 68)])
def test_int8_attention_takes_heads_of_at_most_64(asked: BuildRequest, tmp_path: Path, hidden: int, head: int) -> None:
    checkpoint = write_bert(tmp_path / "checkpoint", layers=1, hidden=hidden)
    request = gpu_request(tmp_path, checkpoint, asked.pairs, int8_attention=True)
    if head <= 64:
        built = run(request)
        # Six products with weights, and two of attention.
        assert built.step("quantize-gpu")["facts"]["layers"] == 8
        assert built.step("convert")["facts"]["int8_layers"] == 8
        return
    with pytest.raises(TableError, match=r"int8_attention is for heads of at most 64, and this checkpoint's have 68"):
        run(request)


def test_int8_attention_takes_buckets_of_at_most_512(asked: BuildRequest) -> None:
    fits = changed(asked, int8_attention=True, max_length=512, buckets=(64, 512)).reranker
    assert fits.int8_attention
    with pytest.raises(TableError, match=r"int8_attention needs buckets of at most 512 tokens .* the last is 513\."):
        replace(fits, max_length=513, buckets=(64, 513))


@pytest.mark.parametrize(("target", "precision"), [("cpu", "fp32"), ("cpu", "int8"), ("gpu", "fp16"), ("gpu", "int8")])
def test_a_head_that_was_never_trained_is_refused(asked: BuildRequest, target: Any, precision: str) -> None:
    request = replace(changed(asked, precision=precision, ndcg_above_chance=0.02), target=target)
    with pytest.raises(GateError) as caught:
        run(request)
    message = str(caught.value)
    assert message.startswith("tiny: the checkpoint ranks by chance: its nDCG@10 is ")
    assert "above that of a random order. Its head was never trained, or the pairs are not for it" in message
    assert message.endswith("or set ndcg_above_chance = -1 in rerankers.toml.")
    assert not (request.folder / "handover.json").exists()
    assert not request.repository.exists()


def test_the_same_head_passes_unasked_or_where_nothing_is_graded(asked: BuildRequest, tmp_path: Path) -> None:
    shutil.copytree(asked.folder, tmp_path / "build" / "tiny")
    request = replace(changed(asked, precision="fp16"), build_folder=tmp_path / "build")
    assert run(changed(request, ndcg_above_chance=-1.0)).result == request.folder / "convert" / "model.onnx"
    ungraded = write_pairs(tmp_path / "pairs.jsonl", random_candidates(12, seed=4))
    assert run(replace(changed(request, ndcg_above_chance=0.02), pairs=ungraded)).result


def test_grades_that_the_scores_follow_are_no_chance(asked: BuildRequest, tmp_path: Path) -> None:
    """Grades taken from the checkpoint's own ranking: the best reranker that these pairs could have."""
    shutil.copytree(asked.folder, tmp_path / "build" / "tiny")
    request = replace(changed(asked, precision="fp16", base_gates=LOOSE), build_folder=tmp_path / "build")
    graded = own_grades(request)
    trained = changed(replace(request, pairs=write_pairs(tmp_path / "pairs.jsonl", graded)), ndcg_above_chance=0.02)
    facts = run(trained).step("verify-gpu")["facts"]
    assert facts["fp32_ndcg_at_10"] == 1.0
    assert facts["fp32_lead_over_chance"] > 0.1


def own_grades(request: BuildRequest) -> list[Candidates]:
    """Grade 1 for the three best documents of each query, by transformers' own tokenizer and model."""
    folder = Path(request.reranker.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for c in random_candidates(12, seed=5):
        queries = [c.query] * len(c.documents)
        cut: Any = {"truncation": "only_second", "max_length": 128, "padding": True}
        scores = own_scores(folder, dict(tokenizer(queries, list(c.documents), return_tensors="np", **cut)))[:, 0]
        best = sorted(scores)[-3]
        found.append(Candidates(c.query, c.documents, tuple(float(score >= best) for score in scores)))
    return found
