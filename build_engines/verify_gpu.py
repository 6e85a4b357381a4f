# SPDX-License-Identifier: Apache-2.0
"""Step `verify`, gpu target: FP32, base precision and INT8 on the same real pairs; layers go back until INT8 passes.

Everything is scored on ONNX Runtime's CPU provider by one switched twin (see `switched` and `low_precision`), which
rounds where the engine will. Where INT8 is outside its gates, the layers whose INT8 changes scores most go back to
base precision, 1, 2, 4, ... of them up to the row's `search_budget`; the order is measured on calibration pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from build_engines.errors import GateError
from build_engines.progress import Bars
from build_engines.quality import kendall_tau, rank_order
from build_engines.report import write_reports
from build_engines.serving_code import graph_scoring
from build_engines.switched import SwitchedScorer, sensitivities
from build_engines.table import Gates
from build_engines.verify import Gate, Scores, Verifier, compare, score_reference

# FP16 and INT8 may round a value the other way when kernels add up in another order; more than this share of the
# scores' standard deviation means that a row sees its neighbours or its padding.
LAYOUT_TOLERANCE = 0.05
_LAYOUT_ROWS = 4


@dataclass(frozen=True, slots=True)
class Candidate:
    """One precision on the verification pairs, with its gates."""

    name: str
    figures: dict[str, float | None]
    gates: tuple[Gate, ...]
    scores: Scores

    @property
    def failed(self) -> list[str]:
        """The gates that it is outside of, as text."""
        return [str(gate) for gate in self.gates if not gate.passed]


@dataclass(slots=True)
class Judge:
    """Scores with a choice of INT8 layers and holds the scores against FP32's."""

    verifier: Verifier
    scorer: SwitchedScorer
    fp32: Scores
    bars: Bars

    def judge(self, name: str, int8: Collection[str], gates: Gates) -> Candidate:
        """Return the candidate that has these layers in INT8."""
        self.scorer.choose(int8)
        with self.bars("verify", f"queries {name}", len(self.verifier.candidates)) as advance:
            scores = self.verifier.score(self.scorer, advance)
        spread = float(np.concatenate(self.fp32).std())
        broken = int(sum((~np.isfinite(values)).sum() for values in scores))
        if broken:
            return Candidate(name, {"not_finite": broken}, (Gate("scores not finite", broken, 0, False),), scores)
        layout = largest_layout_effect(self.scorer, self.verifier)
        figures = agreement(self.verifier, self.fp32, scores) | {"not_finite": 0, "layout_effect": layout}
        effect = layout / spread if spread else np.inf
        own = Gate("neighbour, order or padding effect / spread", effect, LAYOUT_TOLERANCE, False)
        return Candidate(name, figures, (*compare(self.verifier, self.fp32, scores, gates), own), scores)


def agreement(verifier: Verifier, fp32: Scores, scores: Scores) -> dict[str, float | None]:
    """Return how well a candidate's scores (one float32[documents] a query) agree with FP32's."""
    pairs = list(zip(fp32, scores, strict=True))
    shifts = np.concatenate([np.abs(a - b) for a, b in pairs])
    return {
        "ndcg_at_10": verifier.ndcg(scores),
        "kendall_tau": float(np.mean([kendall_tau(a, b) for a, b in pairs])),
        "top1_agreement": float(np.mean([rank_order(a)[0] == rank_order(b)[0] for a, b in pairs])),
        "mean_shift": float(shifts.mean()),
        "max_shift": float(shifts.max()),
    }


def verify_for_tensorrt(
    verifier: Verifier,
    fp32_graph: Path,
    switched: Path,
    layers: Sequence[str],
    sample: Sequence[graph_scoring.PaddedPairs],
    out: Path,
    bars: Bars,
) -> dict[str, Any]:
    """Choose what ships and write `report.json`, `report.md` and `reference.npz` into `out`.

    `switched` is the twin in base precision with a switch for each of `layers` (none where INT8 is not wanted). Returns
    facts with `precision` and `int8_layers`; raises GateError where nothing may ship.
    """
    reranker = verifier.reranker
    with bars("verify", "queries FP32", len(verifier.candidates)) as advance:
        reference, fp32, facts = score_reference(verifier, fp32_graph, advance)
    del reference  # a large model twice in memory is one too many
    judge = Judge(verifier, SwitchedScorer(switched, layers), fp32, bars)
    base = judge.judge(reranker.base_precision, (), reranker.base_gates)
    if base.failed:
        raise GateError(_base_refused(reranker.name, base))
    candidates = [base]
    order: Mapping[str, float] = {}
    chosen, int8, reason = base, [], f"precision is set to {reranker.base_precision}"
    if layers:
        first = judge.judge("int8", layers, reranker.gates)
        candidates.append(first)
        if not first.failed:
            chosen, int8, reason = first, list(layers), "every linear layer passes in INT8"
        else:
            order = _sensitivities(judge, sample)
            found = _search(judge, list(order), candidates)
            chosen, int8 = (base, []) if found is None else found
            reason = _search_result(reranker.name, reranker.search_budget, first, candidates, len(layers) - len(int8))
            if found is None and reranker.precision == "int8":
                raise GateError(
                    f"{reason}. Calibrate with more pairs like your traffic, raise search_budget, or set "
                    'precision = "auto" '
                    f"({reranker.base_precision} then ships) in rerankers.toml."
                )
    facts |= {
        "precision": "int8" if int8 else reranker.base_precision,
        "base_precision": reranker.base_precision,
        "reason": reason,
        "int8_layers": int8,
        "high_precision_layers": [name for name in layers if name not in int8] if int8 else [],
        "sensitivity": dict(order),
        "candidates": [_as_json(candidate, candidate is chosen) for candidate in candidates],
    }
    write_reports(reranker.name, facts, out)
    _write_reference(verifier, fp32, out)
    return facts


