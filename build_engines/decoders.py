# SPDX-License-Identifier: Apache-2.0
"""Decoders as rerankers: one pass over the prompt, and one number read off its last token.

With the head `yes_no` that number is logit(yes) - logit(no) of the next token, so its sigmoid is P(yes) among the two;
with `sequence_classification` it is the one label of a head that was trained. Either way it is a product with one row,
and neither the other 150,000 rows of a language model nor their logits are ever in the graph.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from build_engines.errors import CheckpointError
from build_engines.fetch import Checkpoint
from build_engines.prompt_layout import good_pair_ids, load_tokenizer, verdict_ids
from build_engines.prompts import Prompt
from build_engines.table import Reranker

# Finite in FP16, and exp(-10000) is exactly 0 in FP32 next to any real attention score.
MASKED = -10000.0


class DecoderGraph(nn.Module):
    """A decoder without its language-model head, and the one row that scores its last real token."""

    row: Tensor

    def __init__(self, model: nn.Module, row: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("row", row)

    @classmethod
    def of(cls, model: Any, reranker: Reranker, checkpoint: Checkpoint) -> DecoderGraph:
        """Cut the head of a Transformers model to its row; the model is taken apart."""
        if reranker.head == "sequence_classification":
            row = model.score.weight[0]
        else:
            yes, no = verdicts(reranker, checkpoint)
            weight = model.get_output_embeddings().weight
            row = weight[yes] if no is None else weight[yes] - weight[no]
            model.lm_head = nn.Identity()  # gigabytes, where it is not the embeddings' matrix
        return cls(model.model, row.detach().clone())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return float32[pairs, 1] for int64[pairs, length] inputs padded on the right."""
        positions = torch.arange(input_ids.shape[1])
        # What stands on the right of a row's last token, padding too, is not seen by it: the causal mask is enough.
        bias = (positions[None, :] > positions[:, None]).to(torch.float32) * MASKED
        hidden = self.model(
            input_ids=input_ids, attention_mask=bias[None, None], position_ids=positions[None], use_cache=False
        ).last_hidden_state
        last = (attention_mask.sum(1, keepdim=True) - 1).clamp(min=0)  # an empty row is scored, as its first token
        picked = hidden.gather(1, last[:, :, None].expand(-1, -1, hidden.shape[-1]))[:, 0]
        scores: Tensor = (picked * self.row).sum(-1, keepdim=True)
        return scores


def decoder_scores(model: Any, reranker: Reranker, checkpoint: Checkpoint, arrays: dict[str, Tensor]) -> Tensor:
    """Score pairs with the whole model, each alone and without padding; float32[pairs, 1]."""
    scores = []
    yes, no = verdicts(reranker, checkpoint) if reranker.head == "yes_no" else (0, None)
    for ids, mask in zip(arrays["input_ids"], arrays["attention_mask"], strict=True):
        logits = _last_logits(model, ids[mask == 1][None])
        # The one label of a classification head stands first.
        scores.append(logits[yes : yes + 1] - (0 if no is None else logits[no]))
    return torch.stack(scores)


def check_verdict(model: Any, reranker: Reranker, checkpoint: Checkpoint) -> dict[str, Any]:
    """Ask the whole model about a pair that is known to be good; return what a manifest says of the verdicts.

    Raises CheckpointError where P(yes) + P(no) over the whole vocabulary is below the row's floor: the checkpoint wants
    to go on otherwise, with a thought, a greeting or the end, so the difference of the two would be noise.
    """
    prompt = reranker.prompt
    if prompt is None or reranker.head != "yes_no":
        return {}
    tokenizer = load_tokenizer(checkpoint.folder)
    yes, no = verdicts(reranker, checkpoint)
    ids = torch.tensor([good_pair_ids(tokenizer, prompt)])
    with torch.no_grad():
        probabilities = _last_logits(model, ids).to(torch.float64).softmax(-1)
    mass = float(probabilities[yes] + (0 if no is None else probabilities[no]))
    if not mass >= reranker.verdict_floor:
        top = probabilities.topk(3)
        likely = ", ".join(
            f"{tokenizer.id_to_token(int(i))!r} {float(p):.3f}" for p, i in zip(top.values, top.indices, strict=True)
        )
        names = f"{prompt.yes!r} and {prompt.no!r} have together" if prompt.no else f"{prompt.yes!r} has"
        raise CheckpointError(
            f"{reranker.name}: after the prompt {prompt.name} the checkpoint does not answer with its verdicts: "
            f"{names} probability {mass:.2g}, at least {reranker.verdict_floor:g} is asked. It goes on "
            f"with {likely}. A think block that is still open, a prompt of another model or a wrong verdict does this; "
            "correct the prompt in rerankers.toml, or set verdict_floor = 0 if you know better."
        )
    return {
        "yes": prompt.yes,
        "yes_id": yes,
        "no": prompt.no,
        "no_id": no,
        "mass": mass,
        "floor": reranker.verdict_floor,
    }


def verdicts(reranker: Reranker, checkpoint: Checkpoint) -> tuple[int, int | None]:
    """Return the ids of yes and no in this checkpoint's vocabulary."""
    if reranker.prompt is None:
        raise CheckpointError(f"{reranker.name}: a yes_no head needs a prompt.")
    return _verdicts(checkpoint.folder, checkpoint.files["tokenizer.json"], reranker.prompt)


@functools.lru_cache(maxsize=1)
def _verdicts(folder: Path, _sha256: str, prompt: Prompt) -> tuple[int, int | None]:
    return verdict_ids(load_tokenizer(folder), prompt)


def check_one_label(checkpoint: Checkpoint, reranker: Reranker) -> None:
    """Raise CheckpointError where a classification head has more labels than the one that is a score."""
    labels = len(checkpoint.config.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"}))
    if labels != 1:
        raise CheckpointError(f"{reranker.name}: the head has {labels} labels; a reranker has 1.")


def check_decoder(checkpoint: Checkpoint, reranker: Reranker) -> None:
    """Raise CheckpointError where a decoder's config is not what its row and this project's graph expect."""
    config, name = checkpoint.config, reranker.name
    architecture = str((config.get("architectures") or ["nothing"])[0])
    ending = "ForCausalLM" if reranker.head == "yes_no" else "ForSequenceClassification"
    if reranker.head == "bi_encoder" or not architecture.endswith(ending):
        raise CheckpointError(
            f'{name}: the checkpoint is a {architecture}. Set head = "yes_no" for a ...ForCausalLM, '
            '"sequence_classification" for a ...ForSequenceClassification with one label.'
        )
    if reranker.head == "sequence_classification":
        check_one_label(checkpoint, reranker)
    positions = int(config["max_position_embeddings"])
    if config.get("use_sliding_window"):
        positions = min(positions, int(config.get("sliding_window") or positions))
    if reranker.max_length > positions:
        raise CheckpointError(
            f"{name}: max_length {reranker.max_length} exceeds the {positions} tokens that the model attends to. "
            f"Set max_length and the last bucket to {positions} or less in rerankers.toml."
        )
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise CheckpointError(
            f"{name}: its rotary embedding is of the kind {kind!r}, which changes with the length of a row; supported "
            "are default, linear, llama3 and yarn."
        )


def _last_logits(model: Any, ids: Tensor) -> Tensor:
    """Return what the model makes of the last token of one row without padding; float32[vocabulary or labels]."""
    logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits.reshape(-1, logits.shape[-1])[-1].to(torch.float32)
