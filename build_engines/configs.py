# SPDX-License-Identifier: Apache-2.0
"""A row of the table -> the config.pbtxt files of its three models, through Triton's own protobuf."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from build_engines.errors import InstallError
from build_engines.table import Reranker

# 64 MiB: about 100,000 passages of 150 tokens, at 4 bytes an id and 400 bytes an entry.
TOKEN_CACHE_BYTES = 64 << 20
# 100,000 characters of up to 4 bytes: far more than max_length tokens, and little enough not to hold up other callers.
MAX_TEXT_BYTES = 400_000
TOKENS_PER_RUN = 512

# Why each chosen number is what it is, written above the line that holds it.
_REASONS = {
    "max_batch_size": "Pairs in one request, the same in all three models; the client splits longer lists.",
    "dynamic_batching": "No delay and no queue policy. With a policy Triton does not prepare the next batch during this"
    " one, and a last waiting request may lie for up to 500 ms (core, dynamic_batch_scheduler.cc).",
    "allow_ragged_batch": "Requests of different lengths come together: the scorer sorts their rows by length itself.",
    "profile": "Every TensorRT profile, one for each bucket; an empty list would mean profile 0 alone.",
    "model_warmup": "One run for each bucket, so that no caller pays for first-use set-up; zeros are valid ids.",
    'key: "token_cache_bytes"': "64 MiB: about 100,000 passages of 150 tokens, 4 bytes an id and 400 bytes an entry.",
    'key: "max_text_bytes"': "A longer text is refused: only its first max_length tokens could count.",
    'key: "tokens_per_run"': "Padded tokens in one FP32 run; larger runs were no faster. INT8 runs rows one by one.",
    'key: "threads"': "0: as many as this process may use.",
    "version_policy": "The version that the ensemble names, and no other: a broken one beside it must not stop us.",
}


def repository_files(reranker: Reranker, version: int) -> dict[str, str]:
    """Return every config file of a reranker: path in the repository -> text. All serve `version`."""
    return {
        f"{reranker.name}/config.pbtxt": _text(_ensemble(reranker, version)),
        f"{reranker.tokenizer}/config.pbtxt": _text(_tokenizer(reranker, version)),
        f"{reranker.scorer}/config.pbtxt": _text(_tensorrt_scorer(reranker, version)),
        f"{reranker.scorer}/configs/cpu.pbtxt": _text(_cpu_scorer(reranker, version)),
    }


def pinned_version(repository: Path, reranker: Reranker) -> int:
    """Return the version that the ensemble serves, 1 where there is no ensemble yet; raise InstallError if unclear."""
    path = repository / reranker.name / "config.pbtxt"
    if not path.exists():
        return 1
    try:
        config = text_format.Parse(path.read_text(encoding="utf-8"), pb.ModelConfig())
    except text_format.ParseError as error:
        raise InstallError(f"{path} is not a Triton model config: {error}") from error
    versions = {step.model_version for step in config.ensemble_scheduling.step}
    if len(versions) != 1 or min(versions) < 1:
        raise InstallError(f"{path} pins its steps to {sorted(versions)}; tokenizer and scorer must share one version.")
    return int(versions.pop())


def write_configs(repository: Path, reranker: Reranker, version: int) -> list[Path]:
    """Write the config files that differ from what the table says; return them. Each file is replaced atomically."""
    written = []
    for name, text in repository_files(reranker, version).items():
        path = repository / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
        written.append(path)
    # Triton wants a version folder even for an ensemble, which has no files; git keeps no empty folder.
    keep = repository / reranker.name / str(version) / ".gitkeep"
    keep.parent.mkdir(parents=True, exist_ok=True)
    if not keep.exists():
        keep.touch()
    return written


def scorer_inputs(reranker: Reranker) -> list[str]:
    """Return the names of the arrays that the tokenizer makes and the scorer takes, each INT64[pairs, length]."""
    return ["input_ids", "attention_mask"] + (["token_type_ids"] if reranker.segment_ids else [])


def _ensemble(reranker: Reranker, version: int) -> pb.ModelConfig:
    arrays = scorer_inputs(reranker)
    steps = [
        _step(reranker.tokenizer, version, ["QUERY", "DOCUMENT"], [*arrays, "TOKENS"]),
        _step(reranker.scorer, version, arrays, ["SCORE"]),
    ]
    return pb.ModelConfig(
        name=reranker.name,
        platform="ensemble",
        # The ensemble has the number of its parts, so that every answer says which version gave it.
        version_policy=_served(version),
        max_batch_size=reranker.max_batch_size,
        input=_texts(),
        output=[_output("SCORE", pb.TYPE_FP32, 1), _output("TOKENS", pb.TYPE_INT32, 1)],
        ensemble_scheduling=pb.ModelEnsembling(step=steps),
        parameters=_parameters(max_length=reranker.max_length),
    )


def _step(model: str, version: int, inputs: list[str], outputs: list[str]) -> Any:
    return pb.ModelEnsembling.Step(
        model_name=model,
        model_version=version,
        input_map={name: name for name in inputs},
        output_map={name: name for name in outputs},
    )


def _tokenizer(reranker: Reranker, version: int) -> pb.ModelConfig:
    arrays = [_output(name, pb.TYPE_INT64, -1) for name in scorer_inputs(reranker)]
    return pb.ModelConfig(
        name=reranker.tokenizer,
        backend="python",
        version_policy=_served(version),
        max_batch_size=reranker.max_batch_size,
        input=_texts(),
        output=[*arrays, _output("TOKENS", pb.TYPE_INT32, 1)],
        instance_group=[pb.ModelInstanceGroup(kind=pb.ModelInstanceGroup.KIND_CPU, count=1)],
        dynamic_batching=pb.ModelDynamicBatching(),
        parameters=_parameters(token_cache_bytes=TOKEN_CACHE_BYTES, max_text_bytes=MAX_TEXT_BYTES),
    )


def _cpu_scorer(reranker: Reranker, version: int) -> pb.ModelConfig:
    inputs = [_ids(name) for name in scorer_inputs(reranker)]
    for entry in inputs:
        entry.allow_ragged_batch = True
    return pb.ModelConfig(
        name=reranker.scorer,
        backend="python",
        version_policy=_served(version),
        max_batch_size=reranker.max_batch_size,
        input=inputs,
        output=[_output("SCORE", pb.TYPE_FP32, 1)],
        instance_group=[pb.ModelInstanceGroup(kind=pb.ModelInstanceGroup.KIND_CPU, count=1)],
        dynamic_batching=pb.ModelDynamicBatching(),
        parameters=_parameters(threads=reranker.cpu_threads, tokens_per_run=TOKENS_PER_RUN),
    )


def _tensorrt_scorer(reranker: Reranker, version: int) -> pb.ModelConfig:
    profiles = [str(index) for index in range(len(reranker.buckets))]
    return pb.ModelConfig(
        name=reranker.scorer,
        platform="tensorrt_plan",
        default_model_filename="model.plan",
        version_policy=_served(version),
        max_batch_size=reranker.max_batch_size,
        input=[_ids(name) for name in scorer_inputs(reranker)],
        output=[_output("SCORE", pb.TYPE_FP32, 1)],
        instance_group=[pb.ModelInstanceGroup(kind=pb.ModelInstanceGroup.KIND_GPU, count=1, profile=profiles)],
        dynamic_batching=pb.ModelDynamicBatching(),
        model_warmup=[_warmup(reranker, bucket) for bucket in reranker.buckets],
    )


def _warmup(reranker: Reranker, bucket: int) -> Any:
    # Not random_data, whose ids lie beyond the vocabulary. Zeros in the mask hide each token by adding a finite number:
    # scores stay finite, and the same kernels run as for a mask of ones, which would need a file beside each config.
    zeros = pb.ModelWarmup.Input(data_type=pb.TYPE_INT64, dims=[bucket], zero_data=True)
    inputs = dict.fromkeys(scorer_inputs(reranker), zeros)
    return pb.ModelWarmup(name=f"bucket_{bucket}", batch_size=reranker.max_batch_size, inputs=inputs)


def _texts() -> list[Any]:
    return [pb.ModelInput(name=name, data_type=pb.TYPE_STRING, dims=[1]) for name in ("QUERY", "DOCUMENT")]


def _ids(name: str) -> Any:
    return pb.ModelInput(name=name, data_type=pb.TYPE_INT64, dims=[-1])


def _output(name: str, data_type: int, dim: int) -> Any:
    return pb.ModelOutput(name=name, data_type=data_type, dims=[dim])


def _served(version: int) -> Any:
    return pb.ModelVersionPolicy(specific=pb.ModelVersionPolicy.Specific(versions=[version]))


def _parameters(**values: int) -> dict[str, Any]:
    return {key: pb.ModelParameter(string_value=str(value)) for key, value in values.items()}


def _text(config: pb.ModelConfig) -> str:
    """Protobuf text format with the reason above each chosen number, once a file."""
    lines = ["# Generated from build_engines/rerankers.toml by `python -m build_engines configs`; change it there."]
    pending = dict(_REASONS)
    for line in text_format.MessageToString(config).splitlines():
        key = next((key for key in pending if line.strip() == key or re.match(rf"\s*{key}\b", line)), None)
        if key is not None:
            lines += textwrap.wrap(
                pending.pop(key),
                width=110,
                initial_indent=(indent := line[: len(line) - len(line.lstrip())] + "# "),
                subsequent_indent=indent,
            )
        lines.append(line)
    return "\n".join(lines) + "\n"
