# SPDX-License-Identifier: Apache-2.0
"""Score padded pairs with an ONNX graph on the CPU: rows are sorted by length, run in small groups, and put back.

A run is one execution of the graph on rows cut to the longest of them. Several runs at once on one thread each are
faster than one run on all threads, so threads work inside a run only when runs would keep at most half of them busy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

Ids = NDArray[np.int64]  # int64[pairs, padded length]

# Above this size a second session for lone rows would cost more memory than the latency it saves is worth.
ONE_SESSION_BYTES = 512 << 20


class SelfTestError(Exception):
    """The graph does not score here as it did when it was verified; it must not serve."""


class InputError(Exception):
    """The arrays of one request cannot be scored; the message is for the caller."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the graph accepts: ids below `vocabulary`, rows of at most `max_length` tokens."""

    vocabulary: int
    max_length: int


@dataclass(frozen=True, slots=True)
class PaddedPairs:
    """The inputs of one request: name of the graph's input -> array, all of one shape; rows are padded on the right."""

    arrays: dict[str, Ids]
    lengths: NDArray[np.int64]  # int64[pairs], tokens that are not padding

    @classmethod
    def check(cls, arrays: dict[str, Ids], limits: Limits) -> PaddedPairs:
        """Validate arrays from outside; raise InputError saying what is wrong and what is allowed."""
        ids, mask = arrays["input_ids"], arrays["attention_mask"]
        if len({array.shape for array in arrays.values()}) != 1:
            raise InputError(f"Shapes differ: { ({name: a.shape for name, a in arrays.items()}) }. Send equal shapes.")
        lengths = mask.sum(axis=1)
        expected = np.arange(mask.shape[1]) < lengths[:, None]
        bad = np.flatnonzero((mask != expected).any(axis=1) | (lengths < 1))
        if bad.size:
            raise InputError(
                "attention_mask must be 1 for at least one token of each row, then 0 to the end of the row; "
                f"row {bad[0]} is {np.array2string(mask[bad[0]], threshold=16)}."
            )
        if lengths.max() > limits.max_length:
            raise InputError(f"A row has {lengths.max()} tokens; at most {limits.max_length} are allowed.")
        if ids.min() < 0 or ids.max() >= limits.vocabulary:
            raise InputError(
                f"input_ids reach from {ids.min()} to {ids.max()}; allowed is 0 to {limits.vocabulary - 1}."
            )
        types = arrays.get("token_type_ids")
        if types is not None and (types.min() < 0 or types.max() > 1):
            raise InputError(f"token_type_ids must be 0 or 1; they reach from {types.min()} to {types.max()}.")
        return cls(arrays, lengths)


