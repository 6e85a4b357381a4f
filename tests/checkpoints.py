# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints, whole and laid out like the published ones, written in a second or two.

Each function writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json into a folder. Equal
arguments write equal files. The weights are random but large, so that scores differ clearly from pair to pair.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from sentencepiece import SentencePieceTrainer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece_model

from build_engines.fetch import DECODERS
from build_engines.table import EngineOptions, Gates, Reranker

# What the tokenizers learn their vocabulary from; English, Chinese, other scripts, numbers and emoji.
CORPUS = (
    "what is a panda? The giant panda is a bear species endemic to China.",
    "How do I stop my sourdough bread from going flat in the oven?",
    "A query and a passage are read together, and the model returns one score for the pair.",
    "The quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs.",
    "Why is the sky red at sunset? Blue light is scattered away before it reaches you.",
    "Trains to the city leave every twenty minutes between six in the morning and midnight.",
    "It costs $1,234.56 per 1kg (approx. €1.100), and 7890 people paid in 2023 or 2024.",
    "Search engines rank documents by how well they answer a question, best document first.",
    "In the beginning there was a short document, and another, longer document followed it.",
    "Naïve façades, déjà vu, Straße, ñandú and Ünïcödé need more than ASCII letters.",
    "什么是大熊猫？大熊猫是中国特有的熊科动物，生活在四川的山里。",
    "日落时天空为什么是红色的？因为蓝光在到达之前被散射掉了。",
    "搜索引擎根据文档回答问题的好坏来排序，最好的文档排在最前面。",
    "从早上六点到午夜，每二十分钟有一班火车开往城市。",
    "日本語のテキストも、ひらがなとカタカナで書きます。",
    "Привет, мир! Сколько стоит билет на поезд?",
    "I love pandas 🐼 and bread 🍞 😀 😀 👍 and family 👩‍👩‍👧 trips ❤️ to the sea 🌊.",
    "print(f'{value:>10}') # code, too: a[0] = b[1] + c * d / e - 100% & x|y ^ ~z <= 3 >= 2 @home",
)
_POSITIONS = 514


