# SPDX-License-Identifier: Apache-2.0
"""The committed config.pbtxt of each scorer keeps what Triton's TensorRT backend asks for; no GPU says so here.

The rules come from that backend's documentation and source. What tests/unit/test_repository.py holds is not repeated.
"""

from __future__ import annotations

import tomllib
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from build_engines.places import REPOSITORY
from build_engines.table import DEFAULT_TABLE
from tests.unit.tiny_models import WRITERS, TinyModels

# Read without the project's own code.
_TABLE = tomllib.loads(DEFAULT_TABLE.read_text(encoding="utf-8"))
del _TABLE["prompts"]
ROWS = {name: _TABLE["defaults"] | row for name, row in _TABLE.items() if name != "defaults"}


@pytest.fixture(params=ROWS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def config(name: str, model: str) -> Any:
    path = REPOSITORY / f"{name}_{model}" / "config.pbtxt"
    return text_format.Parse(path.read_text(encoding="utf-8"), pb.ModelConfig())


def test_a_plan_is_loaded_by_its_name_on_the_tensorrt_backend(name: str) -> None:
    scorer = config(name, "scorer")
    assert (scorer.platform, scorer.default_model_filename) == ("tensorrt_plan", "model.plan")
    # Another file for some GPUs would be one that no manifest knows.
    assert not scorer.cc_model_filenames


def test_one_instance_a_gpu_has_every_profile_once(name: str) -> None:
    (group,) = config(name, "scorer").instance_group
    assert (group.kind, group.count) == (pb.ModelInstanceGroup.KIND_GPU, 1)
    # Every GPU that Triton sees: the check before serving looks at all of them.
    assert not group.gpus
    # A list without one of the numbers would score that bucket with another profile, or refuse it.
    assert sorted(map(int, group.profile)) == list(range(len(ROWS[name]["buckets"])))


def test_what_the_tokenizer_gives_is_what_the_engine_takes(name: str) -> None:
    # No conversion on the way: a type that differs is an error at load or at the first request.
    given = {output.name: (output.data_type, list(output.dims)) for output in config(name, "tokenizer").output}
    for tensor in config(name, "scorer").input:
        assert given[tensor.name] == (tensor.data_type, list(tensor.dims)) == (pb.TYPE_INT64, [-1])


def test_tensors_are_passed_as_they_are(name: str) -> None:
    scorer = config(name, "scorer")
    for tensor in (*scorer.input, *scorer.output):
        assert not tensor.HasField("reshape")
        assert not tensor.is_shape_tensor
    assert not any(tensor.optional for tensor in scorer.input)
    # They describe ragged batches, which an engine of padded rows cannot read.
    assert not scorer.batch_input
    assert not scorer.batch_output


def test_no_cuda_graph_could_fill_a_batch_with_stale_rows(name: str) -> None:
    # Graphs of fixed shapes, run for smaller batches (graph_lower_bound), compute on whatever is in memory.
    assert not config(name, "scorer").HasField("optimization")


def test_batches_are_neither_waited_for_nor_cached(name: str) -> None:
    scorer = config(name, "scorer")
    assert scorer.dynamic_batching.max_queue_delay_microseconds == 0
    assert not scorer.dynamic_batching.preferred_batch_size
    # Triton's cache does not tell [2, 3] from [3, 2].
    assert not scorer.response_cache.enable


def test_every_bucket_is_warmed_with_zeros_for_every_input(name: str) -> None:
    scorer = config(name, "scorer")
    assert [run.batch_size for run in scorer.model_warmup] == [scorer.max_batch_size] * len(ROWS[name]["buckets"])
    for run, bucket in zip(scorer.model_warmup, ROWS[name]["buckets"], strict=True):
        assert set(run.inputs) == {tensor.name for tensor in scorer.input}
        for tensor in run.inputs.values():
            assert (tensor.data_type, list(tensor.dims)) == (pb.TYPE_INT64, [bucket])
            # Random numbers lie beyond the vocabulary.
            assert tensor.WhichOneof("input_data_type") == "zero_data"


@pytest.mark.parametrize("family", WRITERS)
def test_a_warm_up_of_zeros_gives_finite_scores(tiny: TinyModels, family: str) -> None:
    graph = ort.InferenceSession(tiny.graph(family))
    zeros = np.zeros((2, 32), dtype=np.int64)
    (scores,) = graph.run(None, {tensor.name: zeros for tensor in graph.get_inputs()})
    assert np.isfinite(scores).all()
