# SPDX-License-Identifier: Apache-2.0
"""Small decoders of each kind, exported as the build does it, with the Transformers model they come from.

Four layers, and weights large enough that scores depend on where a token stands: what rounding does to positions shows.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from build_engines import export
from build_engines.decoders import DecoderGraph
from build_engines.table import Reranker
from tests.decoder_checkpoints import MODELS, vary

KINDS = ("qwen2", "qwen3", "llama", "gemma")
LAYERS = 4
VOCABULARY = 500
YES, NO = 7, 9
# Normalisations of a layer: of its input, after attention, and with Qwen3 of queries and of keys.
NORMS = {"qwen2": 2, "qwen3": 4, "llama": 2, "gemma": 2}
# Every linear layer of a decoder's layer, as the checkpoint calls them, in the order of the graph.
LINEAR = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
# YaRN multiplies cosine and sine by a constant.
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "attn_implementation": "eager",
}


@dataclass(frozen=True, slots=True)
class Decoder:
    """A Transformers model in FP32, and the graph of its score logit(yes) - logit(no)."""

    model: Any
    path: Path

    def graph(self) -> onnx.ModelProto:
        """Load the graph anew."""
        return onnx.load(self.path)

    def in_bf16(self) -> Any:
        """Return the model as Transformers loads it in BF16, which leaves the angles of its positions in FP32."""
        model = copy.deepcopy(self.model).to(torch.bfloat16)
        model.model.rotary_emb.inv_freq = self.model.model.rotary_emb.inv_freq.clone()
        return model


class DecoderGraphs:
    """Each kind is made and exported at most once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.of = functools.cache(self._of)

    def _of(self, kind: str) -> Decoder:
        model = _model(kind)
        weight = model.get_output_embeddings().weight
        path = self.root / kind / "model.onnx"
        path.parent.mkdir()
        limits = cast(Reranker, SimpleNamespace(max_batch_size=16, max_length=1024, segment_ids=False))
        graph = DecoderGraph(model.model, (weight[YES] - weight[NO]).detach().clone()).eval()
        export._write(graph, limits, path, external=False)
        export._rewrite(path)
        return Decoder(model, path)


def _model(kind: str) -> Any:
    config, model_class = MODELS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config(**_SHAPE, **({"rope_parameters": _YARN} if kind == "qwen2" else {}))).eval()
        vary(model)
    with torch.no_grad():
        for parameter in model.parameters():
            # As checkpoints are published, so that storing weights in BF16 loses nothing.
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def prompts(lengths: Sequence[int], *, seed: int = 0) -> dict[str, NDArray[np.int64]]:
    """Return a ragged batch of random tokens, padded on the right."""
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.random.default_rng(seed).integers(5, VOCABULARY, mask.shape)
    return {"input_ids": ids * mask, "attention_mask": mask}
