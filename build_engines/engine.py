# SPDX-License-Identifier: Apache-2.0
"""Step `engine`: `model.onnx` -> `model.plan` by TensorRT's builder, or a refusal that repeats what TensorRT said.

Only calls that TensorRT 10.16 and 11.4 both have (tests/tensorrt checks their names). The network is strongly typed:
each tensor has the type that the graph states, so precision is decided where the graph is written and nowhere here.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx

from build_engines.errors import EngineError
from build_engines.table import EngineOptions, Reranker

_LOG = logging.getLogger(__name__)
# What an error repeats of TensorRT's log, and of the parser's errors; more only repeats the cause.
_LINES = 5
# How TensorRT words it when no kernel fits into the workspace, or the device is full.
_TOO_LITTLE_MEMORY = re.compile(r"workspace|out ?of ?memory|could not be allocated", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Profile:
    """One bucket: batches of 1 to `max_batch` pairs of exactly `length` tokens, tuned for `opt_batch` pairs."""

    length: int
    opt_batch: int
    max_batch: int

    def __post_init__(self) -> None:
        if self.length < 1 or not 1 <= self.opt_batch <= self.max_batch:
            raise EngineError(
                f"A profile of {self.length} tokens for 1 to {self.max_batch} pairs, tuned for {self.opt_batch}, is "
                "impossible: length is at least 1, and opt_batch lies from 1 to max_batch. Correct buckets, "
                "opt_batch_size or max_batch_size in rerankers.toml."
            )


def profiles_of(reranker: Reranker) -> list[Profile]:
    """Return one profile for each bucket of a row, in the order of the buckets."""
    return [Profile(length, reranker.opt_batch_size, reranker.max_batch_size) for length in reranker.buckets]


def build_plan(
    graph: Path, out: Path, profiles: Sequence[Profile], options: EngineOptions, timing_cache: Path | None = None
) -> dict[str, Any]:
    """Write `model.plan` into the folder `out` and return facts about it; raise EngineError where that cannot be.

    Profile i of the engine is `profiles[i]`, for every input of the graph. The file `timing_cache` is used if it is
    there and fits this TensorRT and GPU; afterwards it holds the timings of this build as well.
    """
    started = time.monotonic()
    if not profiles:
        raise EngineError("An engine needs at least one profile. Give the reranker at least one bucket.")
    _check_files(graph)
    trt = import_tensorrt()
    said = Said()
    log = logger(trt, said)
    builder = _start_builder(trt, log, said)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    _parse(trt.OnnxParser(network, log), graph, said)
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    _check_inputs(trt, graph, inputs)
    config = builder.create_builder_config()
    _set_options(trt, config, options)
    for profile in profiles:
        _add_profile(builder, config, inputs, profile, said)
    cache = _set_timing_cache(config, timing_cache)
    said.clear()  # what it said about a timing cache that does not fit is no reason for anything
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineError(_build_failure(graph, options, said))
    _replace(out / "model.plan", plan)
    if cache is not None and timing_cache is not None:
        _replace(timing_cache, cache.serialize())
    return {
        "tensorrt": str(trt.__version__),
        "layers": network.num_layers,
        "inputs": {tensor.name: tensor.dtype.name for tensor in inputs},
        "outputs": {tensor.name: tensor.dtype.name for tensor in outputs},
        "profiles": [asdict(profile) for profile in profiles],
        "plan_bytes": plan.nbytes,
        "seconds": round(time.monotonic() - started, 2),
        "warnings": said.warnings,
    }


@dataclass(slots=True)
class Said:
    """The last lines and the last errors of TensorRT's log, and how many warnings it had."""

    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES))
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES))
    warnings: int = 0

    def clear(self) -> None:
        """Forget the lines, so that a later failure is not explained by them; warnings stay counted."""
        self.lines.clear()
        self.errors.clear()

    def __str__(self) -> str:
        lines = list(self.errors or self.lines)
        return f"TensorRT said: {' | '.join(lines)}" if lines else "TensorRT said nothing."


def _check_files(graph: Path) -> None:
    """Refuse a graph that is not there whole; TensorRT's own error does not name the missing file."""
    if not graph.is_file():
        raise EngineError(f"There is no graph {graph}. Build again, from the export step on.")
    try:
        model = onnx.load(graph, load_external_data=False)
    except Exception as error:  # each implementation of protobuf has a DecodeError of its own
        raise EngineError(f"{graph} is not an ONNX graph ({error}). Delete it and build again.") from error
    entries = [entry for weight in model.graph.initializer for entry in weight.external_data]
    locations = {entry.value for entry in entries if entry.key == "location"}
    missing = sorted(name for name in locations if not (graph.parent / name).is_file())
    if missing:
        raise EngineError(
            f"The weights of {graph} are missing: no {', '.join(missing)} lies beside it. Move the two together, or "
            "build again."
        )


