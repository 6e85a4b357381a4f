# SPDX-License-Identifier: Apache-2.0
"""How good a ranking is, and how much two rankings of the same documents differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

# What `bootstrap_interval` covers, and of how many draws.
CONFIDENCE = 0.95
RESAMPLES = 2000


def rank_order(scores: ArrayLike) -> NDArray[np.int64]:
    """Return int64[documents], best first; ties keep their order, as the client does it."""
    return np.argsort(-np.asarray(scores, dtype=np.float64), kind="stable").astype(np.int64)


def ndcg_at_10(scores: ArrayLike, relevance: Sequence[float], *, all_relevant: Sequence[float] | None = None) -> float:
    """Return nDCG@10, 0..1, with gain 2^grade - 1 and discount log2(rank + 1) (Burges et al. 2005).

    `all_relevant` are the grades of every relevant document where some were not among the candidates; by default the
    ideal ranking is made of the candidates. 0 where nothing is relevant.
    """
    gains = _gains(relevance)
    ideal = gains if all_relevant is None else _gains(all_relevant)
    best = _dcg(np.sort(ideal)[::-1])
    return _dcg(gains[rank_order(scores)]) / best if best > 0 else 0.0


def mean_ndcg(scores: Sequence[ArrayLike], grades: Sequence[Sequence[float] | None]) -> float | None:
    """Return the mean nDCG@10 over the queries of which something is known to be relevant; None without any."""
    known = [ndcg_at_10(s, g) for s, g in zip(scores, grades, strict=True) if g and any(g)]
    return float(np.mean(known)) if known else None


def reciprocal_rank(scores: ArrayLike, relevance: Sequence[float]) -> float:
    """Return 1 / rank of the first relevant document, 0..1; 0 where none of the first ten is relevant.

    Its mean over queries is MRR@10 (Voorhees 1999, the TREC-8 question answering track; cut at rank 10 as MS MARCO
    does). A document is relevant where its grade is above 0.
    """
    found = np.flatnonzero(np.asarray(relevance, dtype=np.float64)[rank_order(scores)[:10]] > 0)
    return 1.0 / (1.0 + float(found[0])) if found.size else 0.0


def bootstrap_interval(differences: NDArray[np.float64]) -> tuple[float, float]:
    """Return the bounds of the mean of float64[queries]: the percentile bootstrap (Efron 1979), fixed seed.

    Whole queries are drawn, each with the difference of its two rankings, hence a paired comparison (Sakai 2006).
    """
    rng = np.random.default_rng(0)
    means = [float(differences[rng.integers(0, len(differences), len(differences))].mean()) for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def kendall_tau(a: ArrayLike, b: ArrayLike) -> float:
    """Return Kendall's tau-b of two score lists, -1..1 (Kendall 1945); 1 for two constant or single lists."""
    x, y = (np.asarray(scores, dtype=np.float64) for scores in (a, b))
    pairs = np.triu_indices(len(x), k=1)
    dx, dy = (np.sign(v[pairs[0]] - v[pairs[1]]) for v in (x, y))
    norm = np.sqrt(np.count_nonzero(dx) * np.count_nonzero(dy))
    if norm == 0:
        return float(np.array_equal(dx, dy))
    return float((dx * dy).sum() / norm)


def _gains(grades: Sequence[float]) -> NDArray[np.float64]:
    gains: NDArray[np.float64] = np.exp2(np.asarray(grades, dtype=np.float64)) - 1.0
    return gains


def _dcg(gains: NDArray[np.float64]) -> float:
    top = gains[:10]
    return float((top / np.log2(np.arange(2, len(top) + 2))).sum())
