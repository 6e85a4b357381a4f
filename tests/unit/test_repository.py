# SPDX-License-Identifier: Apache-2.0
"""The committed model repository is what the table says, and what Triton accepts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from build_engines.__main__ import main
from build_engines.configs import pinned_version, repository_files
from build_engines.places import REPOSITORY
from build_engines.table import Reranker, read_table

TABLE = read_table()
CONFIGS = sorted(str(path.relative_to(REPOSITORY)) for path in REPOSITORY.rglob("*.pbtxt"))
SUFFIXES = ("", "_tokenizer", "_scorer")
BYTES = {"QUERY": pb.TYPE_STRING, "DOCUMENT": pb.TYPE_STRING}


@pytest.fixture(params=TABLE)
def reranker(request: pytest.FixtureRequest) -> Reranker:
    return TABLE[request.param]


def parse(name: str) -> Any:
    return text_format.Parse((REPOSITORY / name).read_text(encoding="utf-8"), pb.ModelConfig())


def configs(reranker: Reranker) -> list[Any]:
    names = ("config.pbtxt", "configs/cpu.pbtxt")
    return [parse(f"{reranker.name}{suffix}/{names[0]}") for suffix in SUFFIXES] + [
        parse(f"{reranker.scorer}/{names[1]}")
    ]


def types(tensors: Any) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in tensors}


def test_committed_configs_are_what_the_table_generates(reranker: Reranker) -> None:
    for name, text in repository_files(reranker, pinned_version(REPOSITORY, reranker)).items():
        assert (REPOSITORY / name).read_text(encoding="utf-8") == text, "run: python -m build_engines configs"


def test_every_config_belongs_to_a_row() -> None:
    known = {name for reranker in TABLE.values() for name in repository_files(reranker, 1)}
    assert set(CONFIGS) == known


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_parses_and_names_its_folder(name: str) -> None:
    assert parse(name).name == name.split("/", maxsplit=1)[0]


def test_the_root_holds_models_and_nothing_else() -> None:
    assert {path.name for path in REPOSITORY.iterdir()} == {name + suffix for name in TABLE for suffix in SUFFIXES}
    assert all(path.is_dir() for path in REPOSITORY.iterdir())


def test_committed_files_are_the_known_ones(reranker: Reranker) -> None:
    git = shutil.which("git")
    if git is None or not (REPOSITORY.parent / ".git").exists():
        pytest.skip("not a git checkout: nothing tells committed files from built ones")
    listed = subprocess.run([git, "ls-files", "."], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    name = reranker.name
    wanted = {f"{name}/1/.gitkeep", *repository_files(reranker, 1)}
    wanted |= {f"{name}_tokenizer/1/{file}.py" for file in ("model", "pair_encoding", "text_ids")}
    wanted |= {f"{name}_scorer/1/{file}.py" for file in ("model", "graph_scoring")}
    assert {path for path in listed.split() if path.split("/")[0] in {name + suffix for suffix in SUFFIXES}} == wanted


def test_every_model_has_a_numeric_version_folder(reranker: Reranker) -> None:
    for suffix in SUFFIXES:
        folders = [path.name for path in (REPOSITORY / f"{reranker.name}{suffix}").iterdir() if path.is_dir()]
        assert "1" in folders
        assert all(name == "configs" or (name.isdigit() and not name.startswith("0")) for name in folders)


def test_code_of_other_rerankers_links_to_the_first_ones() -> None:
    for path in REPOSITORY.glob("*/1/*.py"):
        shared = path.parent.parent.name.startswith("light_reranker")
        assert path.is_symlink() != shared
        if not shared:
            target = path.readlink()
            assert not target.is_absolute()
            kind = path.parent.parent.name.rsplit("_", 1)[1]
            assert target == Path("../..") / f"light_reranker_{kind}" / "1" / path.name
            assert path.resolve().is_file()


def test_the_ensemble_pins_both_steps_to_one_version_that_both_models_serve(reranker: Reranker) -> None:
    ensemble, *models = configs(reranker)
    versions = {step.model_version for step in ensemble.ensemble_scheduling.step}
    assert len(versions) == 1
    assert min(versions) >= 1
    assert [step.model_name for step in ensemble.ensemble_scheduling.step] == [reranker.tokenizer, reranker.scorer]
    for model in models:
        assert set(model.version_policy.specific.versions) == versions


def test_batch_sizes_are_equal(reranker: Reranker) -> None:
    assert {config.max_batch_size for config in configs(reranker)} == {reranker.max_batch_size}


def test_tensors_fit_from_model_to_model(reranker: Reranker) -> None:
    ensemble, tokenizer, gpu, cpu = configs(reranker)
    arrays = {"input_ids": pb.TYPE_INT64, "attention_mask": pb.TYPE_INT64}
    arrays |= {"token_type_ids": pb.TYPE_INT64} if reranker.segment_ids else {}
    assert types(ensemble.input) == types(tokenizer.input) == BYTES
    assert types(gpu.input) == types(cpu.input) == arrays
    assert types(tokenizer.output) == arrays | {"TOKENS": pb.TYPE_INT32}
    assert types(gpu.output) == types(cpu.output) == {"SCORE": pb.TYPE_FP32}
    assert types(ensemble.output) == {"SCORE": pb.TYPE_FP32, "TOKENS": pb.TYPE_INT32}
    for config in (ensemble, tokenizer, gpu, cpu):
        for tensor in (*config.input, *config.output):
            assert list(tensor.dims) == ([-1] if tensor.name in arrays else [1])


def test_the_ensemble_connects_every_tensor_under_its_own_name(reranker: Reranker) -> None:
    ensemble, tokenizer, scorer, _ = configs(reranker)
    for step, model in zip(ensemble.ensemble_scheduling.step, (tokenizer, scorer), strict=True):
        assert dict(step.input_map) == {name: name for name in types(model.input)}
        assert dict(step.output_map) == {name: name for name in types(model.output)}


def test_every_bucket_has_a_profile_and_a_warm_up(reranker: Reranker) -> None:
    _, _, gpu, _ = configs(reranker)
    (group,) = gpu.instance_group
    assert list(group.profile) == [str(index) for index in range(len(reranker.buckets))]
    assert [list(run.inputs["input_ids"].dims) for run in gpu.model_warmup] == [[size] for size in reranker.buckets]
    assert all(run.batch_size == reranker.max_batch_size for run in gpu.model_warmup)
    assert all(set(run.inputs) == set(types(gpu.input)) for run in gpu.model_warmup)


def test_only_the_cpu_scorer_takes_ragged_batches(reranker: Reranker) -> None:
    _, _, gpu, cpu = configs(reranker)
    assert all(tensor.allow_ragged_batch for tensor in cpu.input)
    assert not any(tensor.allow_ragged_batch for tensor in gpu.input)


@pytest.mark.parametrize("name", CONFIGS)
def test_batching_is_dynamic_without_a_queue_policy_which_would_make_triton_wait_between_batches(name: str) -> None:
    config = parse(name)
    if config.platform != "ensemble":
        assert config.HasField("dynamic_batching")
        assert not config.dynamic_batching.HasField("default_queue_policy")
        assert not config.dynamic_batching.priority_queue_policy
        assert config.dynamic_batching.priority_levels == 0


def test_configs_are_written_once_and_then_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", "--repository", str(tmp_path)]) == 0
    wrote = capsys.readouterr().out.splitlines()
    assert {line.removeprefix(f"wrote {tmp_path}/") for line in wrote} == set(CONFIGS)
    files = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["configs", "--repository", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.is_file()} == files


def test_configs_keep_the_version_that_is_pinned(tmp_path: Path) -> None:
    reranker = TABLE["light_reranker"]
    for name, text in repository_files(reranker, 7).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert main(["configs", "--repository", str(tmp_path)]) == 0
    assert pinned_version(tmp_path, reranker) == 7