def row(name: str, folder: Path, **overrides: Any) -> Reranker:
    """Return a row of the table for a checkpoint folder; buckets follow max_length unless they are given."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = config["architectures"][0]
    decodes = config["model_type"] in DECODERS
    heads = {"ForSequenceClassification": "sequence_classification", "ForCausalLM": "yes_no"}
    max_length = overrides.get("max_length", 512)
    fields: dict[str, Any] = {
        "name": name,
        "checkpoint": str(folder),
        "head": next((head for ending, head in heads.items() if architecture.endswith(ending)), "bi_encoder"),
        "segment_ids": config["model_type"] == "bert",
        "max_length": max_length,
        "buckets": (*(bucket for bucket in (32, 64, 128, 256) if bucket < max_length), max_length),
        "max_batch_size": 64,
        "precision": "auto",
        # Random weights rank at random and have scores so close that rounding reorders them.
        "gates": (loose := Gates(ndcg_drop=0.5, top1_agreement=0.0, kendall_tau=-1.0, max_score_shift=100.0)),
        "base_gates": loose,
        "ndcg_above_chance": -1.0,
        "opt_batch_size": 16,
        "base_precision": "bf16" if decodes else "fp16",
        "int8_attention": False,
        "search_budget": 0.25,
        "engine": EngineOptions(),
        "verify_pairs": 2000,
        "verdict_floor": 0.0,
    }
    return Reranker(**fields | overrides)


def write_xlm_roberta(
    folder: Path,
    *,
    max_positions: int = _POSITIONS,
    labels: int = 1,
    layers: int = 2,
    hidden: int = 32,
    seed: int = 0,
) -> Path:
    """Write an XLM-RoBERTa cross-encoder, like bge-reranker-base, and return its folder."""
    tokenizer = _unigram()
    config = XLMRobertaConfig(**_shape(tokenizer, max_positions, labels, layers, hidden), **_ROBERTA_IDS)
    _save_model(folder, XLMRobertaForSequenceClassification, config, seed)
    return _save_tokenizer(folder, tokenizer, "XLMRobertaTokenizer", _ROBERTA_TOKENS, max_positions - 2)


def write_roberta(
    folder: Path,
    *,
    max_positions: int = _POSITIONS,
    labels: int = 1,
    layers: int = 2,
    hidden: int = 32,
    seed: int = 0,
) -> Path:
    """Write a RoBERTa cross-encoder with byte-level BPE and return its folder."""
    tokenizer = _byte_level()
    config = RobertaConfig(**_shape(tokenizer, max_positions, labels, layers, hidden), **_ROBERTA_IDS)
    _save_model(folder, RobertaForSequenceClassification, config, seed)
    return _save_tokenizer(folder, tokenizer, "RobertaTokenizer", _ROBERTA_TOKENS, max_positions - 2)


def write_bert(
    folder: Path,
    *,
    max_positions: int = 512,
    labels: int = 1,
    layers: int = 2,
    hidden: int = 32,
    seed: int = 0,
) -> Path:
    """Write a BERT cross-encoder with WordPiece, like ms-marco-MiniLM, and return its folder."""
    tokenizer = _word_piece()
    config = BertConfig(**_shape(tokenizer, max_positions, labels, layers, hidden), pad_token_id=0)
    _save_model(folder, BertForSequenceClassification, config, seed)
    return _save_tokenizer(folder, tokenizer, "BertTokenizer", _BERT_TOKENS, max_positions)


def write_bi_encoder(
    folder: Path, *, max_positions: int = 512, layers: int = 2, hidden: int = 32, seed: int = 0
) -> Path:
    """Write a BERT that sentence-transformers loads with mean pooling, like all-MiniLM, and return its folder."""
    tokenizer = _word_piece()
    config = BertConfig(**_shape(tokenizer, max_positions, 2, layers, hidden), pad_token_id=0)
    _save_model(folder, BertModel, config, seed)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    _write_json(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(kinds.items())
        ],
    )
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": hidden, "pooling_mode_mean_tokens": True}
    _write_json(folder / "1_Pooling" / "config.json", pooling)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_positions, "do_lower_case": False})
    return _save_tokenizer(folder, tokenizer, "BertTokenizer", _BERT_TOKENS, max_positions)


_ROBERTA_IDS: dict[str, Any] = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "type_vocab_size": 1}
_ROBERTA_TOKENS = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
_BERT_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def _shape(tokenizer: str, positions: int, labels: int, layers: int, hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": Tokenizer.from_str(tokenizer).get_vocab_size(),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": positions,
        "num_labels": labels,
        # The usual 0.02 makes every score the same to the third digit.
        "initializer_range": 0.3,
    }


def _save_model(folder: Path, kind: Any, config: Any, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config).eval()
    model.save_pretrained(folder)


def _save_tokenizer(folder: Path, tokenizer: str, kind: str, tokens: Mapping[str, str], longest: int) -> Path:
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", {**tokens, "tokenizer_class": kind, "model_max_length": longest})
    return folder


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


@functools.cache
def _unigram() -> str:
    """SentencePiece trains it; ids are then moved to where fairseq has them, as in XLM-R's tokenizer.json."""
    stream = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=stream,
        vocab_size=700,
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name="nmt_nfkc",
        num_threads=1,
        minloglevel=2,
    )
    trained: Any = sentencepiece_model.ModelProto.FromString(stream.getvalue())  # type: ignore[attr-defined]
    special = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    pieces = [(piece.piece, piece.score) for piece in trained.pieces if piece.type == piece.NORMAL]
    tokenizer = Tokenizer(models.Unigram([*special, *pieces, ("<mask>", 0.0)], unk_id=3))
    metaspace = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.normalizer = normalizers.Precompiled(trained.normalizer_spec.precompiled_charsmap)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return _with_special(tokenizer, ["<s>", "<pad>", "</s>", "<unk>"], mask="<mask>")


@functools.cache
def _byte_level() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=[*special, "<mask>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return _with_special(tokenizer, special, mask="<mask>")


@functools.cache
def _word_piece() -> str:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    normalizer = normalizers.BertNormalizer(lowercase=True)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    text = [normalizer.normalize_str(line) for line in CORPUS]
    words = sorted({word for line in text for word, _ in pre_tokenizer.pre_tokenize_str(line)})
    letters = sorted({letter for word in words for letter in word})
    endings = sorted({word[-3:] for word in words if len(word) > 4})
    vocab = dict.fromkeys([*special, *letters, *words, *(f"##{part}" for part in [*letters, *endings])])
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(vocab)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return _with_special(tokenizer, special[:4], mask="[MASK]", lstrip=False)


def _with_special(tokenizer: Any, special: list[str], *, mask: str, lstrip: bool = True) -> str:
    tokens = [AddedToken(token, special=True, normalized=False) for token in special]
    # RoBERTa and XLM-R swallow the space before <mask>.
    tokenizer.add_special_tokens([*tokens, AddedToken(mask, special=True, normalized=False, lstrip=lstrip)])
    text: str = tokenizer.to_str()
    return text
