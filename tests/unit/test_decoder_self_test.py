# SPDX-License-Identifier: Apache-2.0
"""A decoder is verified like any graph, and its self-test tells it from another one when the scorer loads it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from build_engines.pairs import Candidates
from build_engines.serving_code import graph_scoring
from build_engines.verify import Verifier, verify
from tests.unit.test_decoder_export import score
from tests.unit.tiny_models import TinyModels
from tests.unit.written_prompts import random_pairs, whole_ids

GOOD_PAIR = ("what is a panda?", "The giant panda is a bear species endemic to China.")


@pytest.fixture(scope="module")
def facts(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the build keeps of the tiny Qwen2, verified in FP32."""
    model = tiny.model("qwen2")
    reranker = dataclasses.replace(model.reranker, precision="fp32")
    pairs = random_pairs(91, 12)
    candidates = [Candidates(query, tuple(document for _, document in pairs[:4])) for query, _ in pairs[:3]]
    out = tmp_path_factory.mktemp("verify")
    verifier = Verifier(reranker, model.pairing, int(model.checkpoint.config["vocab_size"]), candidates)
    found = verify(verifier, tiny.graph("qwen2"), None, out, lambda: None)
    kept: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert kept == found
    return kept


def scorer(graph: Path) -> graph_scoring.GraphScorer:
    return graph_scoring.GraphScorer(graph, threads=1, tokens_per_run=4096)


def test_the_pair_of_the_self_test_is_the_known_one_in_its_prompt(tiny: TinyModels, facts: dict[str, Any]) -> None:
    test, ids = facts["self_test"], whole_ids("qwen2", tiny.model("qwen2").tokenizer, *GOOD_PAIR)
    assert test["arrays"] == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    assert test["score"] == pytest.approx(float(score(tiny, "qwen2", [ids])[0]), abs=1e-4)
    assert 0 < test["allowed"] <= 0.01
    assert facts["fp32_neighbour_effect"] < 1e-4


def test_the_verified_graph_passes_its_self_test(tiny: TinyModels, facts: dict[str, Any]) -> None:
    scorer(tiny.graph("qwen2")).check(facts["self_test"])


@pytest.mark.parametrize("family", ["qwen3", "qwen2_classifier"])
def test_another_models_graph_fails_it(tiny: TinyModels, facts: dict[str, Any], family: str) -> None:
    with pytest.raises(graph_scoring.SelfTestError, match="The graph or its runtime is damaged, or another"):
        scorer(tiny.graph(family)).check(facts["self_test"])


def negated(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    return -weight


def shuffled(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.random.default_rng(0).permutation(weight)


def nan(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.full_like(weight, np.nan)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("row", negated),
        ("row", nan),
        ("model.norm.weight", shuffled),
        ("model.layers.0.self_attn.q_proj.bias", shuffled),
    ],
)
def test_a_graph_with_another_weight_fails_it(
    tiny: TinyModels,
    facts: dict[str, Any],
    tmp_path: Path,
    name: str,
    change: Callable[[NDArray[np.float32]], NDArray[np.float32]],
) -> None:
    graph = onnx.load(tiny.graph("qwen2"))
    (weight,) = (weight for weight in graph.graph.initializer if weight.name == name)
    weight.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(weight)), name))
    onnx.save(graph, tmp_path / "model.onnx")
    with pytest.raises(graph_scoring.SelfTestError) as caught:
        scorer(tmp_path / "model.onnx").check(facts["self_test"])
    assert f"scored {facts['self_test']['score']:.4f} when it was built" in str(caught.value)


def test_a_score_at_the_bound_passes_and_one_beyond_it_does_not(tiny: TinyModels, facts: dict[str, Any]) -> None:
    test, loaded = facts["self_test"], scorer(tiny.graph("qwen2"))
    for sign in (1, -1):
        loaded.check(test | {"score": test["score"] + sign * 0.9 * test["allowed"]})
        with pytest.raises(graph_scoring.SelfTestError):
            loaded.check(test | {"score": test["score"] + sign * 1.1 * test["allowed"]})
