# SPDX-License-Identifier: Apache-2.0
"""Plans score what their graph scores on ONNX Runtime: in every profile, in every batch, wherever a row stands.

Without a GPU or TensorRT the whole file skips, or fails if TRITON_RERANK_REQUIRE_GPU=1.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
from polygraphy.backend.trt import EngineFromBytes, TrtRunner
from polygraphy.comparator import Comparator, SimpleCompareFunc

from build_engines.gpu import find_gpu
from build_engines.plan_scoring import PlanScorer
from build_engines.serving_code import graph_scoring
from tests.gpu.plans import TOLERANCE, Case, Plan, build, missing, sample

if os.environ.get("TRITON_RERANK_REQUIRE_GPU") != "1" and (reason := missing()):
    pytest.skip(f"plans cannot run here: {reason}", allow_module_level=True)

CASES = [
    Case("tiny_xlm_roberta", "fp32"),
    Case("tiny_xlm_roberta", "fp16"),
    Case("tiny_bert", "fp32"),
    Case("tiny_bert", "fp16"),
    Case("light_reranker", "fp32"),
    Case("light_reranker", "fp16"),
    Case("light_reranker", "int8"),
]
every_plan = pytest.mark.parametrize("plan", CASES, indirect=True, ids=str, scope="session")


def lengths(rows: int, low: int, high: int) -> list[int]:
    """Return one row of `high` tokens, and others of at least `low`."""
    return [high, *np.random.default_rng(rows).integers(low, high + 1, rows - 1).tolist()]


def batches(plan: Plan) -> tuple[int, ...]:
    return (1, 2, 7, plan.reranker.max_batch_size)


def opened(plan: Plan) -> PlanScorer:
    return PlanScorer(plan.path, plan.reranker.buckets, plan.reranker.max_batch_size)


def assert_close(found: NDArray[np.float32], expected: NDArray[np.float32], spread: float) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * spread)


def compared(runners: list[Any], pairs: list[graph_scoring.PaddedPairs]) -> None:
    """Run the same padded inputs on two of Polygraphy's runners and hold the second's scores against the first's."""
    results = Comparator.run(runners, data_loader=[request.arrays for request in pairs])
    assert Comparator.validate(results, check_inf=True, check_nan=True)
    reference = np.concatenate([iteration["SCORE"] for iteration in results[runners[0].name]])
    spread = float(reference.std())
    assert spread > 0.1
    close = SimpleCompareFunc(atol=TOLERANCE * spread, rtol=0.0, check_error_stat="max")
    assert Comparator.compare_accuracy(results, compare_func=close)


@every_plan
def test_every_profile_scores_what_onnx_runtime_scores_in_every_batch(plan: Plan) -> None:
    engine = EngineFromBytes(plan.path.read_bytes())()
    session = SessionFromOnnx(str(plan.reference))()
    for profile, bucket in enumerate(plan.reranker.buckets):
        # From 4 tokens on: rows that are nearly all padding are where FP16 masks have gone wrong.
        pairs = [plan.pairs(lengths(rows, 4, bucket), bucket, rows) for rows in batches(plan)]
        compared([OnnxrtRunner(session), TrtRunner(engine, optimization_profile=profile)], pairs)


@every_plan
def test_a_row_scores_alone_what_it_scores_in_a_batch(plan: Plan) -> None:
    shortest = 4
    with opened(plan) as scorer:
        for bucket in plan.reranker.buckets:
            # Rows too long for the bucket before: alone they run in the same profile. The largest batch comes first.
            crowds = [plan.pairs(lengths(rows, shortest, bucket), bucket, rows) for rows in reversed(batches(plan))]
            together = scorer.score(crowds)
            spread = float(together[0].std())
            for crowd, scores in zip(crowds, together, strict=True):
                alone = scorer.score([single(crowd, row) for row in range(len(scores))])
                assert_close(np.concatenate(alone), scores, spread)
            shortest = bucket + 1


@every_plan
def test_rows_that_change_places_take_their_scores_along(plan: Plan) -> None:
    with opened(plan) as scorer:
        for bucket in plan.reranker.buckets:
            rows = plan.reranker.max_batch_size
            crowd = plan.pairs(lengths(rows, 4, bucket), bucket)
            order = np.random.default_rng(1).permutation(rows)
            straight, mixed = scorer.score([crowd, taken(crowd, order)])
            assert_close(mixed, straight[order], float(straight.std()))


@every_plan
def test_a_long_request_scores_like_onnx_runtime_and_short_rows_like_in_their_own_bucket(plan: Plan) -> None:
    limit = plan.reranker.max_length
    rows = plan.reranker.max_batch_size + 3
    crowd = plan.pairs(lengths(rows, 4, limit), limit)
    reference = graph_scoring.GraphScorer(plan.reference, threads=graph_scoring.available_threads(), tokens_per_run=512)
    (expected,) = reference.score([crowd])
    with opened(plan) as scorer:
        (together,) = scorer.score([crowd])
        own_bucket = np.concatenate(scorer.score([single(crowd, row) for row in range(rows)]))
    assert_close(together, expected, float(expected.std()))
    assert_close(own_bucket, expected, float(expected.std()))


def test_int8_scores_real_texts_like_fp16_and_both_are_timed(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [Case("light_reranker", precision) for precision in ("int8", "fp16")]
    plans = [build(case, tmp_path_factory.mktemp(str(case))) for case in cases]
    reranker = plans[0].reranker
    requests = sample(plans[0], tmp_path_factory.mktemp("pairing"))
    lines = ["", f"{find_gpu()}, {reranker.name}: median ms of a batch, with ids copied in and scores out"]
    with opened(plans[0]) as int8, opened(plans[1]) as fp16:
        scores = [np.concatenate(scorer.score(requests)) for scorer in (int8, fp16)]
        for bucket, batch in itertools.product(reranker.buckets, (1, 8, reranker.max_batch_size)):
            pairs = plans[0].pairs([bucket] * batch, bucket)
            a, b = (1000 * scorer.seconds_per_batch(pairs, bucket, batch) for scorer in (int8, fp16))
            lines.append(f"{batch:3} pairs of {bucket:3} tokens: INT8 {a:7.3f}, FP16 {b:7.3f}, {b / a:.2f} x as fast")
    with capsys.disabled():
        sys.stdout.write("\n".join([*lines, ""]))
    assert np.abs(scores[0] - scores[1]).max() <= reranker.gates.max_score_shift * scores[1].std()


def taken(pairs: graph_scoring.PaddedPairs, rows: NDArray[np.int64]) -> graph_scoring.PaddedPairs:
    return graph_scoring.PaddedPairs({name: array[rows] for name, array in pairs.arrays.items()}, pairs.lengths[rows])


def single(pairs: graph_scoring.PaddedPairs, row: int) -> graph_scoring.PaddedPairs:
    return taken(pairs, np.array([row]))
