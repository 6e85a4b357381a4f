# SPDX-License-Identifier: Apache-2.0
"""Step `fetch`: a hub id, a folder or a Python package -> a checkpoint folder whose files are known by their hashes."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_engines.errors import CheckpointError
from build_engines.hashing import sha256_file
from build_engines.table import Reranker

ENCODERS = ("bert", "roberta", "xlm-roberta")
DECODERS = ("qwen2", "qwen3", "llama", "gemma")
# Everything the build reads, and nothing that could run code when it is loaded.
_PATTERNS = ("*.json", "*.safetensors")
_WEIGHTS_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on this disk. `files` maps each file that the build reads to its sha256."""

    source: str
    revision: str
    folder: Path
    config: Mapping[str, Any]
    files: Mapping[str, str]

    @property
    def model_type(self) -> str:
        """The family in config.json, such as `bert` or `xlm-roberta`."""
        return str(self.config.get("model_type", ""))

    @property
    def is_decoder(self) -> bool:
        """Whether each token sees only those before it, so that the last one decides."""
        return self.model_type in DECODERS


def fetch(reranker: Reranker) -> Checkpoint:
    """Find or download the checkpoint of a row; raise CheckpointError unless it is whole and the pinned one."""
    source = reranker.checkpoint
    if source.startswith("package:"):
        folder = _package_folder(source.removeprefix("package:"))
    elif Path(source).expanduser().is_dir():
        folder = Path(source).expanduser().resolve()
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        folder = _download(source, reranker.revision)
    else:
        raise CheckpointError(f"{source!r} is neither a folder, a hub id (owner/name) nor package:MODULE/FOLDER.")
    config = _read_config(folder)
    files = {name: sha256_file(folder / name) for name in _file_names(folder)}
    for name, expected in reranker.sha256.items():
        if files.get(name) != expected:
            raise CheckpointError(
                f"{folder / name} has sha256 {files.get(name, 'nothing: no such file')}, {reranker.name} expects "
                f"{expected}. Fetch it again, or change sha256 in rerankers.toml if you trust the new file."
            )
    return Checkpoint(source, reranker.revision, folder, config, files)


def _package_folder(place: str) -> Path:
    module, _, inside = place.partition("/")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        name = module.replace("_", "-")
        raise CheckpointError(f"The Python package {name} carries the checkpoint but is not installed. Run: make setup")
    return Path(spec.origin).parent / inside


def _download(hub_id: str, revision: str) -> Path:
    if not revision:
        raise CheckpointError(
            f"There is no folder {hub_id!r} here, and as a hub id it needs a revision: the commit's 40 hexadecimal "
            "digits, as revision in rerankers.toml or with --revision."
        )
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - heavy, and folders do not need it

    # It reports each of its retries; the last error says it all.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(_PATTERNS)))
    except Exception as error:  # the hub client raises its own, its HTTP library's and the operating system's errors
        raise CheckpointError(
            f"Cannot download {hub_id} at {revision}: {str(error).rstrip('.')}. Without a hub, copy the checkpoint to "
            "a folder and pass --checkpoint DIR."
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if (folder / "adapter_config.json").exists():
            raise CheckpointError(
                f"{folder} holds an adapter and not a whole checkpoint; merge it first: "
                "AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload().save_pretrained(OUT)."
            ) from error
        raise CheckpointError(f"{folder} is not a checkpoint: {error}. It needs config.json.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / 'config.json'} does not hold an object. Fetch the checkpoint again.")
    if "quantization_config" in config:
        raise CheckpointError(f"{folder} is quantised already; give the checkpoint that it was made from.")
    family = config.get("model_type")
    if family not in ENCODERS + DECODERS:
        raise CheckpointError(
            f"{folder} holds a model of type {family!r}; supported: {', '.join(ENCODERS + DECODERS)}."
        )
    numbers = ["vocab_size", "max_position_embeddings"]
    if family in ENCODERS:  # decoders often have none; see pairing
        numbers.append("pad_token_id")
    missing = [name for name in numbers if not isinstance(config.get(name), int)]
    if missing:
        raise CheckpointError(
            f"{folder / 'config.json'} has no whole number for {', '.join(missing)}; a reranker's has."
        )
    return config


def _file_names(folder: Path) -> list[str]:
    names = ["config.json", "tokenizer.json", *_weight_names(folder)]
    optional = ["tokenizer_config.json", "special_tokens_map.json", "modules.json", "1_Pooling/config.json"]
    names += [name for name in optional if (folder / name).exists()]
    missing = [name for name in names if not (folder / name).is_file()]
    if "tokenizer.json" in missing:
        raise CheckpointError(
            f"{folder} has no tokenizer.json. Save a fast tokenizer there: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        )
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}. Fetch the checkpoint again.")
    return names


def _weight_names(folder: Path) -> list[str]:
    index = folder / _WEIGHTS_INDEX
    if index.exists():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged ({error!r}). Fetch the checkpoint again.") from error
        return [_WEIGHTS_INDEX, *sorted(shards)]
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"]
    raise CheckpointError(
        f"{folder} has no model.safetensors. Weights are read from safetensors only; convert a pickle checkpoint where "
        "you trust it: AutoModelForSequenceClassification.from_pretrained(DIR).save_pretrained(DIR)."
    )
