# SPDX-License-Identifier: Apache-2.0
"""Seeded random texts: English, Chinese, emoji, rare characters, white space, empty and very long ones."""

from __future__ import annotations

import random

from tests.checkpoints import CORPUS

_WORDS = " ".join(CORPUS).split()
# Ligatures, fractions, full-width and decomposed letters, right-to-left and unheard-of scripts, joiners, controls.
_RARE = [*"ℕﬁ½ⅣＡＢé€中ßİ\u0301\u200b\u200d\ufeff\u00a0אبᚠ𓀀😶🏳️🫠\x01\x7f", "i\u0307", "n\u0303", "👩\u200d👩\u200d👧"]
_SPACES = [" ", " ", " ", "  ", "\n", "\t", "\r\n", "\n\n  ", "\u3000", "\u2028", ""]
CONTROL_TOKENS = ("<s>", "</s>", "<pad>", "<unk>", "<mask>", "[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]")


def random_text(rng: random.Random, *, longest: int = 40) -> str:
    """Return words, Chinese phrases, emoji and rare characters with odd white space around; often short."""
    parts = []
    for _ in range(rng.randrange(1, longest)):
        kind = rng.random()
        if kind < 0.6:
            part = rng.choice(_WORDS)
        elif kind < 0.75:
            start = rng.randrange(8)
            part = rng.choice(CORPUS[10:14])[start : start + rng.randrange(1, 9)]
        elif kind < 0.9:
            part = "".join(rng.choices(_RARE, k=rng.randrange(1, 4)))
        else:
            part = "".join(rng.choices("abcXYZ019.,;:!?-_/\\|@#<>[](){}'\"", k=rng.randrange(1, 9)))
        parts.append(part + rng.choice(_SPACES))
    text = rng.choice(_SPACES) + "".join(parts)
    return text if not any(token.lower() in text.lower() for token in CONTROL_TOKENS) else "a plain text"


def random_pair(rng: random.Random) -> tuple[str, str]:
    """Return a query that is not blank, and a document; one in ten is empty, one in fifty has 10,000 characters."""
    query = "q" + random_text(rng, longest=20)
    kind = rng.random()
    if kind < 0.1:
        return query, rng.choice(["", " ", "\n", "\t \n"])
    if kind < 0.12:
        return query, (random_text(rng) * 10_000)[:10_000]
    return query, random_text(rng, longest=80)