def import_tensorrt() -> Any:
    """Return TensorRT's Python API; raise EngineError where there is none."""
    reasons = []
    # The second is what the first consists of; beside the libraries of an image it does alone.
    for name in ("tensorrt", "tensorrt_bindings"):
        try:
            found = importlib.import_module(name)
        except ImportError as error:
            reasons.append(str(error))
            continue
        sys.modules["tensorrt"] = found  # Polygraphy looks for this name only
        return found
    raise EngineError(
        f"Engines are built by TensorRT, which cannot be imported here ({'; '.join(reasons)}). Build inside the image "
        "of deploy/Dockerfile, which has the TensorRT that will serve the engine, or run: pip install tensorrt"
    )


def logger(trt: Any, said: Said) -> Any:
    """Return a TensorRT logger that keeps what was said, and passes it on."""

    class Logger(trt.ILogger):  # type: ignore[misc] # TensorRT has no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            if severity == trt.ILogger.VERBOSE:
                return
            line = " ".join(msg.split())
            said.lines.append(line)
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                said.errors.append(line)
            said.warnings += severity == trt.ILogger.WARNING
            # No louder than INFO: its warnings seldom have consequences, and what stops a build becomes EngineError.
            _LOG.log(logging.DEBUG if severity == trt.ILogger.INFO else logging.INFO, "TensorRT: %s", line)

    return Logger()


def _start_builder(trt: Any, log: Any, said: Said) -> Any:
    try:
        return trt.Builder(log)
    except Exception as error:  # a null pointer from C++ arrives as TypeError
        raise EngineError(
            f"TensorRT's builder does not start ({error}). It needs an NVIDIA GPU whose driver fits this TensorRT: "
            f"look at nvidia-smi, and start containers with --gpus. {said}"
        ) from error


def _parse(parser: Any, graph: Path, said: Said) -> None:
    # By its path: weights beside the graph are looked for from there.
    if parser.parse_from_file(str(graph)):
        return
    errors = [parser.get_error(i) for i in range(min(parser.num_errors, _LINES))]
    nodes = [f"{error.node_operator()} {error.node_name()!r}: {error.desc()}" for error in errors if error.node_name()]
    raise EngineError(
        f"TensorRT cannot read {graph}. Change how the graph is exported or quantised: every operator must be one that "
        f"TensorRT knows, and INT8 symmetric. {'TensorRT said: ' + ' | '.join(nodes) if nodes else said}"
    )


def _check_inputs(trt: Any, graph: Path, inputs: Sequence[Any]) -> None:
    for tensor in inputs:
        shape = tuple(tensor.shape)
        if shape != (-1, -1) or tensor.dtype != trt.DataType.INT64:
            raise EngineError(
                f"Input {tensor.name!r} of {graph} is {tensor.dtype.name}{list(shape)}. A scorer takes INT64[batch, "
                "length] with both free (-1), which is what config.pbtxt declares. Export the graph again."
            )


def _set_options(trt: Any, config: Any, options: EngineOptions) -> None:
    if options.workspace_gib > 0:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, int(options.workspace_gib * (1 << 30)))
    config.builder_optimization_level = options.optimization_level
    # FP32 is what must be exact: the head. TF32 would round its inputs to 10 bits, and is on by default.
    config.clear_flag(trt.BuilderFlag.TF32)
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    levels = {
        "ampere_plus": trt.HardwareCompatibilityLevel.AMPERE_PLUS,
        "same_compute_capability": trt.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY,
    }
    if options.hardware_compatibility in levels:
        config.hardware_compatibility_level = levels[options.hardware_compatibility]


def _add_profile(builder: Any, config: Any, inputs: Sequence[Any], bucket: Profile, said: Said) -> None:
    profile = builder.create_optimization_profile()
    shapes = [(batch, bucket.length) for batch in (1, bucket.opt_batch, bucket.max_batch)]
    refusal = f"TensorRT refuses a profile of the shapes {shapes}. Lower the bucket or max_batch_size."
    try:
        for tensor in inputs:
            profile.set_shape(tensor.name, *shapes)
    except (RuntimeError, ValueError) as error:  # ValueError is what its documentation says
        raise EngineError(f"{refusal} TensorRT said: {error}") from error
    if config.add_optimization_profile(profile) < 0:
        raise EngineError(f"{refusal} {said}")


def _set_timing_cache(config: Any, path: Path | None) -> Any:
    """Return the timing cache that the build will use: what `path` holds if that fits, else an empty one."""
    if path is None:
        return None
    stored = path.read_bytes() if path.is_file() else b""
    for content in (stored, b""):
        cache = config.create_timing_cache(content)
        # A mismatch is one of TensorRT's version or of the GPU; timings of another GPU would choose the wrong kernels.
        if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
            return cache
    return None


def _build_failure(graph: Path, options: EngineOptions, said: Said) -> str:
    if not any(_TOO_LITTLE_MEMORY.search(line) for line in said.errors):
        return f"TensorRT cannot build an engine from {graph}. {said}"
    limit = f"{options.workspace_gib} GiB" if options.workspace_gib else "0, which sets no limit"
    return (
        f"TensorRT has too little memory to build an engine from {graph}; engine.workspace_gib is {limit}. Raise it or "
        f"set 0, free the GPU, or lower max_batch_size or the last bucket. {said}"
    )


def _replace(path: Path, content: Any) -> None:
    """Write a file at once or not at all, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)
