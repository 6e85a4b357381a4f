# SPDX-License-Identifier: Apache-2.0
"""What the exporter writes becomes an engine: every bucket a profile, and the tensors that config.pbtxt declares."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from build_engines.engine import Profile, profiles_of
from build_engines.errors import EngineError
from build_engines.table import EngineOptions, Reranker
from tests.tensorrt.graphs import exported, quantised, with_external_weights
from tests.tensorrt.without_gpu import ROOT, TensorRT

ONE_PROFILE = [Profile(length=32, opt_batch=4, max_batch=8)]


@pytest.mark.parametrize("name", ["tiny_bert", "tiny_xlm_roberta"])
def test_every_bucket_of_a_family_becomes_a_profile(tensorrt: TensorRT, rows: dict[str, Reranker], name: str) -> None:
    reranker = rows[name]
    facts = tensorrt.build(exported(reranker), profiles_of(reranker))
    assert [profile["length"] for profile in facts["profiles"]] == [32, 128, 512]
    ids = ["input_ids", "attention_mask"] + (["token_type_ids"] if reranker.segment_ids else [])
    assert facts["inputs"] == dict.fromkeys(ids, "INT64")
    assert facts["outputs"] == {"SCORE": "FLOAT"}
    assert facts["tensorrt"] == "11.4.0.106"
    assert facts["layers"] > 50


def test_the_light_reranker_builds_and_its_tensors_are_those_of_the_committed_config(
    tensorrt: TensorRT, rows: dict[str, Reranker], tmp_path: Path
) -> None:
    light = rows["light_reranker"]
    facts = tensorrt.build(exported(light), profiles_of(light), light.engine, out=tmp_path)
    config = text_format.Parse(
        (ROOT / "model_repository" / light.scorer / "config.pbtxt").read_text(encoding="utf-8"), pb.ModelConfig()
    )
    triton_names = {"INT64": pb.TYPE_INT64, "FLOAT": pb.TYPE_FP32}
    assert {name: triton_names[kind] for name, kind in facts["inputs"].items()} == {
        tensor.name: tensor.data_type for tensor in config.input
    }
    assert {name: triton_names[kind] for name, kind in facts["outputs"].items()} == {
        tensor.name: tensor.data_type for tensor in config.output
    }
    (group,) = config.instance_group
    assert [int(index) for index in group.profile] == list(range(len(facts["profiles"])))
    assert {profile["max_batch"] for profile in facts["profiles"]} == {config.max_batch_size}
    # 23 M parameters of 4 bytes.
    assert facts["plan_bytes"] > 80_000_000
    assert [file.name for file in tmp_path.iterdir()] == ["model.plan"]
    assert (tmp_path / "model.plan").stat().st_size == facts["plan_bytes"]


def test_symmetric_int8_is_accepted(tensorrt: TensorRT, tmp_path: Path) -> None:
    assert tensorrt.build(quantised(tmp_path, zero_point=0), ONE_PROFILE)["outputs"] == {"SCORE": "FLOAT"}


def test_weights_beside_the_graph_are_found(tensorrt: TensorRT, tmp_path: Path) -> None:
    assert tensorrt.build(with_external_weights(tmp_path), ONE_PROFILE)["plan_bytes"] > 0


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(workspace_gib=4, optimization_level=0),
        EngineOptions(optimization_level=5, hardware_compatibility="ampere_plus"),
        EngineOptions(hardware_compatibility="same_compute_capability"),
    ],
)
def test_every_option_is_one_that_the_builder_takes(tensorrt: TensorRT, tmp_path: Path, options: EngineOptions) -> None:
    assert tensorrt.build(quantised(tmp_path, zero_point=0), ONE_PROFILE, options)["plan_bytes"] > 0


def test_a_version_compatible_engine_asks_for_the_lean_runtime(tensorrt: TensorRT, tmp_path: Path) -> None:
    # The flag has arrived when TensorRT looks for the library that it packs into such plans; RTX comes without it.
    with pytest.raises(EngineError, match="libnvinfer_lean"):
        tensorrt.build(quantised(tmp_path, zero_point=0), ONE_PROFILE, EngineOptions(version_compatible=True))


def test_a_timing_cache_is_written_and_written_again(tensorrt: TensorRT, tmp_path: Path) -> None:
    # Whether its timings are used cannot be seen here: without a GPU there are none.
    graph, cache = quantised(tmp_path, zero_point=0), tmp_path / "caches" / "timing.cache"
    tensorrt.build(graph, ONE_PROFILE, timing_cache=cache)
    written = cache.read_bytes()
    assert written
    tensorrt.build(graph, ONE_PROFILE, timing_cache=cache)
    assert cache.stat().st_size >= len(written)
    assert [file.name for file in cache.parent.iterdir()] == ["timing.cache"]


def test_a_corrupt_timing_cache_is_replaced_by_a_whole_one(tensorrt: TensorRT, tmp_path: Path) -> None:
    graph, cache = quantised(tmp_path, zero_point=0), tmp_path / "timing.cache"
    cache.write_bytes(b"not a timing cache")
    assert tensorrt.build(graph, ONE_PROFILE, timing_cache=cache)["plan_bytes"] > 0
    assert b"not a timing cache" not in cache.read_bytes()
