# SPDX-License-Identifier: Apache-2.0
"""Scores -> a ranking. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ._types import DocumentT, RankedDocument
from ._wire import Scored


def rank(
    documents: Sequence[DocumentT], scored: Scored, *, top_n: int | None, normalize: bool
) -> list[RankedDocument[DocumentT]]:
    """Best first, ties in the caller's order."""
    # Always the raw logits: even in float64 a sigmoid rounds strong candidates to the same 1.0.
    order = np.argsort(-scored.scores, kind="stable")[:top_n]
    scores = final_scores(scored, normalize=normalize)
    limit = scored.max_length
    return [
        RankedDocument(
            index=index,
            score=scores[index],
            document=documents[index],
            tokens=int(scored.tokens[index]),
            truncated=None if limit is None else bool(scored.tokens[index] > limit),
            model_version=scored.model_version,
        )
        for index in order.tolist()
    ]


def final_scores(scored: Scored, *, normalize: bool) -> list[float]:
    """The scores as the caller asked for them, in the caller's order."""
    logits = scored.scores.astype(np.float64)
    values: list[float] = (sigmoid(logits) if normalize else logits).tolist()
    return values


def sigmoid(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """1 / (1 + exp(-x)) without overflow on either side; float64[n] -> float64[n]."""
    small = np.exp(-np.abs(logits))
    values: npt.NDArray[np.float64] = np.where(logits >= 0, 1.0, small) / (1.0 + small)
    return values
