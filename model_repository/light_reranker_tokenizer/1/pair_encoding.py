# SPDX-License-Identifier: Apache-2.0
"""Query/document texts to padded token ids, without Triton, PyTorch or transformers.

One algorithm for every family of reranker, driven by `pairing.json`:

    prefix_ids + query_ids[:query_max] + middle_ids + document_ids[:room] + suffix_ids

In the prompt of a decoder a text is tokenised with what stands directly around it, its head and tail; a text that is
cut keeps its tail, and prefix and suffix are never cut. Each text is tokenised alone, so that its ids can be kept and
used again. The tokenizer beside this file knows no control tokens at all: `</s>` or `[SEP]` typed by a user is text
like any other; only this module places control ids.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from text_ids import TextIds, TokenCache, text_key
from tokenizers import Tokenizer

FORMAT = 1


class PairingError(Exception):
    """The files beside this module do not belong together; the tokenizer must not serve."""


class TextError(Exception):
    """A text of one request cannot be encoded; the message is for the caller."""


@dataclass(frozen=True, slots=True)
class GoldenPair:
    """A pair and the ids that the checkpoint's own tokenizer gave at build time."""

    query: str
    document: str
    ids: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Pairing:
    """How a family of rerankers joins a query and a document. Lengths are in tokens."""

    prefix_ids: tuple[int, ...]
    middle_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    query_max: int
    max_length: int
    buckets: tuple[int, ...]
    pad_id: int
    control_ids: tuple[int, ...]
    tokenizer_sha256: str
    # How many of middle_ids still belong to segment 0; None where the graph takes no segment ids.
    first_segment_middle: int | None = None
    # Text put before and after a query or a document; it is tokenised and counted together with it. A text that is cut
    # ends in the ids that its tail has alone.
    query_head: str = ""
    query_tail: str = ""
    query_tail_ids: tuple[int, ...] = ()
    document_head: str = ""
    document_tail: str = ""
    document_tail_ids: tuple[int, ...] = ()
    golden: tuple[GoldenPair, ...] = ()
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise PairingError(f"pairing.json has format {self.format}; this code reads {FORMAT}. Build again.")
        if self.buckets != tuple(sorted(set(self.buckets))) or not self.buckets or self.buckets[-1] != self.max_length:
            raise PairingError(f"buckets {self.buckets} must rise and end with max_length {self.max_length}.")
        least = self.control_length + self.query_max + len(self.document_tail_ids)
        if self.query_max < 1 + len(self.query_tail_ids) or least > self.max_length:
            raise PairingError(
                f"query_max {self.query_max} and {self.control_length} control tokens exceed "
                f"max_length {self.max_length}."
            )

    @property
    def control_length(self) -> int:
        """Tokens in a pair that come from neither text."""
        return len(self.prefix_ids) + len(self.middle_ids) + len(self.suffix_ids)

    @property
    def around_query(self) -> tuple[str, str]:
        """What is tokenised together with a query, before and after it."""
        return self.query_head, self.query_tail

    @property
    def around_document(self) -> tuple[str, str]:
        """What is tokenised together with a document, before and after it."""
        return self.document_head, self.document_tail

    @classmethod
    def from_json(cls, text: str) -> Pairing:
        """Read `pairing.json`; raise PairingError when a field is missing, unknown or of the wrong kind."""
        try:
            fields: dict[str, Any] = json.loads(text)
            golden = tuple(GoldenPair(**pair | {"ids": tuple(pair["ids"])}) for pair in fields.pop("golden"))
            lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
            return cls(**fields | lists, golden=golden)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PairingError(f"pairing.json cannot be read ({error}). Build again.") from error


@dataclass(frozen=True, slots=True)
class EncodedPairs:
    """Arrays for the scorer; all rows share one bucket."""

    input_ids: NDArray[np.int64]  # int64[pairs, bucket]
    attention_mask: NDArray[np.int64]  # int64[pairs, bucket]
    token_type_ids: NDArray[np.int64] | None  # int64[pairs, bucket]
    tokens: NDArray[np.int32]  # int32[pairs, 1], the full length of each pair before cutting

    @property
    def arrays(self) -> dict[str, NDArray[np.int64]]:
        """What the scorer takes, by the names of its inputs."""
        arrays = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        return arrays if self.token_type_ids is None else arrays | {"token_type_ids": self.token_type_ids}


