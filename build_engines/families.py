# SPDX-License-Identifier: Apache-2.0
"""Families of checkpoints: how each is loaded, what it computes, and the same as a graph that exports cleanly.

Decoders have a module of their own, `decoders`. Two functions per family and nothing shared between them on purpose:
`reference_scores` calls the model as its authors do, a `...Graph` calls it with explicit masks and positions, so that
comparing them proves the export.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from build_engines.decoders import MASKED, DecoderGraph, check_decoder, check_one_label, decoder_scores
from build_engines.errors import CheckpointError
from build_engines.fetch import Checkpoint
from build_engines.table import Head, Reranker

# sentence-transformers' scale for cosine scores (MultipleNegativesRankingLoss, scale=20), used in training.
COSINE_SCALE = 20.0


class SequenceClassificationGraph(nn.Module):
    """A cross-encoder: one pass over the pair, one logit."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__()
        self.model = model
        self.padding_idx: int | None = None if config.model_type == "bert" else int(config.pad_token_id)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Return float32[pairs, 1] for int64[pairs, length] inputs padded on the right."""
        positions = torch.arange(input_ids.shape[1])[None, :]
        if self.padding_idx is not None:
            # RoBERTa numbers real tokens from padding_idx + 1; with right padding, arange equals its cumulative sum.
            positions = (positions + 1) * attention_mask + self.padding_idx
        bias = (1.0 - attention_mask[:, None, None, :].to(torch.float32)) * MASKED
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        logits: Tensor = self.model(
            input_ids=input_ids, attention_mask=bias, position_ids=positions, token_type_ids=types
        ).logits
        return logits


class FoldedBiEncoderGraph(nn.Module):
    """A bi-encoder in one pass: neither segment sees the other, each is pooled alone, and the score is their cosine."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """Return float32[pairs, 1]; token_type_ids is 0 for the query's segment and 1 for the document's."""
        mask = attention_mask.to(torch.float32)
        document = token_type_ids.to(torch.float32) * mask
        query = mask - document
        visible = query[:, :, None] * query[:, None, :] + document[:, :, None] * document[:, None, :]
        bias = ((1.0 - visible) * MASKED)[:, None]
        query_length = (attention_mask * (1 - token_type_ids)).sum(1, keepdim=True)
        positions = torch.arange(input_ids.shape[1])[None, :] - token_type_ids * query_length
        hidden: Tensor = self.model(
            input_ids=input_ids,
            attention_mask=bias,
            position_ids=positions,
            token_type_ids=torch.zeros_like(input_ids),
        ).last_hidden_state
        # The mean's divisor cancels in the cosine, so a sum is enough.
        pooled = [nn.functional.normalize((hidden * part[:, :, None]).sum(1), dim=-1) for part in (query, document)]
        return COSINE_SCALE * (pooled[0] * pooled[1]).sum(-1, keepdim=True)


_LOADERS: dict[Head, Any] = {
    "bi_encoder": AutoModel,
    "sequence_classification": AutoModelForSequenceClassification,
    "yes_no": AutoModelForCausalLM,
}


def load_model(checkpoint: Checkpoint, reranker: Reranker) -> nn.Module:
    """Load the checkpoint in FP32 for the CPU; raise CheckpointError unless it is exactly what its row says."""
    if checkpoint.is_decoder:
        check_decoder(checkpoint, reranker)
    else:
        _check_family(checkpoint, reranker)
    loader = _LOADERS[reranker.head]
    try:
        with _quiet_transformers():
            model, report = loader.from_pretrained(
                checkpoint.folder,
                attn_implementation="eager",
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # the report below refuses them with a reason
                output_loading_info=True,
            )
    except Exception as error:  # transformers, safetensors and torch each raise their own
        raise CheckpointError(f"{checkpoint.folder} cannot be loaded: {error}. Fetch the checkpoint again.") from error
    # A bi-encoder pools by the mean; the pooler that BERT would add is not used and may be missing.
    unused = "pooler." if reranker.head == "bi_encoder" else None
    missing = sorted(key for key in report["missing_keys"] if unused is None or not key.startswith(unused))
    if missing or report.get("mismatched_keys"):
        raise CheckpointError(
            f"{checkpoint.folder} lacks weights for {', '.join(missing or map(str, report['mismatched_keys']))}: they "
            "would be random, and so would the scores. Use a checkpoint trained as a reranker."
        )
    module: nn.Module = model.eval()
    return module


def graph_of(model: nn.Module, reranker: Reranker, checkpoint: Checkpoint) -> nn.Module:
    """Return the module to export; a decoder's takes the model apart, which can then no longer be used."""
    if checkpoint.is_decoder:
        return DecoderGraph.of(model, reranker, checkpoint).eval()
    if reranker.head == "bi_encoder":
        return FoldedBiEncoderGraph(model).eval()
    return SequenceClassificationGraph(model, model.config).eval()


