# SPDX-License-Identifier: Apache-2.0
"""The token ids of single texts, and a cache of them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TextIds:
    """The first `max_length` ids of a text, and how many it has in all."""

    ids: NDArray[np.int32]  # int32[kept]
    length: int

    def cut(self, limit: int, tail: tuple[int, ...]) -> NDArray[np.int32]:
        """Return all ids, or where there are more than `limit` the first of them and the tail."""
        if self.length <= limit or not tail:
            return self.ids[:limit]
        return np.concatenate([self.ids[: limit - len(tail)], np.array(tail, dtype=np.int32)])


class TokenCache:
    """Least-recently-used token ids, bounded by bytes."""

    # Measured size of the key, the dictionary slot, the TextIds and the array header of one entry.
    ENTRY_OVERHEAD_BYTES = 400

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[bytes, TextIds] = OrderedDict()

    def get(self, key: bytes) -> TextIds | None:
        """Return the entry and make it the youngest; count a hit or a miss."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry

    def put(self, key: bytes, entry: TextIds) -> None:
        """Keep a new entry, dropping the oldest ones until the bound holds."""
        self._entries[key] = entry
        self.size_bytes += self._cost_bytes(entry)
        while self.size_bytes > self.limit_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.size_bytes -= self._cost_bytes(dropped)

    def _cost_bytes(self, entry: TextIds) -> int:
        return entry.ids.nbytes + self.ENTRY_OVERHEAD_BYTES


def text_key(around: tuple[str, str], text: bytes) -> bytes:
    """Return what a text and what is tokenised around it are kept by."""
    # A digest keeps long texts out of the cache; 128 bits of BLAKE2 make a collision out of reach even for an attacker.
    # The zero bytes end head and tail, so that they and a text never read like others and another text.
    digest = hashlib.blake2b(b"\0".join([*(part.encode() for part in around), b""]), digest_size=16)
    digest.update(text)
    return digest.digest()