def available_threads() -> int:
    """Return how many CPUs this process may use: its affinity, cut to the container's quota (cgroup v2 cpu.max)."""
    threads = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(threads, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        return threads


def has_vnni() -> bool:
    """Return whether this x86 CPU multiplies INT8 without overflow (AVX512-VNNI or AVX-VNNI)."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "avx512_vnni" in flags or "avx_vnni" in flags


def plan_runs(lengths: NDArray[np.int64], *, tokens_per_run: int, threads: int) -> list[NDArray[np.int64]]:
    """Group rows (by index) into runs of at most `tokens_per_run` padded tokens, longest rows first.

    `tokens_per_run` 0 puts every row in a run of its own. Otherwise a run holds at most a thread's fair share, or one
    row.
    """
    order = np.argsort(-lengths, kind="stable")
    if tokens_per_run == 0:
        return [order[i : i + 1] for i in range(len(order))]
    budget = min(tokens_per_run, -(-int(lengths.sum()) // threads))
    runs: list[NDArray[np.int64]] = []
    start = 0
    while start < len(order):
        rows = max(1, budget // int(lengths[order[start]]))
        runs.append(order[start : start + rows])
        start += rows
    return runs


def pad_rows(rows: Sequence[tuple[PaddedPairs, int]], names: Iterable[str], length: int) -> dict[str, Ids]:
    """Put rows of requests together, each cut or padded with zeros to `length`: graphs do not look at masked ids."""
    feed = {name: np.zeros((len(rows), length), dtype=np.int64) for name in names}
    for name, array in feed.items():
        for target, (pairs, row) in zip(array, rows, strict=True):
            filled = min(length, pairs.arrays[name].shape[1])
            target[:filled] = pairs.arrays[name][row, :filled]
    return feed


class GraphScorer:
    """Runs one ONNX graph. `score` may be called from one thread at a time."""

    def __init__(self, path: Path, *, threads: int, tokens_per_run: int) -> None:
        self.threads = threads
        self.tokens_per_run = tokens_per_run
        # Tokens of the last call: those that were real, and those that were run, padding included.
        self.real_tokens = 0
        self.run_tokens = 0
        size_bytes = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
        parallel = threads > 1 and size_bytes <= ONE_SESSION_BYTES
        self._shared = _session(path, threads=1) if parallel else None
        self._alone = _session(path, threads=threads)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="score") if parallel else None
        self.input_names = frozenset(node.name for node in self._alone.get_inputs())

    def score(self, requests: Sequence[PaddedPairs]) -> list[NDArray[np.float32]]:
        """Score all rows of all requests together; return float32[pairs, 1] for each request."""
        lengths = np.concatenate([request.lengths for request in requests])
        owners = [(request, row) for request in requests for row in range(len(request.lengths))]
        runs = plan_runs(lengths, tokens_per_run=self.tokens_per_run, threads=self.threads)
        pool = self._pool if 2 * len(runs) > self.threads else None
        if pool is None:
            # One run after the other, on all threads: nothing is gained by cutting them to a thread's share.
            runs = plan_runs(lengths, tokens_per_run=self.tokens_per_run, threads=1)
        self.real_tokens = int(lengths.sum())
        self.run_tokens = sum(len(rows) * int(lengths[rows[0]]) for rows in runs)
        scores = np.empty((len(lengths), 1), dtype=np.float32)

        def score(session: ort.InferenceSession, rows: NDArray[np.int64]) -> None:
            scores[rows] = self.run(session, self._gather([owners[row] for row in rows], int(lengths[rows[0]])))

        if pool is not None:
            list(pool.map(lambda rows: score(self._shared, rows), runs))
        else:
            for rows in runs:
                score(self._alone, rows)
        return np.split(scores, np.cumsum([len(request.lengths) for request in requests])[:-1])

    def check(self, test: Mapping[str, Any]) -> None:
        """Score the pair that the build has kept the score of; raise SelfTestError where it is another one."""
        arrays = {name: np.array([ids], dtype=np.int64) for name, ids in test["arrays"].items()}
        pair = PaddedPairs(arrays, arrays["attention_mask"].sum(axis=1))
        score = float(self.score([pair])[0][0, 0])
        if not abs(score - test["score"]) <= test["allowed"]:
            raise SelfTestError(
                f"the self-test pair scores {score:.4f} here and scored {test['score']:.4f} when it was built; allowed "
                f"is a difference of {test['allowed']:.2g}. The graph or its runtime is damaged, or another. Rebuild."
            )

    def run(self, session: ort.InferenceSession, feed: dict[str, Ids]) -> NDArray[np.float32]:
        """Run the graph once; return float32[rows, 1]."""
        scores: NDArray[np.float32] = session.run(None, feed)[0]
        return scores

    def _gather(self, rows: list[tuple[PaddedPairs, int]], length: int) -> dict[str, Ids]:
        if len(rows) == 1:
            pairs, row = rows[0]
            return {name: pairs.arrays[name][row : row + 1, :length] for name in self.input_names}
        return pad_rows(rows, self.input_names, length)


def _session(path: Path, *, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    if not has_vnni():
        # INT8 weights times UINT8 activations overflow 16 bits on x86 CPUs without VNNI; this switches to UINT8 weights
        # (onnxruntime_session_options_config_keys.h). With VNNI it changes no score and costs a third of the speed.
        options.add_session_config_entry("session.x64quantprecision", "1")
    # Threads of one session must not burn the cores on which the runs of the other one work.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