def largest_layout_effect(scorer: SwitchedScorer, verifier: Verifier) -> float:
    """Return how much a score changes when its pair shares a batch, in another order, or is padded to a bucket more."""
    buckets = verifier.reranker.buckets
    rows = [(request, row) for request in verifier.requests[:_LAYOUT_ROWS] for row in range(len(request.lengths))]
    rows = sorted(rows, key=lambda item: int(item[0].lengths[item[1]]))[:_LAYOUT_ROWS]
    longest = max(int(request.lengths[row]) for request, row in rows)
    bucket = next(bucket for bucket in buckets if bucket >= longest)
    beyond = next((larger for larger in buckets if larger > bucket), bucket)
    alone = np.concatenate([scorer.run_padded([item], int(item[0].lengths[item[1]])) for item in rows])
    batch, longer = scorer.run_padded(rows, bucket), scorer.run_padded(rows, beyond)
    reverse = scorer.run_padded(rows[::-1], bucket)[::-1]
    return float(max(np.abs(other - alone).max() for other in (batch, longer, reverse)))


def _sensitivities(judge: Judge, sample: Sequence[graph_scoring.PaddedPairs]) -> Mapping[str, float]:
    with judge.bars("search", "layers", len(judge.scorer.nodes)) as advance:
        return sensitivities(judge.scorer, sample, advance)


def _search(judge: Judge, order: Sequence[str], candidates: list[Candidate]) -> tuple[Candidate, list[str]] | None:
    """Return the first candidate inside the gates and its INT8 layers; every one tried is appended to `candidates`."""
    reranker = judge.verifier.reranker
    budget = int(reranker.search_budget * len(order))
    back = 1
    while back <= budget:
        kept = set(order[back:])
        int8 = [name for name in judge.scorer.nodes if name in kept]
        candidate = judge.judge(f"int8, {back} layers back", int8, reranker.gates)
        candidates.append(candidate)
        if not candidate.failed:
            return candidate, int8
        back = budget if back < budget < 2 * back else 2 * back
    return None


def _base_refused(name: str, base: Candidate) -> str:
    advice = "widen base_gates if the checkpoint was trained in it, or build for the cpu target, which has FP32"
    if base.name == "fp16":
        advice = 'set base_precision = "bf16", which cannot overflow, or build for the cpu target, which has FP32'
    what = f"{base.name.upper()} is outside its gates: {'; '.join(base.failed)}"
    if base.figures.get("not_finite"):
        what = f"{base.name.upper()} overflows: {base.figures['not_finite']} scores are not finite"
    return f"{name}: {what}. In rerankers.toml {advice}."


def _search_result(name: str, share: float, first: Candidate, tried: Sequence[Candidate], back: int) -> str:
    story = f"{name}: INT8 in every layer is outside its gates ({'; '.join(first.failed)})"
    if not tried[-1].failed:
        return f"{story}; with the {back} most sensitive layers back in base precision it passes"
    if tried[-1] is first:
        return f"{story}; search_budget {share:g} allows no layer to go back"
    rest = "; ".join(tried[-1].failed)
    return f"{story}; still so with the most layers back that search_budget {share:g} allows: {rest}"


def _as_json(candidate: Candidate, ships: bool) -> dict[str, Any]:
    gates = [asdict(gate) | {"passed": gate.passed} for gate in candidate.gates]
    return {"name": candidate.name, "ships": ships, **candidate.figures, "gates": gates}


def _write_reference(verifier: Verifier, fp32: Scores, out: Path) -> None:
    """Keep the encoded pairs, their FP32 scores and grades, so that an engine can be held against them elsewhere."""
    arrays: dict[str, Any] = {"scores": np.concatenate(fp32), "documents": np.array([len(s) for s in fp32])}
    rows = [(request, row) for request in verifier.requests for row in range(len(request.lengths))]
    arrays["lengths"] = np.array([request.lengths[row] for request, row in rows])
    for name in verifier.requests[0].arrays:
        tokens = [request.arrays[name][row, : request.lengths[row]] for request, row in rows]
        arrays[name] = np.concatenate(tokens).astype(np.int32)
    unknown = [np.nan]
    grades = [c.relevance or unknown * len(c.documents) for c in verifier.candidates]
    arrays["grades"] = np.concatenate([np.asarray(g, dtype=np.float32) for g in grades])
    np.savez_compressed(out / "reference.npz", **arrays)
