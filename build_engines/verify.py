# SPDX-License-Identifier: Apache-2.0
"""Step `verify`: the candidate graph beside the FP32 one on the same real pairs -> `report.json`, or a refusal."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from build_engines.configs import TOKENS_PER_RUN
from build_engines.errors import GateError, PairsError
from build_engines.pairs import Candidates
from build_engines.quality import kendall_tau, mean_ndcg, ndcg_at_10, rank_order
from build_engines.serving_code import graph_scoring, pair_encoding
from build_engines.table import Gates, Reranker, fp32_tolerance

Scores = list[NDArray[np.float32]]  # one float32[documents] per query

# Below this, INT8 is not worth its loss.
MINIMUM_SPEEDUP = 1.1
# Fewer graded queries do not tell a reranker from chance.
MINIMUM_GRADED = 8
RANDOM_ORDERS = 20
TIMING_ROUNDS = 3
TIMING_PAIRS = 32


@dataclass(frozen=True, slots=True)
class Gate:
    """One comparison with its bound; `found` beyond `allowed` fails."""

    name: str
    found: float
    allowed: float
    at_least: bool

    @property
    def passed(self) -> bool:
        """NaN never passes."""
        return self.found >= self.allowed if self.at_least else self.found <= self.allowed

    def __str__(self) -> str:
        return f"{self.name} {self.found:.4g} ({'at least' if self.at_least else 'at most'} {self.allowed:g})"


class Verifier:
    """Scores the same pairs with the graphs of a reranker, through the code that serves them."""

    def __init__(
        self, reranker: Reranker, pairing_folder: Path, vocabulary: int, candidates: Sequence[Candidates]
    ) -> None:
        self.reranker = reranker
        self.candidates = candidates
        limits = graph_scoring.Limits(vocabulary, reranker.max_length)
        encoder = pair_encoding.PairEncoder.load(pairing_folder, cache_bytes=64 << 20, max_text_bytes=1 << 20)
        self.requests = [_encode(encoder, limits, query) for query in candidates]
        known = encoder.pairing.golden[0]
        self.known_pair = _encode(encoder, limits, Candidates(known.query, (known.document,)))

    @staticmethod
    def open(graph: Path, precision: str) -> graph_scoring.GraphScorer:
        """Open a graph the way the scorer does."""
        tokens_per_run = 0 if precision == "int8" else TOKENS_PER_RUN
        return graph_scoring.GraphScorer(
            graph, threads=graph_scoring.available_threads(), tokens_per_run=tokens_per_run
        )

    def score(self, scorer: graph_scoring.GraphScorer, advance: Callable[[], None] = lambda: None) -> Scores:
        """Score every pair, one request for each query."""
        scores = []
        for request in self.requests:
            scores.append(scorer.score([request])[0][:, 0])
            advance()
        return scores

    def self_test(self, scorer: graph_scoring.GraphScorer, allowed: float) -> dict[str, Any]:
        """Return a pair and its score, by which the scorer can see when it loads that it computes what was verified."""
        (length,) = self.known_pair.lengths
        arrays = {name: array[0, :length].tolist() for name, array in self.known_pair.arrays.items()}
        return {"arrays": arrays, "score": float(scorer.score([self.known_pair])[0][0, 0]), "allowed": allowed}

    def largest_neighbour_effect(self, scorer: graph_scoring.GraphScorer) -> float:
        """Return how much any of some scores changes when its pair stands alone instead of in a crowd."""
        crowd = self.requests[: max(2, 16 // len(self.requests[0].lengths))]
        together = np.concatenate([scores[:, 0] for scores in scorer.score(crowd)])
        alone = [scorer.score([_single(request, row)])[0] for request in crowd for row in range(len(request.lengths))]
        return float(np.abs(together - np.concatenate(alone)[:, 0]).max())

    def speedup(self, candidate: graph_scoring.GraphScorer, reference: graph_scoring.GraphScorer) -> float:
        """Return how many times faster `candidate` is: median of interleaved rounds on some of the pairs."""
        sample = self.requests[: max(1, TIMING_PAIRS // len(self.requests[0].lengths))]
        return statistics.median(
            _seconds(reference, sample) / _seconds(candidate, sample) for _ in range(TIMING_ROUNDS)
        )

    def lead_over_chance(self, scores: Scores) -> tuple[float, float] | None:
        """Return how far nDCG@10 lies above a random order's, and that figure's standard error; None for few grades."""
        rng = np.random.default_rng(0)
        leads = []
        for values, query in zip(scores, self.candidates, strict=True):
            grades = query.relevance
            if grades and any(grades) and not all(grades):
                chance = [ndcg_at_10(rng.random(len(grades)), grades) for _ in range(RANDOM_ORDERS)]
                leads.append(ndcg_at_10(values, grades) - float(np.mean(chance)))
        if len(leads) < MINIMUM_GRADED:
            return None
        return float(np.mean(leads)), float(np.std(leads) / np.sqrt(len(leads)))

    def ndcg(self, scores: Scores) -> float | None:
        """Return the mean nDCG@10 over the queries whose grades are known; None where there are none."""
        return mean_ndcg(scores, [candidates.relevance for candidates in self.candidates])


class Graded(Protocol):
    """Pairs whose grades may be known."""

    def ndcg(self, scores: Scores) -> float | None:
        """Return the mean nDCG@10; None where no grades are known."""


def largest_shift(fp32: Scores, candidate: Scores) -> float:
    """Return the largest difference between two scores of one pair."""
    return max(float(np.abs(a - b).max()) for a, b in zip(fp32, candidate, strict=True))


def compare(pairs_scored: Graded, fp32: Scores, candidate: Scores, gates: Gates) -> list[Gate]:
    """Hold a candidate's scores against the reference's."""
    pairs = list(zip(fp32, candidate, strict=True))
    shift = largest_shift(fp32, candidate)
    spread = float(np.concatenate(fp32).std())
    found = [
        Gate("largest score shift / spread", shift / spread if spread else np.inf, gates.max_score_shift, False),
        Gate("Kendall tau", float(np.mean([kendall_tau(a, b) for a, b in pairs])), gates.kendall_tau, True),
    ]
    before, after = pairs_scored.ndcg(fp32), pairs_scored.ndcg(candidate)
    if before is not None and after is not None:
        found.append(Gate("nDCG@10 drop", before - after, gates.ndcg_drop, False))
    else:
        same = float(np.mean([rank_order(a)[0] == rank_order(b)[0] for a, b in pairs]))
        found.append(Gate("top-1 agreement", same, gates.top1_agreement, True))
    return found


def verify(
    verifier: Verifier, fp32_graph: Path, int8_graph: Path | None, out: Path, advance: Callable[[], None]
) -> dict[str, Any]:
    """Choose the precision that ships and write `report.json` into `out`; raise GateError where none may."""
    reranker = verifier.reranker
    reference, fp32, facts = score_reference(verifier, fp32_graph, advance)
    chosen, reason, shipped, allowed = "fp32", "precision is set to fp32", reference, 10 * fp32_tolerance(reranker)
    if int8_graph is not None:
        candidate = verifier.open(int8_graph, "int8")
        int8 = verifier.score(candidate, advance)
        gates = compare(verifier, fp32, int8, reranker.gates)
        speedup = verifier.speedup(candidate, reference)
        facts |= {
            "int8_ndcg_at_10": verifier.ndcg(int8),
            "int8_neighbour_effect": verifier.largest_neighbour_effect(candidate),
            "int8_mean_shift": float(np.mean([np.abs(a - b).mean() for a, b in zip(fp32, int8, strict=True)])),
            "int8_speedup": speedup,
            "gates": [asdict(gate) | {"passed": gate.passed} for gate in gates],
        }
        chosen, reason = _choose(reranker, gates, speedup, facts["int8_neighbour_effect"], facts["queries"])
        if chosen == "int8":
            # A CPU with other INT8 instructions rounds otherwise, by no more than INT8 differs from FP32.
            shipped, allowed = candidate, max(allowed, largest_shift(fp32, int8))
    facts |= {"precision": chosen, "reason": reason, "self_test": verifier.self_test(shipped, allowed)}
    (out / "report.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
    return facts


def score_reference(
    verifier: Verifier, graph: Path, advance: Callable[[], None]
) -> tuple[graph_scoring.GraphScorer, Scores, dict[str, Any]]:
    """Return the FP32 graph, its scores and facts about them; raise GateError where it is no reference."""
    reranker = verifier.reranker
    scorer = verifier.open(graph, "fp32")
    scores = verifier.score(scorer, advance)
    if not all(np.isfinite(values).all() for values in scores):
        raise GateError(f"{reranker.name}: FP32 scores are not all finite; the checkpoint is damaged.")
    effect = verifier.largest_neighbour_effect(scorer)
    # Correct kernels may sum in another order for another batch.
    if effect > fp32_tolerance(reranker):
        raise GateError(f"{reranker.name}: a neighbour in the batch changes an FP32 score by {effect:.2e}.")
    lead = verifier.lead_over_chance(scores)
    if lead is not None and reranker.ndcg_above_chance >= 0 and lead[0] < max(reranker.ndcg_above_chance, 3 * lead[1]):
        raise GateError(
            f"{reranker.name}: the checkpoint ranks by chance: its nDCG@10 is {lead[0]:+.3f} (standard error "
            f"{lead[1]:.3f}) above that of a random order. Its head was never trained, or the pairs are not for "
            "it. Use a checkpoint trained as a reranker, or set ndcg_above_chance = -1 in rerankers.toml."
        )
    return (
        scorer,
        scores,
        {
            "pairs": sum(len(c.documents) for c in verifier.candidates),
            "queries": len(verifier.candidates),
            "fp32_ndcg_at_10": verifier.ndcg(scores),
            "fp32_lead_over_chance": None if lead is None else lead[0],
            "fp32_neighbour_effect": effect,
        },
    )


def _choose(
    reranker: Reranker, gates: list[Gate], speedup: float, neighbour_effect: float, queries: int
) -> tuple[str, str]:
    failed = [str(gate) for gate in gates if not gate.passed]
    if neighbour_effect > 0:
        failed.append(f"a neighbour changes an INT8 score by {neighbour_effect:.2e}")
    if failed and reranker.precision == "int8":
        raise GateError(
            f"{reranker.name}: INT8 is outside its gates: {'; '.join(failed)}. Give more pairs with --pairs if these "
            'are few, or set precision = "auto" (FP32 then ships) in rerankers.toml.'
        )
    if failed:
        return "fp32", f"INT8 is outside its gates: {'; '.join(failed)}"
    passed = "; ".join(map(str, gates))
    passed += f" (on {queries} queries)"
    if reranker.precision == "auto" and speedup < MINIMUM_SPEEDUP:
        return "fp32", f"INT8 passes its gates but is only {speedup:.2f} x as fast"
    return "int8", f"{speedup:.2f} x as fast as FP32 and inside its gates: {passed}"


def encode(encoder: pair_encoding.PairEncoder, query: Candidates) -> pair_encoding.EncodedPairs:
    """Encode a query with each of its documents; raise PairsError where a text cannot be scored."""
    documents = [document.encode() for document in query.documents]
    try:
        return encoder.encode([query.query.encode()] * len(documents), documents)
    except pair_encoding.TextError as error:
        raise PairsError(f"The query {query.query[:60]!r} cannot be scored: {error}") from error


def _encode(
    encoder: pair_encoding.PairEncoder, limits: graph_scoring.Limits, query: Candidates
) -> graph_scoring.PaddedPairs:
    return graph_scoring.PaddedPairs.check(encode(encoder, query).arrays, limits)


def _single(request: graph_scoring.PaddedPairs, row: int) -> graph_scoring.PaddedPairs:
    arrays = {name: array[row : row + 1] for name, array in request.arrays.items()}
    return graph_scoring.PaddedPairs(arrays, request.lengths[row : row + 1])


def _seconds(scorer: graph_scoring.GraphScorer, requests: list[graph_scoring.PaddedPairs]) -> float:
    started = time.perf_counter()
    scorer.score(requests)
    return time.perf_counter() - started
