# SPDX-License-Identifier: Apache-2.0
"""rerankers.toml as typed rows that cannot be built wrong."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from build_engines.errors import TableError

Head = Literal["sequence_classification", "bi_encoder"]
Precision = Literal["auto", "int8", "fp32"]

DEFAULT_TABLE = Path(__file__).with_name("rerankers.toml")


@dataclass(frozen=True, slots=True)
class Gates:
    """How far a candidate may be from the FP32 reference on the same pairs."""

    ndcg_drop: float
    top1_agreement: float
    kendall_tau: float
    max_score_shift: float

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
                raise TableError(f"gates.{f.name} is {value!r}; give a number of at least 0.")


@dataclass(frozen=True, slots=True)
class Reranker:
    """One row: a reranker, its checkpoint and its limits. Lengths are in tokens."""

    name: str
    checkpoint: str
    head: Head
    segment_ids: bool
    max_length: int
    buckets: tuple[int, ...]
    max_batch_size: int
    precision: Precision
    gates: Gates
    cpu_threads: int = 0
    revision: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)
    about: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise TableError(f"{self.name!r} cannot name a reranker; use lower-case letters, digits and underscores.")
        for name, allowed in (("head", Head), ("precision", Precision)):
            if getattr(self, name) not in get_args(allowed):
                raise TableError(f"{self.name}: {name} is {getattr(self, name)!r}; use one of {get_args(allowed)}.")
        buckets = self.buckets
        if list(buckets) != sorted(set(buckets)) or not buckets or buckets[0] < 8:
            raise TableError(f"{self.name}: buckets {list(buckets)} must rise, without repeats, from at least 8.")
        if buckets[-1] != self.max_length:
            raise TableError(
                f"{self.name}: the last bucket is {buckets[-1]} but max_length is {self.max_length}; make them equal."
            )
        if not 1 <= self.max_batch_size <= 1024:
            raise TableError(f"{self.name}: max_batch_size is {self.max_batch_size}; use 1 to 1024.")
        if self.cpu_threads < 0:
            raise TableError(f"{self.name}: cpu_threads is {self.cpu_threads}; use 0 (all) or a number of threads.")
        if self.revision and not re.fullmatch(r"[0-9a-f]{40}", self.revision):
            raise TableError(
                f"{self.name}: revision {self.revision!r} is not a commit; give its 40 hexadecimal digits."
            )

    @property
    def query_max(self) -> int:
        """Tokens a query may keep: FlagEmbedding's rule, `max_length * 3 // 4` (encoder_only/base.py)."""
        return self.max_length * 3 // 4

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer model."""
        return f"{self.name}_tokenizer"

    @property
    def scorer(self) -> str:
        """Name of the scorer model."""
        return f"{self.name}_scorer"


def read_table(path: Path = DEFAULT_TABLE) -> dict[str, Reranker]:
    """Read every row of a table; raise TableError naming the row and field that is wrong."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TableError(f"Cannot read the table of rerankers {path}: {error}") from error
    defaults = document.pop("defaults", {})
    return {name: _row(name, defaults, row) for name, row in document.items()}


def find_reranker(name: str, path: Path = DEFAULT_TABLE) -> Reranker:
    """Return the row of one reranker; raise TableError listing the names there are."""
    table = read_table(path)
    if name not in table:
        raise TableError(f"No reranker {name!r} in {path}; it has: {', '.join(table)}. Add a row or use one of these.")
    return table[name]


def _row(name: str, defaults: dict[str, Any], row: Any) -> Reranker:
    if not isinstance(row, dict):
        raise TableError(f"{name} is {row!r}; a reranker is a [{name}] section.")
    merged = defaults | row
    gates = defaults.get("gates", {}) | row.get("gates", {})
    known = {f.name for f in fields(Reranker)} - {"name"}
    unknown = sorted(set(merged) - known) + sorted(
        f"gates.{key}" for key in set(gates) - {f.name for f in fields(Gates)}
    )
    if unknown:
        raise TableError(f"{name}: unknown field {', '.join(unknown)}; known fields: {', '.join(sorted(known))}.")
    try:
        return Reranker(**merged | {"name": name, "buckets": tuple(merged["buckets"]), "gates": Gates(**gates)})
    except (TypeError, KeyError) as error:
        raise TableError(f"{name}: a field is missing or has the wrong type ({error}).") from error
