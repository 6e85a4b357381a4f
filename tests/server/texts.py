# SPDX-License-Identifier: Apache-2.0
"""Texts to send: the same in every run, different from one another, in several scripts."""

from __future__ import annotations

import random

from tests.checkpoints import CORPUS

QUERY = "what is a giant panda, and where does it live?"
# Each is one token of all-MiniLM's vocabulary.
# fmt: off
_WORDS = (
    "panda", "bear", "china", "river", "mountain", "train", "city", "bread", "oven", "sunset",
    "light", "blue", "red", "question", "answer", "search", "document", "price", "ticket", "forest",
    "animal", "food", "winter", "summer", "water", "stone", "house", "garden", "school", "market",
    "music", "paper",
)
# fmt: on


def words(count: int, seed: int) -> str:
    """`count` common English words."""
    return " ".join(random.Random(seed).choices(_WORDS, k=count))


def mixed(count: int, seed: int) -> str:
    """`count` words and phrases of many scripts, with emoji, numbers and punctuation."""
    chosen = random.Random(seed)
    return " ".join(chosen.choice(chosen.choice(CORPUS).split()) for _ in range(count))


def ragged(seed: int, count: int = 64, longest: int = 350) -> list[str]:
    """Documents of very different lengths, the shortest and the longest among them."""
    chosen = random.Random(seed)
    lengths = [1, longest, *(int(longest ** chosen.random()) for _ in range(count - 2))]
    return [mixed(length, seed * 1000 + row) for row, length in enumerate(lengths)]
