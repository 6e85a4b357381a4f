# SPDX-License-Identifier: Apache-2.0
"""What cannot become an engine is refused with a sentence that names the node, the input, the file or the limit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from onnx import TensorProto

from build_engines.engine import Profile
from build_engines.errors import EngineError
from build_engines.table import EngineOptions, Reranker
from tests.tensorrt.graphs import (
    exported,
    quantised,
    with_external_weights,
    with_input,
    with_unknown_operator,
)
from tests.tensorrt.without_gpu import TensorRT

ONE_PROFILE = [Profile(length=32, opt_batch=4, max_batch=8)]


def test_asymmetric_int8_is_refused_at_its_node(tensorrt: TensorRT, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"QuantizeLinear 'to_int8': .*Non-zero zero point") as caught:
        tensorrt.build(quantised(tmp_path, zero_point=3), ONE_PROFILE)
    assert "INT8 symmetric" in str(caught.value)


def test_an_unknown_operator_is_refused_at_its_node(tensorrt: TensorRT, tmp_path: Path) -> None:
    with pytest.raises(
        EngineError, match=r"every operator must be one that TensorRT knows.*Strange 'encoder/strange': "
    ):
        tensorrt.build(with_unknown_operator(tmp_path), ONE_PROFILE)


@pytest.mark.parametrize(
    ("shape", "input_type", "said"),
    [
        (["batch"], TensorProto.INT64, "INT64[-1]"),
        (["batch", "length", 4], TensorProto.INT64, "INT64[-1, -1, 4]"),
        (["batch", 16], TensorProto.INT64, "INT64[-1, 16]"),
        (["batch", "length"], TensorProto.INT32, "INT32[-1, -1]"),
        (["batch", "length"], TensorProto.FLOAT, "FLOAT[-1, -1]"),
    ],
)
def test_an_input_other_than_int64_batch_by_length_is_refused(
    tensorrt: TensorRT, tmp_path: Path, shape: Sequence[str | int], input_type: int, said: str
) -> None:
    with pytest.raises(EngineError, match=re.escape(f"is {said}. A scorer takes INT64[batch, length]")) as caught:
        tensorrt.build(with_input(tmp_path, shape, input_type), ONE_PROFILE)
    assert "Input 'ids'" in str(caught.value)


def test_a_profile_above_what_tensorrt_can_count_is_refused(tensorrt: TensorRT, tmp_path: Path) -> None:
    with pytest.raises(
        EngineError, match=r"refuses a profile of the shapes .*2147483648.*Lower the bucket.*min is incon"
    ):
        tensorrt.build(quantised(tmp_path, zero_point=0), [Profile(length=1 << 31, opt_batch=1, max_batch=1)])


def test_a_graph_that_does_not_fit_its_profile_is_refused_in_the_words_of_tensorrt(
    tensorrt: TensorRT, tmp_path: Path
) -> None:
    # Its weights are 32 numbers wide.
    with pytest.raises(EngineError, match=r"cannot build an engine from .*model\.onnx\. TensorRT said: .*add"):
        tensorrt.build(with_external_weights(tmp_path), [Profile(length=48, opt_batch=1, max_batch=1)])


def test_an_engine_without_a_profile_is_refused(tensorrt: TensorRT, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="at least one profile"):
        tensorrt.build(quantised(tmp_path, zero_point=0), [])


def test_missing_weights_are_named(tensorrt: TensorRT, tmp_path: Path) -> None:
    graph = with_external_weights(tmp_path)
    (tmp_path / "model.onnx.data").unlink()
    with pytest.raises(EngineError, match=r"weights of .*model\.onnx are missing: no model\.onnx\.data lies beside it"):
        tensorrt.build(graph, ONE_PROFILE)


def test_weights_that_are_cut_short_are_named(tensorrt: TensorRT, tmp_path: Path) -> None:
    graph = with_external_weights(tmp_path)
    (tmp_path / "model.onnx.data").write_bytes(b"1234")
    with pytest.raises(EngineError, match=r"TensorRT said: .*model\.onnx\.data \(offset=0, length=128, file size=4\)"):
        tensorrt.build(graph, ONE_PROFILE)


def test_too_small_a_workspace_is_refused_with_the_field_to_change(
    tensorrt: TensorRT, rows: dict[str, Reranker], tmp_path: Path
) -> None:
    with pytest.raises(
        EngineError, match=r"too little memory .*engine\.workspace_gib is 0\.001 GiB\. Raise it or set 0"
    ):
        tensorrt.build(exported(rows["tiny_bert"]), ONE_PROFILE, EngineOptions(workspace_gib=0.001), out=tmp_path)
    assert not list(tmp_path.iterdir())
