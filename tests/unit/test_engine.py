# SPDX-License-Identifier: Apache-2.0
"""What the engine step does around TensorRT, whose place a mock takes; tests/tensorrt has the real builder."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import onnx
import pytest

from build_engines.engine import Profile, build_plan, profiles_of
from build_engines.errors import EngineError
from build_engines.table import EngineOptions, find_reranker

PROFILES = [Profile(length=32, opt_batch=4, max_batch=8)]


class Logger:
    """Like tensorrt.ILogger: a class to derive from, with the severities."""

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A TensorRT that accepts everything and builds the plan `b"plan"`."""
    trt = MagicMock(ILogger=Logger, __version__="11.4.0")
    network = trt.Builder.return_value.create_network.return_value
    network.num_inputs = network.num_outputs = 0
    config(trt).add_optimization_profile.return_value = 0
    config(trt).create_timing_cache.return_value.serialize.return_value = b"timings"
    trt.Builder.return_value.build_serialized_network.return_value = memoryview(b"plan")
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    return trt


def config(trt: Any) -> Any:
    return trt.Builder.return_value.create_builder_config.return_value


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx.ModelProto(ir_version=10).SerializeToString())
    return path


def test_each_bucket_is_a_profile_with_the_batches_of_its_row() -> None:
    row = dataclasses.replace(find_reranker("bge_reranker"), opt_batch_size=8, max_batch_size=32)
    assert profiles_of(row) == [Profile(length, 8, 32) for length in (32, 64, 128, 256, 512, 1024)]


@pytest.mark.parametrize("wrong", [(0, 1, 1), (32, 0, 8), (32, 9, 8), (32, 1, 0)])
def test_an_impossible_profile_cannot_be_made(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(EngineError, match=r"opt_batch lies from 1 to max_batch\. Correct buckets, opt_batch_size or"):
        Profile(*wrong)


def test_without_tensorrt_the_message_says_where_to_build(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorrt", "tensorrt_bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EngineError, match=r"inside the image of deploy/Dockerfile.*pip install tensorrt"):
        build_plan(graph, tmp_path, PROFILES, EngineOptions())


def test_the_bindings_alone_do(trt: Any, graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "tensorrt_bindings", trt)
    assert build_plan(graph, tmp_path / "out", PROFILES, EngineOptions())["plan_bytes"] == 4
    assert (tmp_path / "out" / "model.plan").read_bytes() == b"plan"


def test_a_builder_that_does_not_start_is_blamed_on_the_gpu(trt: Any, graph: Path, tmp_path: Path) -> None:
    def start(logger: Any) -> None:
        logger.log(Logger.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("factory function returned nullptr")

    trt.Builder.side_effect = start
    with pytest.raises(EngineError, match=r"needs an NVIDIA GPU.*nvidia-smi.*TensorRT said: CUDA init.*error: 35"):
        build_plan(graph, tmp_path, PROFILES, EngineOptions())


def test_a_refused_profile_is_given_with_its_shapes(trt: Any, graph: Path, tmp_path: Path) -> None:
    config(trt).add_optimization_profile.return_value = -1
    with pytest.raises(EngineError, match=r"refuses a profile of the shapes \[\(1, 32\), \(4, 32\), \(8, 32\)\]"):
        build_plan(graph, tmp_path, PROFILES, EngineOptions())


def test_without_a_limit_too_little_memory_is_not_blamed_on_the_limit(trt: Any, graph: Path, tmp_path: Path) -> None:
    def build(network: Any, config: Any) -> None:
        trt.Builder.call_args.args[0].log(Logger.ERROR, "OutOfMemory (Requested size was 8 bytes.)")

    trt.Builder.return_value.build_serialized_network.side_effect = build
    with pytest.raises(
        EngineError, match=r"workspace_gib is 0, which sets no limit.*free the GPU.*Requested size was 8"
    ):
        build_plan(graph, tmp_path, PROFILES, EngineOptions())


def test_stored_timings_are_offered_to_the_builder_and_new_ones_kept(trt: Any, graph: Path, tmp_path: Path) -> None:
    stored = tmp_path / "timing.cache"
    stored.write_bytes(b"earlier")
    build_plan(graph, tmp_path, PROFILES, EngineOptions(), stored)
    config(trt).create_timing_cache.assert_called_once_with(b"earlier")
    assert stored.read_bytes() == b"timings"


@pytest.mark.parametrize("unusable", ["mismatch", "unreadable"])
def test_timings_that_do_not_fit_are_left_out(trt: Any, graph: Path, tmp_path: Path, unusable: str) -> None:
    stored = tmp_path / "timing.cache"
    stored.write_bytes(b"of another GPU")
    if unusable == "mismatch":
        config(trt).set_timing_cache.side_effect = [False, True]
    else:
        config(trt).create_timing_cache.side_effect = [None, MagicMock(**{"serialize.return_value": b"timings"})]
    build_plan(graph, tmp_path, PROFILES, EngineOptions(), stored)
    assert [call.args for call in config(trt).create_timing_cache.call_args_list] == [(b"of another GPU",), (b"",)]
    assert all(call.kwargs == {"ignore_mismatch": False} for call in config(trt).set_timing_cache.call_args_list)
    assert stored.read_bytes() == b"timings"


def test_errors_about_an_old_timing_cache_are_not_given_as_the_reason_of_a_failure(
    trt: Any, graph: Path, tmp_path: Path
) -> None:
    def set_cache(cache: Any, ignore_mismatch: bool) -> bool:
        trt.Builder.call_args.args[0].log(Logger.ERROR, "the cache does not fit")
        return True

    config(trt).set_timing_cache.side_effect = set_cache
    trt.Builder.return_value.build_serialized_network.return_value = None
    with pytest.raises(EngineError, match=r"cannot build an engine from .*model\.onnx\. TensorRT said nothing\."):
        build_plan(graph, tmp_path, PROFILES, EngineOptions(), tmp_path / "timing.cache")


def test_options_reach_the_builder(trt: Any, graph: Path, tmp_path: Path) -> None:
    options = EngineOptions(
        workspace_gib=0.5, optimization_level=4, version_compatible=True, hardware_compatibility="ampere_plus"
    )
    build_plan(graph, tmp_path, PROFILES, options)
    config(trt).set_memory_pool_limit.assert_called_once_with(trt.MemoryPoolType.WORKSPACE, 512 << 20)
    config(trt).set_flag.assert_called_once_with(trt.BuilderFlag.VERSION_COMPATIBLE)
    assert config(trt).builder_optimization_level == 4
    assert config(trt).hardware_compatibility_level is trt.HardwareCompatibilityLevel.AMPERE_PLUS


def test_without_options_the_builder_keeps_its_own_limits(trt: Any, graph: Path, tmp_path: Path) -> None:
    build_plan(graph, tmp_path, PROFILES, EngineOptions())
    config(trt).set_memory_pool_limit.assert_not_called()
    config(trt).set_flag.assert_not_called()


def test_a_graph_that_is_none_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"There is no graph .*model\.onnx"):
        build_plan(tmp_path / "model.onnx", tmp_path, PROFILES, EngineOptions())
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(EngineError, match=r"model\.onnx is not an ONNX graph"):
        build_plan(tmp_path / "model.onnx", tmp_path, PROFILES, EngineOptions())
