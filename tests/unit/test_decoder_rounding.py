# SPDX-License-Identifier: Apache-2.0
"""A decoder's BF16 twin errs as much as Transformers' own BF16 run, at lengths where wrong positions would show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from build_engines.low_precision import twin
from tests.unit.decoder_graphs import KINDS, NO, YES, DecoderGraphs, prompts
from tests.unit.small_graphs import Floats, run

every_kind = pytest.mark.parametrize("kind", KINDS)
LENGTHS = tuple(range(35, 601, 35))


def whole(model: Any, feed: dict[str, NDArray[np.int64]], *, positions: torch.dtype = torch.int64) -> Floats:
    """Score each row alone as Transformers does, from the logits of its whole vocabulary."""
    scores = []
    for ids, length in zip(feed["input_ids"], LENGTHS, strict=True):
        with torch.no_grad():
            logits = model(
                torch.from_numpy(ids[None, :length]), position_ids=torch.arange(length)[None].to(positions)
            ).logits[0, -1]
        scores.append(float(logits[YES].float() - logits[NO].float()))
    return np.array(scores, np.float32)


def size(errors: Floats) -> float:
    return float(np.sqrt((errors**2).mean()))


@every_kind
def test_the_bf16_twin_errs_as_much_as_transformers_in_bf16(decoders: DecoderGraphs, kind: str) -> None:
    decoder, feed = decoders.of(kind), prompts(LENGTHS)
    exact = whole(decoder.model, feed)
    found = run(twin(decoder.graph(), "bf16"), feed)["SCORE"][:, 0]
    theirs = whole(decoder.in_bf16(), feed)
    assert exact.std() > 1
    assert 1 / 3 < size(found - exact) / size(theirs - exact) < 3
    # Both round most tensors alike: they are about as far from each other as from FP32.
    assert size(found - theirs) < 2 * size(theirs - exact)


@every_kind
def test_positions_in_bf16_would_be_seen(decoders: DecoderGraphs, kind: str) -> None:
    decoder, feed = decoders.of(kind), prompts(LENGTHS)
    exact = whole(decoder.model, feed)
    theirs = whole(decoder.in_bf16(), feed)
    # BF16 counts 256, 258, ..., 512, 516; nothing else is rounded here.
    astray = whole(decoder.model, feed, positions=torch.bfloat16)
    assert size(astray - exact) > 4 * size(theirs - exact)


@every_kind
def test_the_fp16_twin_is_nearer_than_the_bf16_one(decoders: DecoderGraphs, kind: str) -> None:
    decoder, feed = decoders.of(kind), prompts(LENGTHS)
    exact = run(decoder.graph(), feed)["SCORE"]
    np.testing.assert_allclose(exact[:, 0], whole(decoder.model, feed), atol=1e-4)
    fp16, bf16 = (size(run(twin(decoder.graph(), base), feed)["SCORE"] - exact) for base in ("fp16", "bf16"))
    # Three more bits of mantissa.
    assert 0 < fp16 < bf16 / 3
