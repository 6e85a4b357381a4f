# SPDX-License-Identifier: Apache-2.0
"""rerankers.toml as typed rows that cannot be built wrong."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from build_engines.errors import TableError
from build_engines.prompts import Prompt, read_prompts

Head = Literal["sequence_classification", "bi_encoder", "yes_no"]
Precision = Literal["auto", "int8", "fp16", "bf16", "fp32"]
BasePrecision = Literal["fp16", "bf16"]
HardwareCompatibility = Literal["none", "ampere_plus", "same_compute_capability"]

# TensorRT's fused INT8 attention ends here (TensorRT developer guide, "Fused Attention").
INT8_ATTENTION_MAX_LENGTH = 512

DEFAULT_TABLE = Path(__file__).with_name("rerankers.toml")


def fp32_tolerance(reranker: Reranker) -> float:
    """Return what two correct FP32 implementations of a model may differ by, in units of its score.

    Encoders of 24 layers stay below 1e-4. A decoder's score is a difference of two logits of tens each.
    """
    return 1e-3 if reranker.prompt else 1e-4


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
            if not isinstance(value, int | float) or isinstance(value, bool) or not -1 <= value < math.inf:
                raise TableError(f"gates.{f.name} is {value!r}; give a number of at least -1.")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What TensorRT's builder is told. `workspace_gib` 0 leaves it the whole device memory."""

    workspace_gib: float = 0.0
    optimization_level: int = 3
    version_compatible: bool = False
    hardware_compatibility: HardwareCompatibility = "none"

    def __post_init__(self) -> None:
        if not 0 <= self.workspace_gib < math.inf:
            raise TableError(f"engine.workspace_gib is {self.workspace_gib}; use 0 (no limit) or more.")
        if self.optimization_level not in range(6):
            raise TableError(f"engine.optimization_level is {self.optimization_level}; TensorRT knows 0 to 5.")
        if self.hardware_compatibility not in get_args(HardwareCompatibility):
            raise TableError(
                f"engine.hardware_compatibility is {self.hardware_compatibility!r}; "
                f"use one of {get_args(HardwareCompatibility)}."
            )


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
    base_gates: Gates
    ndcg_above_chance: float
    opt_batch_size: int
    base_precision: BasePrecision
    int8_attention: bool
    search_budget: float
    engine: EngineOptions
    verify_pairs: int
    verdict_floor: float
    prompt: Prompt | None = None
    cpu_threads: int = 0
    revision: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)
    about: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise TableError(f"{self.name!r} cannot name a reranker; use lower-case letters, digits and underscores.")
        for name, allowed in (("head", Head), ("precision", Precision), ("base_precision", BasePrecision)):
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
        self._check_gpu()
        self._check_prompt()
        if self.verify_pairs < 1:
            raise TableError(f"{self.name}: verify_pairs is {self.verify_pairs}; use 1 or more.")
        if self.cpu_threads < 0:
            raise TableError(f"{self.name}: cpu_threads is {self.cpu_threads}; use 0 (all) or a number of threads.")
        if self.revision and not re.fullmatch(r"[0-9a-f]{40}", self.revision):
            raise TableError(
                f"{self.name}: revision {self.revision!r} is not a commit; give its 40 hexadecimal digits."
            )

    def _check_gpu(self) -> None:
        if not 1 <= self.opt_batch_size <= self.max_batch_size:
            raise TableError(
                f"{self.name}: opt_batch_size is {self.opt_batch_size}; use 1 to max_batch_size "
                f"({self.max_batch_size})."
            )
        if not 0 <= self.search_budget < 1:
            raise TableError(f"{self.name}: search_budget is {self.search_budget}; use a share from 0 to below 1.")
        if self.int8_attention and self.max_length > INT8_ATTENTION_MAX_LENGTH:
            raise TableError(
                f"{self.name}: int8_attention needs buckets of at most {INT8_ATTENTION_MAX_LENGTH} tokens "
                f"(TensorRT fuses no longer INT8 attention); the last is {self.max_length}. Set int8_attention = false."
            )

    def _check_prompt(self) -> None:
        if not 0 <= self.verdict_floor < 1:
            raise TableError(
                f"{self.name}: verdict_floor is {self.verdict_floor}; use a probability from 0 to below 1."
            )
        if self.head == "yes_no" and (self.prompt is None or not self.prompt.yes):
            raise TableError(f"{self.name}: a yes_no head needs a prompt that names its yes; see [prompts].")
        if self.head == "yes_no" and self.prompt is not None and not self.prompt.suffix:
            raise TableError(
                f"{self.name}: the prompt {self.prompt.name} ends in the document, so a yes_no head would read its "
                "verdict where the document was cut. Give it a suffix."
            )
        if self.prompt is not None and (self.head == "bi_encoder" or self.segment_ids):
            raise TableError(f"{self.name}: a prompt is for decoders, which take no segment_ids and are no bi_encoder.")

    def query_max(self, control_length: int) -> int:
        """Tokens that a query may keep where `control_length` of a pair's come from neither text.

        FlagEmbedding's rule: `max_length * 3 // 4` (encoder_only/base.py). Where there is a prompt, the length that it
        leaves takes the place of max_length; FlagEmbedding too adds the prompt to it (decoder_only/base.py).
        """
        return (self.max_length - (control_length if self.prompt else 0)) * 3 // 4

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer model."""
        return f"{self.name}_tokenizer"

    @property
    def scorer(self) -> str:
        """Name of the scorer model."""
        return f"{self.name}_scorer"


def read_table(path: Path = DEFAULT_TABLE) -> dict[str, Reranker]:
    """Read every row of a table; raise TableError naming the row and field that is wrong.

    What a table of your own does not set, in a row or in its [defaults], is as in the project's own [defaults]; the
    project's [prompts] are there too.
    """
    document, own = _document(path), _document(DEFAULT_TABLE)
    defaults, given = own["defaults"], document.pop("defaults", {})
    nested = {key: defaults.get(key, {}) | given.get(key, {}) for key in _NESTED}
    defaults = defaults | given | nested
    prompts = read_prompts(own, document)
    document.pop("prompts", None)
    return {name: _row(name, defaults, row, prompts) for name, row in document.items()}


def _document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TableError(f"Cannot read the table of rerankers {path}: {error}") from error


def find_reranker(name: str, path: Path = DEFAULT_TABLE) -> Reranker:
    """Return the row of one reranker; raise TableError listing the names there are."""
    table = read_table(path)
    if name not in table:
        raise TableError(
            f"No reranker {name!r} in {path}; it has: {', '.join(table)}. Use one of these, add a row, or name another "
            "table with --table."
        )
    return table[name]


# Fields that are tables themselves.
_NESTED: Mapping[str, type[Gates] | type[EngineOptions]] = {
    "gates": Gates,
    "base_gates": Gates,
    "engine": EngineOptions,
}


def _row(name: str, defaults: dict[str, Any], row: Any, prompts: Mapping[str, Prompt]) -> Reranker:
    if not isinstance(row, dict):
        raise TableError(f"{name} is {row!r}; a reranker is a [{name}] section.")
    nested = {key: defaults.get(key, {}) | row.get(key, {}) for key in _NESTED}
    merged = defaults | row | nested
    known = {f.name for f in fields(Reranker)} - {"name"} | {"instruction"}
    unknown = sorted(set(merged) - known) + sorted(
        f"{key}.{inner}" for key, kind in _NESTED.items() for inner in set(nested[key]) - {f.name for f in fields(kind)}
    )
    if unknown:
        raise TableError(f"{name}: unknown field {', '.join(unknown)}; known fields: {', '.join(sorted(known))}.")
    prompt = _prompt(name, merged.pop("prompt", None), merged.pop("instruction", None), prompts)
    try:
        parts = {key: kind(**nested[key]) for key, kind in _NESTED.items()}
        return Reranker(**merged | parts | {"name": name, "buckets": tuple(merged["buckets"]), "prompt": prompt})
    except (TypeError, KeyError) as error:
        raise TableError(f"{name}: a field is missing or has the wrong type ({error}).") from error


def _prompt(name: str, wanted: Any, instruction: Any, prompts: Mapping[str, Prompt]) -> Prompt | None:
    if wanted is None:
        if instruction is not None:
            raise TableError(f"{name}: an instruction is part of a prompt; name one: prompt = ...")
        return None
    if not isinstance(wanted, str) or wanted not in prompts:
        raise TableError(f"{name}: there is no prompt {wanted!r}; use one of {', '.join(prompts)}, or add it.")
    return prompts[wanted] if instruction is None else prompts[wanted].instructed(instruction)
