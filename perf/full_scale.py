# SPDX-License-Identifier: Apache-2.0
"""A random checkpoint of a published one's shape through a whole build: seconds and peak memory.

    python -m perf.full_scale --checkpoint DIR                    (writes 2.3 GB there, and about 6 GB below --work)
    python -m perf.full_scale --checkpoint DIR --target gpu       (10 GB; as far as the verified graph)
    python -m perf.full_scale deepseek_reranker --checkpoint DIR  (3.6 GB there, and about 9 GB below --work)

bge_reranker has the shape of bge-reranker-v2-m3: 24 layers, 1024 hidden, 250,002 words, 8194 positions, 568 M
parameters. deepseek_reranker has that of DeepSeek-R1-Distill-Qwen-1.5B: 28 layers, 1536 hidden, 12 heads over 2 and
151,936 words, and its tokenizer, which the test extra brings. The weights are random, so rankings mean nothing; time
and memory do, and the gates are opened as wide as they go.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from build_engines.__main__ import NOT_FINISHED
from build_engines.pairs import SAMPLE, read_pairs
from build_engines.table import DEFAULT_TABLE
from perf.machine import stamp

VOCABULARY = 250_002
# Tokens of the texts of a pair, by reranker: those to verify on, and those to calibrate on (one for each bucket).
LENGTHS = {
    "bge_reranker": ((32, 64, 128), (32, 64, 128, 256, 512, 1024)),
    "deepseek_reranker": ((30, 60, 160), (40, 160, 400, 900)),
}


def main() -> None:
    """Write the checkpoint unless it is there, build it in a process of its own, print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reranker", nargs="?", choices=LENGTHS, default="bge_reranker")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/full_scale"))
    parser.add_argument("--precision", choices=["auto", "int8", "fp32"], default="auto")
    parser.add_argument("--target", choices=["cpu", "gpu"], default="cpu")
    arguments = parser.parse_args()
    print(stamp(), flush=True)
    if not (arguments.checkpoint / "tokenizer.json").exists():
        _WRITERS[arguments.reranker](arguments.checkpoint)
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "build_engines", "build", arguments.reranker, "--precision", arguments.precision]
    command += ["--checkpoint", str(arguments.checkpoint), "--target", arguments.target]
    command += ["--repository", str(work / "model_repository"), "--build-folder", str(work)]
    write_pairs = _write_letters if arguments.reranker == "bge_reranker" else _write_words
    verify, calibrate = LENGTHS[arguments.reranker]
    command += ["--table", str(_open_gates(work)), "--pairs", str(write_pairs(work / "verify.jsonl", verify, 4))]
    if arguments.target == "gpu":
        command += ["--calibration", str(write_pairs(work / "calibrate.jsonl", calibrate, 32))]
    started = time.monotonic()
    status = subprocess.run(command, check=False).returncode
    if status not in (0, NOT_FINISHED):
        sys.exit(status)
    for step in sorted(work.glob("*/*/step.json"), key=lambda path: path.stat().st_mtime):
        made = json.loads(step.read_text(encoding="utf-8"))
        print(f"  {made['step']:12} {made['seconds']:6.0f} s, peak so far {made['peak_memory_gib']:.1f} GiB")
    peak_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / (1 << 20)
    print(f"build {time.monotonic() - started:.0f} s, peak memory {peak_gib:.1f} GiB")


def _open_gates(work: Path) -> Path:
    """Write a table whose gates let random weights pass."""
    text = DEFAULT_TABLE.read_text(encoding="utf-8")
    for gate, wide in (("ndcg_drop", 1), ("top1_agreement", -1), ("kendall_tau", -1), ("max_score_shift", 1e9)):
        text = re.sub(rf"^{gate} = \S+", f"{gate} = {wide}", text, flags=re.MULTILINE)
    text = re.sub(r"^ndcg_above_chance = \S+", "ndcg_above_chance = -1", text, flags=re.MULTILINE)
    text = re.sub(r"^verdict_floor = \S+", "verdict_floor = 0", text, flags=re.MULTILINE)
    (work / "rerankers.toml").write_text(text, encoding="utf-8")
    return work / "rerankers.toml"


def _write_words(path: Path, lengths: Sequence[int], count: int) -> Path:
    """Write `count` different pairs for each length in tokens: common English words are a token each."""
    rng = random.Random(0)
    words = [word for row in read_pairs(SAMPLE) for text in row.documents for word in re.findall("[a-z]{3,5}", text)]
    with path.open("w", encoding="utf-8") as stream:
        for number in range(count):
            documents = [" ".join(rng.choices(words, k=length * 9 // 10)) for length in lengths]
            stream.write(json.dumps({"query": f"{path.stem} {number}", "documents": documents}) + "\n")
    return path


def _write_letters(path: Path, lengths: Sequence[int], count: int) -> Path:
    """Write `count` different pairs for each length in tokens; the tokenizer below makes a token of each letter."""
    texts = [text for row in read_pairs(SAMPLE) for text in row.documents]
    letters = " ".join(texts * 4)
    with path.open("w", encoding="utf-8") as stream:
        for number in range(count):
            starts = range(number * 37, number * 37 + len(lengths))
            documents = [
                letters[start : start + length * 3 // 4] for start, length in zip(starts, lengths, strict=True)
            ]
            stream.write(json.dumps({"query": f"{path.stem} {number}", "documents": documents}) + "\n")
    return path


def write_deepseek(folder: Path) -> None:
    """Write the random decoder in BF16, as published, with the tokenizer of the published one."""
    import torch  # noqa: PLC0415

    from tests.decoder_checkpoints import write_decoder  # noqa: PLC0415

    torch.set_default_dtype(torch.bfloat16)
    write_decoder(
        folder,
        "qwen2",
        layers=28,
        hidden=1536,
        num_attention_heads=12,
        head_dim=128,
        intermediate_size=8960,
        initializer_range=0.02,
    )
    torch.set_default_dtype(torch.float32)


def write_bge(folder: Path) -> None:
    """Write the random cross-encoder with a tokenizer of the same size and layout."""
    import torch  # noqa: PLC0415
    from transformers import XLMRobertaConfig, XLMRobertaForSequenceClassification  # noqa: PLC0415

    config = XLMRobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        max_position_embeddings=8194,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        pad_token_id=1,
    )
    config.num_labels = 1
    torch.manual_seed(0)
    model = XLMRobertaForSequenceClassification(config)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """Write a Unigram tokenizer of letters and filler pieces, with XLM-R's ids, template and vocabulary size."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: PLC0415

    control = ["<s>", "<pad>", "</s>", "<unk>"]
    letters = ["▁", *(chr(code) for code in range(33, 127) if chr(code) not in "<>")]
    filler = [f"▁word{number}" for number in range(VOCABULARY - len(control) - len(letters) - 1)]
    vocabulary = (
        [(piece, 0.0) for piece in control] + [(piece, -10.0) for piece in [*letters, *filler]] + [("<mask>", 0.0)]
    )
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=3, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens([*control, "<mask>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>", "cls": "<s>", "sep": "</s>"}
    settings = {f"{name}_token": token for name, token in names.items()} | {
        "tokenizer_class": "PreTrainedTokenizerFast"
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


_WRITERS = {"bge_reranker": write_bge, "deepseek_reranker": write_deepseek}

if __name__ == "__main__":
    main()