class PairEncoder:
    """Encodes pairs for one reranker. Not thread-safe: one per Triton instance."""

    def __init__(self, tokenizer: Tokenizer, pairing: Pairing, *, cache_bytes: int, max_text_bytes: int) -> None:
        self.pairing = pairing
        self.cache = TokenCache(cache_bytes)
        self._tokenizer = tokenizer
        self._max_text_bytes = max_text_bytes

    @classmethod
    def load(cls, folder: Path, *, cache_bytes: int, max_text_bytes: int) -> PairEncoder:
        """Load `pairing.json` and `tokenizer.json`; raise PairingError unless both give the golden ids."""
        try:
            pairing = Pairing.from_json((folder / "pairing.json").read_text(encoding="utf-8"))
            tokenizer_json = (folder / "tokenizer.json").read_bytes()
        except (OSError, UnicodeDecodeError) as error:
            raise PairingError(f"{error}. Build the reranker: python -m build_engines build NAME.") from error
        found = hashlib.sha256(tokenizer_json).hexdigest()
        if found != pairing.tokenizer_sha256:
            raise PairingError(f"tokenizer.json has sha256 {found}, pairing.json expects {pairing.tokenizer_sha256}.")
        try:
            tokenizer = Tokenizer.from_str(tokenizer_json.decode("utf-8"))
        except Exception as error:  # the library raises nothing narrower
            raise PairingError(f"tokenizer.json cannot be read ({error}). Build again.") from error
        # The golden texts belong neither in the cache nor in its figures, and no limit for callers applies to them.
        cls(tokenizer, pairing, cache_bytes=0, max_text_bytes=sys.maxsize).check_golden()
        return cls(tokenizer, pairing, cache_bytes=cache_bytes, max_text_bytes=max_text_bytes)

    def check_golden(self) -> None:
        """Raise PairingError when a golden pair no longer gets the ids it had at build time."""
        for pair in self.pairing.golden:
            encoded = self.encode([pair.query.encode()], [pair.document.encode()])
            ids = tuple(encoded.input_ids[0][encoded.attention_mask[0] == 1].tolist())
            if ids != pair.ids or int(encoded.tokens[0, 0]) != pair.tokens:
                raise PairingError(
                    f"The golden pair {pair.query!r} / {pair.document!r} has ids {ids}, at build time {pair.ids}. "
                    "The tokenizers library or the files changed; build again."
                )

    def encode(self, queries: Sequence[bytes], documents: Sequence[bytes]) -> EncodedPairs:
        """Encode row i as the pair (queries[i], documents[i]), UTF-8; raise TextError naming a bad row."""
        ids = self.text_ids(self.request_texts(queries, documents))
        return self.assemble(queries, documents, ids)

    def request_texts(self, queries: Sequence[bytes], documents: Sequence[bytes]) -> dict[bytes, str]:
        """Return what a request needs tokenised, by key; raise TextError when a row cannot be encoded."""
        texts: dict[bytes, str] = {}
        for role, around, rows in self._roles(queries, documents):
            for row, text in enumerate(rows):
                key = text_key(around, text)
                if key not in texts:
                    texts[key] = self._decode(role, row, text).join(around)
        return texts

    def text_ids(self, texts: dict[bytes, str]) -> dict[bytes, TextIds]:
        """Tokenise each text that is not in the cache, all of them in one call."""
        found: dict[bytes, TextIds] = {}
        new: list[bytes] = []
        for key in texts:
            entry = self.cache.get(key)
            if entry is None:
                new.append(key)
            else:
                found[key] = entry
        if new:
            limit = self.pairing.max_length
            encodings = self._tokenizer.encode_batch_fast([texts[key] for key in new], add_special_tokens=False)
            for key, encoding in zip(new, encodings, strict=True):
                ids: list[int] = encoding.ids
                found[key] = TextIds(np.array(ids[:limit], dtype=np.int32), len(ids))
                self.cache.put(key, found[key])
        return found

    def assemble(self, queries: Sequence[bytes], documents: Sequence[bytes], ids: dict[bytes, TextIds]) -> EncodedPairs:
        """Join tokenised texts into rows padded to the smallest bucket that holds the longest."""
        p = self.pairing
        rows = [
            (ids[text_key(p.around_query, query)], ids[text_key(p.around_document, document)])
            for query, document in zip(queries, documents, strict=True)
        ]
        full = np.array([[q.length + d.length + p.control_length] for q, d in rows], dtype=np.int32).reshape(-1, 1)
        longest = max((self._cut_length(q, d) for q, d in rows), default=0)
        bucket = next(bucket for bucket in p.buckets if bucket >= longest)
        input_ids = np.full((len(rows), bucket), p.pad_id, dtype=np.int64)
        ends = np.empty((len(rows), 2), dtype=np.int64)  # first token of segment 1, end of row
        for row, (query, document) in enumerate(rows):
            ends[row] = self._write_row(input_ids[row], query, document)
        position = np.arange(bucket)
        attention_mask = (position < ends[:, 1:]).astype(np.int64)
        types = None
        if p.first_segment_middle is not None:
            types = (position >= ends[:, :1]).astype(np.int64) * attention_mask
        return EncodedPairs(input_ids, attention_mask, types, full)

    def _write_row(self, row: NDArray[np.int64], query: TextIds, document: TextIds) -> tuple[int, int]:
        p = self.pairing
        query_ids = query.cut(p.query_max, p.query_tail_ids)
        document_ids = document.cut(p.max_length - p.control_length - len(query_ids), p.document_tail_ids)
        at = 0
        segment = 0
        for part in (p.prefix_ids, query_ids, p.middle_ids, document_ids, p.suffix_ids):
            if part is p.middle_ids:
                segment = at + (p.first_segment_middle or 0)
            row[at : at + len(part)] = part
            at += len(part)
        return segment, at

    def _cut_length(self, query: TextIds, document: TextIds) -> int:
        p = self.pairing
        return min(p.control_length + min(query.length, p.query_max) + document.length, p.max_length)

    def _roles(
        self, queries: Sequence[bytes], documents: Sequence[bytes]
    ) -> Iterable[tuple[str, tuple[str, str], Sequence[bytes]]]:
        yield "QUERY", self.pairing.around_query, queries
        yield "DOCUMENT", self.pairing.around_document, documents

    def _decode(self, role: str, row: int, text: bytes) -> str:
        if len(text) > self._max_text_bytes:
            raise TextError(
                f"{role} in row {row} has {len(text)} bytes; at most {self._max_text_bytes} are allowed. "
                f"Only the first {self.pairing.max_length} tokens count, so send the beginning of the text."
            )
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise TextError(f"{role} in row {row} is not valid UTF-8 ({error}). Send text encoded as UTF-8.") from error
        if role == "QUERY" and not decoded.strip():
            raise TextError(f"QUERY in row {row} is empty or blank. Send the text to search for.")
        return decoded
