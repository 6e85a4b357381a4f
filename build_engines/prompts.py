# SPDX-License-Identifier: Apache-2.0
"""How decoders are asked for a verdict: prompts as data, read from the [prompts] of rerankers.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from build_engines.errors import TableError

QUERY, DOCUMENT, INSTRUCTION = "{query}", "{document}", "{instruction}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The segments of a prompt in order; each text of a segment is tokenised by itself.

    `query` and `document` hold their placeholder once, with what a tokenizer may join to the text (a space before it, a
    line break after it). `yes` and `no` are the verdicts of a yes_no head; without `no` the score is the logit of `yes`
    alone. `apart` says that the checkpoint was trained on segments tokenised apart: then they need not equal the whole.
    """

    name: str
    prefix: tuple[str, ...]
    query: str
    middle: tuple[str, ...]
    document: str
    suffix: tuple[str, ...]
    yes: str = ""
    no: str = ""
    apart: bool = False
    instruction: str = ""

    def __post_init__(self) -> None:
        for f in fields(self):
            value, place = getattr(self, f.name), f"prompts.{self.name}.{f.name}"
            parts = value if isinstance(value, tuple) else (value,)
            kind = bool if f.name == "apart" else str
            if not all(isinstance(part, kind) for part in parts):
                raise TableError(f"{place} is {value!r}; give {'true or false' if kind is bool else 'text'}.")
            if isinstance(value, tuple) and not all(value):
                raise TableError(f"{place} is {value!r}; none of its texts may be empty. For no text at all: [].")
        if self.no and (not self.yes or self.yes == self.no):
            raise TableError(
                f"prompts.{self.name}: yes and no must be two different texts; they are {self.yes!r} and {self.no!r}."
            )
        self._check_placeholders()

    def _check_placeholders(self) -> None:
        segments = "".join((*self.prefix, *self.middle, *self.suffix))
        for name, placeholder in (("query", QUERY), ("document", DOCUMENT)):
            if getattr(self, name).count(placeholder) != 1:
                raise TableError(f"prompts.{self.name}.{name} must hold {placeholder} exactly once.")
            if (segments + self.query + self.document).count(placeholder) != 1:
                raise TableError(f"prompts.{self.name}: {placeholder} stands in the field {name} and nowhere else.")
        if INSTRUCTION in self.query + self.document:
            raise TableError(f"prompts.{self.name}: {INSTRUCTION} belongs in prefix, middle or suffix.")
        asks = INSTRUCTION in segments
        if asks != bool(self.instruction):
            raise TableError(
                f"prompts.{self.name}: "
                + (f"{INSTRUCTION} needs an instruction." if asks else f"an instruction, but no {INSTRUCTION} for it.")
            )

    @classmethod
    def read(cls, name: str, section: Any) -> Prompt:
        """Return a section [prompts.NAME] of the table; raise TableError naming the field that is wrong."""
        if not isinstance(section, dict):
            raise TableError(f"prompts.{name} is {section!r}; a prompt is a [prompts.{name}] section.")
        known = {f.name for f in fields(cls)} - {"name"}
        unknown = sorted(set(section) - known)
        if unknown:
            raise TableError(f"prompts.{name}: unknown field {', '.join(unknown)}; known: {', '.join(sorted(known))}.")
        listed = {
            key: tuple(value) if isinstance(value := section[key], list) else (value,)
            for key in ("prefix", "middle", "suffix")
            if key in section
        }
        try:
            return cls(**section | listed | {"name": name})
        except TypeError as error:
            raise TableError(f"prompts.{name}: a field is missing ({error}).") from error

    def instructed(self, instruction: str) -> Prompt:
        """Return the prompt with another instruction; raise TableError where it takes none."""
        return replace(self, instruction=instruction)

    def pieces(self, segment: str) -> tuple[str, ...]:
        """Return the texts of `prefix`, `middle` or `suffix` with the instruction in its place."""
        texts: tuple[str, ...] = getattr(self, segment)
        return tuple(text.replace(INSTRUCTION, self.instruction) for text in texts)

    @property
    def around_query(self) -> tuple[str, str]:
        """What stands directly before and after the query."""
        head, _, tail = self.query.partition(QUERY)
        return head, tail

    @property
    def around_document(self) -> tuple[str, str]:
        """What stands directly before and after the document."""
        head, _, tail = self.document.partition(DOCUMENT)
        return head, tail

    def whole(self, query: str, document: str) -> str:
        """Return the prompt as one text."""
        parts = [*self.pieces("prefix"), query.join(self.around_query), *self.pieces("middle")]
        return "".join([*parts, document.join(self.around_document), *self.pieces("suffix")])


def read_prompts(*tables: Mapping[str, Any]) -> dict[str, Prompt]:
    """Return the prompts of some tables by name; those of a later table win."""
    found: dict[str, Prompt] = {}
    for table in tables:
        sections = table.get("prompts", {})
        if not isinstance(sections, dict):
            raise TableError(f"prompts is {sections!r}; use [prompts.NAME] sections.")
        found |= {name: Prompt.read(name, section) for name, section in sections.items()}
    return found
