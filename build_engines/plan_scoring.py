# SPDX-License-Identifier: Apache-2.0
"""Score padded pairs with a TensorRT plan on this machine's GPU, as Triton will: each request in its bucket's profile.

One execution context serves every bucket and changes its profile between them. Triton has a context for each bucket;
here that would only multiply the device memory, of which each context holds enough for the largest bucket.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from build_engines.engine import Said, import_tensorrt, logger
from build_engines.errors import EngineError
from build_engines.gpu import find_gpu
from build_engines.serving_code import graph_scoring

# The GPU's clock rises and lazily loaded kernels arrive during the first runs.
WARM_UP_RUNS = 10


class Runner(Protocol):
    """What is used of Polygraphy's TrtRunner, once it is active."""

    def set_profile(self, index: int) -> None:
        """Change to another optimization profile."""

    def infer(self, feed_dict: dict[str, NDArray[np.int64]]) -> Mapping[str, NDArray[np.float32]]:
        """Run once; what is returned is overwritten by the next run."""

    def last_inference_time(self) -> float:
        """Return the seconds of the last run, from arrays on the host to arrays on the host."""

    def activate(self) -> None:
        """Take memory on the GPU."""

    def deactivate(self) -> None:
        """Give it back."""


def open_plan(plan: Path, buckets: Sequence[int], max_batch: int) -> Runner:
    """Return an active runner of the plan; raise EngineError unless it fits this machine and has these profiles."""
    trt = import_tensorrt()
    gpu = find_gpu()
    if gpu is None:
        raise EngineError(
            f"{plan} needs an NVIDIA GPU, and none is visible: look at nvidia-smi; containers need --gpus."
        )
    if not plan.is_file():
        raise EngineError(f"There is no plan {plan}. Build again, from the engine step on.")
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner  # noqa: PLC0415 - only where plans run
    from polygraphy.exception import PolygraphyException  # noqa: PLC0415
    from polygraphy.logger import G_LOGGER  # noqa: PLC0415

    said = Said()
    try:
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):  # what it would print is in the error below
            engine = EngineFromBytes(plan.read_bytes(), runtime=trt.Runtime(logger(trt, said)))()
            check_profiles(plan, engine, buckets, max_batch)
            runner: Runner = TrtRunner(engine)
            runner.activate()
    except (PolygraphyException, TypeError) as error:  # TypeError: a null pointer from C++
        raise EngineError(
            f"{plan} does not load ({' '.join(str(error).split())}). It was built by another TensorRT or for another "
            f"GPU, is damaged, or finds too little memory. Here are TensorRT {trt.__version__} and {gpu.name}, compute "
            f"capability {gpu.compute_capability}: build it here, or free the GPU. {said}"
        ) from error
    return runner


def check_profiles(plan: Path, engine: Any, buckets: Sequence[int], max_batch: int) -> None:
    """Raise EngineError unless profile i of an engine takes up to `max_batch` pairs of `buckets[i]` tokens."""
    indices = range(engine.num_optimization_profiles)
    found = [tuple(engine.get_tensor_profile_shape("input_ids", index)[2]) for index in indices]
    wanted = [(max_batch, bucket) for bucket in buckets]
    if found != wanted:
        raise EngineError(
            f"The profiles of {plan} end at {found} (pairs, tokens), but rerankers.toml says {wanted}. Build it again, "
            "from the engine step on."
        )


class PlanScorer:
    """Runs one plan. `score` may be called from one thread at a time; close it to free the GPU."""

    def __init__(
        self,
        plan: Path,
        buckets: Sequence[int],
        max_batch: int,
        open_plan: Callable[[Path, Sequence[int], int], Runner] = open_plan,
    ) -> None:
        """Open a plan whose profile i is `buckets[i]`; raise EngineError where it cannot run here."""
        self.buckets = tuple(buckets)
        self.max_batch = max_batch
        self._runner = open_plan(plan, self.buckets, max_batch)
        self._profile: int | None = None

    def __enter__(self) -> PlanScorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the GPU; nothing can be scored afterwards."""
        self._runner.deactivate()

    def score(self, requests: Sequence[graph_scoring.PaddedPairs]) -> list[NDArray[np.float32]]:
        """Score each request in the smallest bucket that holds its longest row; return float32[pairs, 1] for each."""
        return [self._score(request) for request in requests]

    def seconds_per_batch(self, pairs: graph_scoring.PaddedPairs, bucket: int, batch: int, runs: int = 30) -> float:
        """Return the median seconds of one batch made of these pairs in turn, padded to `bucket`.

        Copying ids to the GPU and scores back counts, as it does in Triton; tokenising does not.
        """
        self._choose(bucket)
        feed = _feed(pairs, np.arange(batch) % len(pairs.lengths), bucket)
        for _ in range(WARM_UP_RUNS):
            self._runner.infer(feed)
        seconds = []
        for _ in range(runs):
            self._runner.infer(feed)
            seconds.append(self._runner.last_inference_time())
        return statistics.median(seconds)

    def _score(self, request: graph_scoring.PaddedPairs) -> NDArray[np.float32]:
        longest = int(request.lengths.max())
        bucket = next((bucket for bucket in self.buckets if bucket >= longest), None)
        if bucket is None:
            raise EngineError(f"A row has {longest} tokens; the plan's longest bucket has {self.buckets[-1]}.")
        self._choose(bucket)
        scores = np.empty((len(request.lengths), 1), dtype=np.float32)
        for start in range(0, len(scores), self.max_batch):
            rows = np.arange(start, min(start + self.max_batch, len(scores)))
            scores[rows] = self._runner.infer(_feed(request, rows, bucket))["SCORE"]
        return scores

    def _choose(self, bucket: int) -> None:
        profile = self.buckets.index(bucket)
        if profile != self._profile:
            self._runner.set_profile(profile)
            self._profile = profile


def _feed(pairs: graph_scoring.PaddedPairs, rows: NDArray[np.int64], bucket: int) -> dict[str, Any]:
    return graph_scoring.pad_rows([(pairs, row) for row in rows], pairs.arrays, bucket)
