# SPDX-License-Identifier: Apache-2.0
"""TensorRT's builder for the tests that compile, and the rerankers that they compile."""

from __future__ import annotations

import os

import pytest

from build_engines.table import Reranker, find_reranker
from tests.checkpoints import row, write_bert, write_xlm_roberta
from tests.tensorrt.without_gpu import KEPT, MissingError, TensorRT, find_tensorrt


@pytest.fixture(scope="session")
def tensorrt() -> TensorRT:
    try:
        return find_tensorrt()
    except MissingError as error:
        if os.environ.get("TRITON_RERANK_REQUIRE_TENSORRT") == "1":
            pytest.fail(f"TRITON_RERANK_REQUIRE_TENSORRT=1, but {error}")
        pytest.skip(f"no TensorRT to build with: {error}")


@pytest.fixture(scope="session")
def rows() -> dict[str, Reranker]:
    """Rows of the table by name: two tiny families with three buckets, and the real light reranker with its own."""
    tiny = {"tiny_bert": write_bert, "tiny_xlm_roberta": write_xlm_roberta}
    found = {
        name: row(name, write(KEPT / "checkpoints" / name), buckets=(32, 128, 512)) for name, write in tiny.items()
    }
    light = find_reranker("light_reranker")
    return found | {light.name: light}
