# SPDX-License-Identifier: Apache-2.0
"""The prompts of decoders as their authors publish them, written out, and the ids that a checkpoint's tokenizer gives.

Nothing here is read from the project's table or computed by its code.
"""

from __future__ import annotations

import random
from typing import Any

from tests.unit.random_texts import random_pair

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

# DeepSeek-R1's chat template, its think block closed.
R1 = (
    "<｜begin▁of▁sentence｜><｜User｜>Judge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".\n'
    "\n"
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n"
    "<Document>: {document}<｜Assistant｜><think>\n"
    "\n"
    "</think>\n"
    "\n"
)
# Qwen3-Reranker's model card, the code for Transformers: three pieces, each tokenised by itself.
QWEN3_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QWEN3_BODY = "<Instruct>: " + INSTRUCTION + "\n<Query>: {query}\n<Document>: {document}"
QWEN3_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN3 = QWEN3_PREFIX + QWEN3_BODY + QWEN3_SUFFIX
# FlagEmbedding's inference/reranker/decoder_only/base.py.
GEMMA_BOS = 2
GEMMA_PROMPT = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
    "prediction of either 'Yes' or 'No'."
)
WRITTEN = {"qwen2": R1, "qwen2_classifier": R1, "llama": R1, "qwen3": QWEN3}
# Families whose prompt is one text for their tokenizer.
WHOLE = ("qwen2", "llama", "qwen3")
FAMILIES = (*WHOLE, "gemma")

# White space, scripts and joins at which a prompt could run into a text; an empty document.
ODD_PAIRS = [
    ("what is a panda?", ""),
    ("what is a panda?", " "),
    ("what is a panda?", "\n"),
    ("   leading spaces", "   leading spaces"),
    ("trailing spaces   ", "trailing spaces   "),
    ("\n\nlines before", "\r\nlines before"),
    ("lines after\n\n", "lines after\r\n\r\n"),
    ("a\n\n  b\tc\t", "\tline one\r\nline two\t"),
    ("?", "."),
    (".", "?"),
    ("什么是大熊猫？", "大熊猫是中国特有的熊科动物。"),
    ("日本語の、", "。日本語"),
    ("🐼", "👩\u200d👩\u200d👧"),
    ("ℕ ½ ﬁ Ⅳ", "ＡＢＣ ❤\ufe0f"),
    ("\u0301combining first", "\u0301combining first"),
    ("last e\u0301", "last n\u0303"),
    ("ᄒ", "\u1161\u11ab"),
    ("ngườI ไทย क\u094d", "אבב العربية"),
    ("\ufeff\u200b", "\u200d\u00a0\u3000\u2028"),
    ("\x01\x7f", "\x00"),
    ("<Document>: no", "<Query>: no\n<Document>: no"),
    ("{document}", "{query} {instruction}"),
    ("it's 1,234.56", "'s 1234567890"),
    ("user\n", "assistant\n"),
]


def random_pairs(seed: int, count: int) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    return [random_pair(rng) for _ in range(count)]


def plain(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def filled(template: str, query: str, document: str) -> str:
    """Return a template with both texts in their places, whatever these hold."""
    before, rest = template.split("{query}")
    between, after = rest.split("{document}")
    return f"{before}{query}{between}{document}{after}"


def whole_ids(family: str, tokenizer: Any, query: str, document: str) -> list[int]:
    """Return the ids of a pair that needs no cut: of the whole text, or with Gemma of FlagEmbedding's segments."""
    if family != "gemma":
        return plain(tokenizer, filled(WRITTEN[family], query, document))
    texts = (f"A: {query}", "\n", f"B: {document}", "\n", GEMMA_PROMPT)
    return [GEMMA_BOS, *(i for text in texts for i in plain(tokenizer, text))]


class Segments:
    """The segments that the serving code joins, each tokenised by itself; only a query and a document may be cut."""

    def __init__(
        self, tokenizer: Any, prefix: list[int], query: str, middle: list[int], document: str, suffix: list[int]
    ) -> None:
        self.tokenizer = tokenizer
        self.prefix, self.middle, self.suffix = prefix, middle, suffix
        self.control = len(prefix) + len(middle) + len(suffix)
        self._query, self._document = query, document
        self.query_tail, self.document_tail = (plain(tokenizer, text.split("}")[1]) for text in (query, document))

    @classmethod
    def of(cls, family: str, tokenizer: Any) -> Segments:
        """Return those of a published prompt."""
        if family == "gemma":
            line = plain(tokenizer, "\n")
            end = [*line, *plain(tokenizer, GEMMA_PROMPT)]
            return cls(tokenizer, [GEMMA_BOS], "A: {query}", line, "B: {document}", end)
        return cls.of_text(tokenizer, WRITTEN[family], " {query}\n", " {document}")

    @classmethod
    def of_text(cls, tokenizer: Any, template: str, query: str, document: str) -> Segments:
        """Cut a template around what belongs to a query and to a document."""
        prefix, rest = template.split(query)
        middle, suffix = rest.split(document)
        ids = [plain(tokenizer, text) for text in (prefix, middle, suffix)]
        return cls(tokenizer, ids[0], query, ids[1], document, ids[2])

    def query(self, query: str) -> list[int]:
        return plain(self.tokenizer, self._query.replace("{query}", query))

    def document(self, document: str) -> list[int]:
        return plain(self.tokenizer, self._document.replace("{document}", document))

    def query_limit(self, max_length: int) -> int:
        """Three quarters of what the prompt leaves."""
        return (max_length - self.control) * 3 // 4

    def row(self, query: str, document: str, max_length: int) -> list[int]:
        """Return the ids of a row: the query keeps at most its limit, the document the rest, both their last ids."""
        q = _cut(self.query(query), self.query_limit(max_length), self.query_tail)
        d = _cut(self.document(document), max_length - self.control - len(q), self.document_tail)
        return [*self.prefix, *q, *self.middle, *d, *self.suffix]

    def cuts(self, query: str, document: str, max_length: int) -> bool:
        """Tell whether a pair has to be cut."""
        q = len(self.query(query))
        return q > self.query_limit(max_length) or self.control + q + len(self.document(document)) > max_length


def _cut(ids: list[int], limit: int, tail: list[int]) -> list[int]:
    return ids if len(ids) <= limit else ids[: limit - len(tail)] + tail
