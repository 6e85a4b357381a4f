# SPDX-License-Identifier: Apache-2.0
"""A decoder's BF16 twin errs as much as Transformers' own BF16 run, at lengths where wrong positions would show."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from build_engines.low_precision import twin
from build_engines.table import BasePrecision
from tests.unit.decoder_graphs import KINDS, NO, YES, DecoderGraphs, prompts
from tests.unit.small_graphs import Floats, run
from tests.unit.test_low_precision import BASES

every_kind = pytest.mark.parametrize("kind", KINDS)
LENGTHS = tuple(range(35, 601, 35))
FEED = prompts(LENGTHS)


def whole(model: Any, *, positions: torch.dtype = torch.int64) -> Floats:
    """Score each row alone as Transformers does, from the logits of its whole vocabulary."""
    scores = []
    for ids, length in zip(FEED["input_ids"], LENGTHS, strict=True):
        with torch.no_grad():
            logits = model(
                torch.from_numpy(ids[None, :length]), position_ids=torch.arange(length)[None].to(positions)
            ).logits[0, -1]
        scores.append(float(logits[YES].float() - logits[NO].float()))
    return np.array(scores, np.float32)


def size(errors: Floats) -> float:
    return float(np.sqrt((errors**2).mean()))


@dataclass(frozen=True, slots=True)
class Scores:
    """What Transformers makes of `FEED`: in FP32, and in BF16."""

    exact: Floats
    bf16: Floats


@pytest.fixture(scope="module")
def scored(decoders: DecoderGraphs) -> Callable[[str], Scores]:
    return functools.cache(lambda kind: Scores(whole(decoders.of(kind).model), whole(decoders.of(kind).in_bf16())))


def of_twin(decoders: DecoderGraphs, kind: str, base: BasePrecision) -> Floats:
    found: Floats = run(twin(decoders.of(kind).graph(), base), FEED)["SCORE"][:, 0]
    return found


@every_kind
def test_the_bf16_twin_errs_as_much_as_transformers_in_bf16(
    decoders: DecoderGraphs, scored: Callable[[str], Scores], kind: str
) -> None:
    found, theirs, exact = of_twin(decoders, kind, "bf16"), scored(kind).bf16, scored(kind).exact
    assert exact.std() > 1
    assert 1 / 3 < size(found - exact) / size(theirs - exact) < 3
    # Both round most tensors alike: they are about as far from each other as from FP32.
    assert size(found - theirs) < 2 * size(theirs - exact)


@every_kind
def test_positions_in_bf16_would_be_seen(decoders: DecoderGraphs, scored: Callable[[str], Scores], kind: str) -> None:
    # BF16 counts 256, 258, ..., 512, 516; nothing else is rounded here.
    astray = whole(decoders.of(kind).model, positions=torch.bfloat16)
    assert size(astray - scored(kind).exact) > 4 * size(scored(kind).bf16 - scored(kind).exact)


@every_kind
def test_the_fp16_twin_is_nearer_than_the_bf16_one(
    decoders: DecoderGraphs, scored: Callable[[str], Scores], kind: str
) -> None:
    exact = scored(kind).exact
    np.testing.assert_allclose(run(decoders.of(kind).graph(), FEED)["SCORE"][:, 0], exact, atol=1e-4)
    fp16, bf16 = (size(of_twin(decoders, kind, base) - exact) for base in BASES)
    # Three more bits of mantissa.
    assert 0 < fp16 < bf16 / 3
