# SPDX-License-Identifier: Apache-2.0
"""Scores computed without this project, one pair at a time: by transformers, or by sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.server.served import BERT, LIGHT, XLM_R, Served


class CrossEncoder:
    """A checkpoint as its authors use it; pairs that are too long are cut by FlagEmbedding's rule."""

    def __init__(self, folder: Path, max_length: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._tokenizer.model_max_length = 1 << 30  # only silences a warning about long texts
        self._model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
        self._max_length = max_length

    def tokens(self, query: str, document: str) -> int:
        """Length of the whole pair."""
        return len(self._tokenizer([query], [document])["input_ids"][0])

    def score(self, query: str, document: str) -> float:
        """The raw logit."""
        # Lists, because transformers takes an empty second text for none unless it is in a list.
        features = self._tokenizer([query], [document], return_tensors="pt")
        if features["input_ids"].shape[1] > self._max_length:
            features = self._cut(query, document)
        with torch.inference_mode():
            return float(self._model(**features).logits[0, 0])

    def _cut(self, query: str, document: str) -> dict[str, torch.Tensor]:
        """`prepare_for_model(query[: 3/4], document, truncation="only_second")`, which transformers 5 has no more."""
        q, d = (self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in (query, document))
        q = q[: self._max_length * 3 // 4]
        cls, sep = self._tokenizer.cls_token_id, self._tokenizer.sep_token_id
        roberta = self._model.config.model_type == "xlm-roberta"
        head = [cls, *q, sep, sep] if roberta else [cls, *q, sep]
        ids = [*head, *d[: self._max_length - len(head) - 1], sep]
        cut = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        if not roberta:
            cut["token_type_ids"] = torch.tensor([[0] * len(head) + [1] * (len(ids) - len(head))])
        return cut


class BiEncoder:
    """Twenty times the cosine of two embeddings."""

    def __init__(self, folder: Path) -> None:
        self._model = SentenceTransformer(str(folder), device="cpu")

    def tokens(self, query: str, document: str) -> int:
        """Both texts with the control tokens around each."""
        return sum(len(self._model.tokenizer(text)["input_ids"]) for text in (query, document))

    def score(self, query: str, document: str) -> float:
        """In float64, so that only the served score rounds."""
        q, d = (self._model.encode(text, convert_to_tensor=True).double() for text in (query, document))
        return 20 * float(torch.nn.functional.cosine_similarity(q, d, dim=0))


Reference = CrossEncoder | BiEncoder


def references(served: Served) -> dict[str, Reference]:
    """The reference of each FP32 reranker."""
    torch.set_num_threads(1)  # texts are short, and idle threads of PyTorch spin while the server works
    return {
        LIGHT: BiEncoder(served.checkpoints[LIGHT]),
        **{name: CrossEncoder(served.checkpoints[name], served.rows[name].max_length) for name in (XLM_R, BERT)},
    }


def reference_scores(reference: Reference, query: str, documents: Sequence[str]) -> list[float]:
    """Each pair alone."""
    return [reference.score(query, document) for document in documents]
