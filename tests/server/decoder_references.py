# SPDX-License-Identifier: Apache-2.0
"""Scores of decoders computed without this project: prompts written out, and the whole model in Transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.server.served import Served
from tests.server.served_decoders import FP32_DECODERS, MAX_LENGTH

_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


@dataclass(frozen=True, slots=True)
class Written:
    """A prompt as text: what comes before the query, the query, the text between, the document, and what follows."""

    before: str
    query: str
    between: str
    document: str
    after: str
    yes: str
    no: str  # "" where the score is the logit of yes alone
    # Typed by a user, these are text; none of them may end the pair, fill it or start another turn.
    control: tuple[str, ...]

    def parts(self, query: str, document: str) -> tuple[str, str, str, str, str]:
        """The prompt of a pair; joined it is the whole."""
        return self.before, self.query.format(query), self.between, self.document.format(document), self.after


_DEEPSEEK = Written(
    f"<｜begin▁of▁sentence｜><｜User｜>{_JUDGE}\n\n<Instruct>: {_TASK}\n<Query>:",
    " {}\n",
    "<Document>:",
    " {}",
    "<｜Assistant｜><think>\n\n</think>\n\n",
    "yes",
    "no",
    ("<｜User｜>", "<｜Assistant｜>", "</think>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
)
_QWEN3 = Written(
    f"<|im_start|>system\n{_JUDGE}<|im_end|>\n<|im_start|>user\n<Instruct>: {_TASK}\n<Query>:",
    " {}\n",
    "<Document>:",
    " {}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "yes",
    "no",
    ("<|im_end|>", "<|im_start|>", "</think>", "<|endoftext|>"),
)
_GEMMA = Written(
    "<bos>",
    "A: {}",
    "\n",
    "B: {}",
    "\nGiven a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
    "prediction of either 'Yes' or 'No'.",
    "Yes",
    "",
    ("<bos>", "<eos>", "<pad>"),
)
WRITTEN = {"qwen2": _DEEPSEEK, "qwen2_classifier": _DEEPSEEK, "llama": _DEEPSEEK, "qwen3": _QWEN3, "gemma": _GEMMA}


class DecoderReference:
    """A checkpoint as its authors use it, one pair at a time and without padding."""

    def __init__(self, folder: Path, family: str) -> None:
        self.written = WRITTEN[family]
        loader = AutoModelForSequenceClassification if family == "qwen2_classifier" else AutoModelForCausalLM
        self._model = loader.from_pretrained(folder, dtype=torch.float32).eval()
        self._classifies = family == "qwen2_classifier"
        source = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        self._tokenizer = _tokenizer(source)
        # Blank ones are how Gemma reads line breaks.
        blank = [token for token in source["added_tokens"] if not token["content"].strip()]
        self._control_ids = {token["id"] for token in source["added_tokens"] if token not in blank}
        self._plain = _tokenizer(source | {"added_tokens": blank})

    def whole(self, query: str, document: str) -> list[int]:
        """The ids of the uncut prompt; control tokens in the two texts are read as text."""
        parts = self.written.parts(query, document)
        if not any(token in text for token in self.written.control for text in (query, document)):
            return _ids(self._tokenizer, "".join(parts))
        return [i for ids in self._parts(parts) for i in ids]

    def ids(self, query: str, document: str) -> list[int]:
        """The ids that are read: a query keeps 3/4 of what the prompt leaves, a document keeps what is left then."""
        before, q, between, d, after = self._parts(self.written.parts(query, document))
        room = MAX_LENGTH - len(before) - len(between) - len(after)
        whole = self.whole(query, document)
        if len(whole) <= MAX_LENGTH and len(q) <= room * 3 // 4:
            return whole
        if len(q) > room * 3 // 4:
            _, _, behind = self.written.query.partition("{}")
            end = _ids(self._tokenizer, behind)
            q = [*q[: room * 3 // 4 - len(end)], *end]
        return [*before, *q, *between, *d[: room - len(q)], *after]

    def logits(self, query: str, document: str) -> Tensor:
        """What the model makes of the last token; float64[vocabulary], or float64[1] of a classifier."""
        with torch.inference_mode():
            ids = torch.tensor([self.ids(query, document)])
            answer = self._model(ids) if self._classifies else self._model(ids, logits_to_keep=1)
        last: Tensor = answer.logits.reshape(-1)
        return last.double()

    def verdicts(self, values: Tensor) -> list[float]:
        """The value of yes in float64[vocabulary], then that of no where the prompt has one."""
        words = (self.written.yes, self.written.no)
        return [float(values[self._tokenizer.token_to_id(word)]) for word in words if word]

    def score(self, query: str, document: str) -> float:
        """The raw logit of a pair."""
        logits = self.logits(query, document)
        yes, *no = [float(logits[0])] if self._classifies else self.verdicts(logits)
        return yes - sum(no)

    def _parts(self, texts: Sequence[str]) -> list[list[int]]:
        parts = [_ids(self._plain if index in (1, 3) else self._tokenizer, text) for index, text in enumerate(texts)]
        assert self._control_ids.isdisjoint([*parts[1], *parts[3]])
        return parts


def decoder_references(served: Served) -> dict[str, DecoderReference]:
    """The reference of each FP32 decoder."""
    torch.set_num_threads(1)  # as for the encoders
    return {name: DecoderReference(served.checkpoints[name], family) for name, family in FP32_DECODERS.items()}


def _tokenizer(source: object) -> Tokenizer:
    tokenizer = Tokenizer.from_str(json.dumps(source))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
