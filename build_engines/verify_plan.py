# SPDX-License-Identifier: Apache-2.0
"""An engine on its GPU beside the FP32 scores that the build left in `reference.npz`, on the same pairs and gates."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from build_engines.errors import GateError
from build_engines.plan_scoring import PlanScorer
from build_engines.quality import mean_ndcg
from build_engines.serving_code import graph_scoring
from build_engines.table import Gates, Reranker
from build_engines.verify import Scores, compare


@dataclass(frozen=True, slots=True)
class Reference:
    """Verification pairs as requests, one a query, with their FP32 scores and, where known, grades."""

    requests: list[graph_scoring.PaddedPairs]
    fp32: Scores
    grades: list[list[float] | None]

    def ndcg(self, scores: Scores) -> float | None:
        """Return the mean nDCG@10 over the queries whose grades are known; None where there are none."""
        return mean_ndcg(scores, self.grades)


def read_reference(path: Path) -> Reference:
    """Read what `verify_gpu` wrote."""
    with np.load(path, allow_pickle=False) as stored:
        arrays = dict(stored)
    ends = np.cumsum(arrays["documents"])[:-1]
    lengths = np.split(arrays["lengths"], ends)
    names = [name for name in arrays if name in ("input_ids", "attention_mask", "token_type_ids")]
    tokens = {name: iter(np.split(arrays[name], np.cumsum(arrays["lengths"])[:-1])) for name in names}
    requests = []
    for rows in lengths:
        padded = {name: np.zeros((len(rows), int(rows.max())), dtype=np.int64) for name in names}
        for row, length in enumerate(rows):
            for name in names:
                padded[name][row, :length] = next(tokens[name])
        requests.append(graph_scoring.PaddedPairs(padded, rows))
    grades = [None if np.isnan(g).any() else g.tolist() for g in np.split(arrays["grades"], ends)]
    return Reference(requests, np.split(arrays["scores"], ends), grades)


def verify_plan(reranker: Reranker, plan: Path, reference: Path, gates: Gates) -> dict[str, Any]:
    """Score the verification pairs with a plan; return its gates and its seconds a batch for each bucket.

    Raises GateError where the plan's scores are not finite or outside the gates.
    """
    known = read_reference(reference)
    with PlanScorer(plan, reranker.buckets, reranker.max_batch_size) as scorer:
        scores = [found[:, 0] for found in scorer.score(known.requests)]
        broken = sum(int((~np.isfinite(values)).sum()) for values in scores)
        if broken:
            raise GateError(
                f"{reranker.name}: {broken} scores of {plan} are not finite on this GPU, though the graph's were. Set "
                'base_precision = "bf16" in rerankers.toml and build again.'
            )
        found = compare(known, known.fp32, scores, gates)
        failed = [str(gate) for gate in found if not gate.passed]
        if failed:
            raise GateError(
                f"{reranker.name}: {plan} is outside its gates on this GPU, though its graph was inside: "
                f"{'; '.join(failed)}. Build with --precision {reranker.base_precision}, or report the graph to NVIDIA."
            )
        seconds = [_seconds(scorer, reranker, bucket, known.requests) for bucket in reranker.buckets]
    return {"gates": [asdict(gate) | {"passed": gate.passed} for gate in found], "seconds_per_batch": seconds}


def _seconds(scorer: PlanScorer, reranker: Reranker, bucket: int, requests: list[graph_scoring.PaddedPairs]) -> float:
    pairs = max(requests, key=lambda request: -abs(bucket - int(request.lengths.max())))
    return scorer.seconds_per_batch(pairs, bucket, reranker.opt_batch_size)