def reference_scores(model: nn.Module, reranker: Reranker, checkpoint: Checkpoint, arrays: dict[str, Tensor]) -> Tensor:
    """Score padded pairs the way the checkpoint's authors do; float32[pairs, 1]."""
    with torch.no_grad():
        if checkpoint.is_decoder:
            return decoder_scores(model, reranker, checkpoint, arrays)
        if reranker.head == "bi_encoder":
            query, document = (_embed(model, arrays, segment) for segment in (0, 1))
            return COSINE_SCALE * nn.functional.cosine_similarity(query, document)[:, None]
        logits: Tensor = model(**arrays).logits
        return logits


def _embed(model: nn.Module, arrays: dict[str, Tensor], segment: int) -> Tensor:
    # Each text alone, as the bi-encoder has it: its own row, its own positions, its own padding.
    keep = (arrays["attention_mask"] == 1) & (arrays["token_type_ids"] == segment)
    rows = [ids[mask] for ids, mask in zip(arrays["input_ids"], keep, strict=True)]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    hidden: Tensor = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = mask[:, :, None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def _check_family(checkpoint: Checkpoint, reranker: Reranker) -> None:
    config, name = checkpoint.config, reranker.name
    architectures = config.get("architectures") or ["nothing"]
    if reranker.head == "sequence_classification":
        if not str(architectures[0]).endswith("ForSequenceClassification"):
            raise CheckpointError(
                f"{name}: the checkpoint is a {architectures[0]}, which has no classification head. An embedding model "
                'is not a reranker; use a ...ForSequenceClassification, or head = "bi_encoder".'
            )
        check_one_label(checkpoint, reranker)
    elif checkpoint.model_type != "bert" or not _mean_pooling(checkpoint):
        raise CheckpointError(f"{name}: a bi_encoder must be a BERT with mean pooling (1_Pooling/config.json).")
    segments = reranker.head == "bi_encoder" or checkpoint.model_type == "bert"
    if segments != reranker.segment_ids:
        raise CheckpointError(
            f"{name}: set segment_ids = {str(segments).lower()} for a {checkpoint.model_type} checkpoint."
        )
    positions = int(config["max_position_embeddings"])
    if checkpoint.model_type != "bert":
        positions -= int(config["pad_token_id"]) + 1  # RoBERTa's positions start after padding_idx
    if reranker.max_length > positions:
        raise CheckpointError(
            f"{name}: max_length {reranker.max_length} exceeds the model's {positions} positions. "
            f"Set max_length and the last bucket to {positions} or less in rerankers.toml."
        )


def _mean_pooling(checkpoint: Checkpoint) -> bool:
    path = checkpoint.folder / "1_Pooling" / "config.json"
    return path.exists() and json.loads(path.read_text(encoding="utf-8")).get("pooling_mode_mean_tokens") is True


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Its loading report is checked, not printed."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    disable_progress_bar: Callable[[], None] = transformers_logging.disable_progress_bar
    disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
