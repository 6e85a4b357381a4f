# SPDX-License-Identifier: Apache-2.0
"""Step `calibrate`: real pairs -> `ranges.json`, the largest activation that enters each product to be quantised.

INT8 on TensorRT has fixed scales, so they are only as good as the pairs they come from. Pairs are drawn with a fixed
seed, equally many for each bucket, and within a bucket by turns from each script that the documents are written in.
Every pair runs alone at its own length: padding would put values into the ranges that no real token has.

The range is the maximum, not a percentile: measured on the light reranker, 99.99 % of the values (NVIDIA's advice for
BERT) cut outliers that the ranking depends on, and lost 0.14 of Kendall's tau against the maximum.
"""

from __future__ import annotations

import hashlib
import json
import random
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from build_engines.errors import ExportError, PairsError
from build_engines.pairs import Candidates
from build_engines.quantize import attention_products, linear_layers
from build_engines.serving_code import pair_encoding
from build_engines.table import Reranker

SEED = 0
# Ranges hardly move after a few dozen pairs of one length; more cost minutes with a large model on a few CPUs.
PAIRS_PER_BUCKET = 32
# Fewer leave whole kinds of text out.
MINIMUM_PAIRS = 128
SOME = 16
# Enough to find every length and script of a log; the rest of a large log is not tokenised.
_LOOKED_AT = 20_000
_SCRIPT_LETTERS = 200


@dataclass(frozen=True, slots=True)
class CalibrationPair:
    """A pair as its scorer gets it, alone and without padding: each array is int64[1, tokens]."""

    bucket: int
    script: str
    arrays: dict[str, Any]


def without_evaluation(given: Iterable[Candidates], evaluation: Iterable[Candidates]) -> list[Candidates]:
    """Return the candidates whose query is not among those that the result is judged by."""
    judged = {candidates.query for candidates in evaluation}
    return [candidates for candidates in given if candidates.query not in judged]


def split(given: Iterable[Candidates]) -> tuple[list[Candidates], list[Candidates]]:
    """Part one file in two by the hash of the query: (for calibration, for evaluation), about 1 to 3.

    A query that occurs several times is always on one side.
    """
    parts: tuple[list[Candidates], list[Candidates]] = ([], [])
    for candidates in given:
        parts[hashlib.sha256(candidates.query.encode()).digest()[0] % 4 != 0].append(candidates)
    return parts


def choose_pairs(
    reranker: Reranker, encoder: pair_encoding.PairEncoder, given: Sequence[Candidates], source: str
) -> list[CalibrationPair]:
    """Draw the calibration pairs; raise PairsError where there are fewer than MINIMUM_PAIRS different ones."""
    found: dict[int, dict[str, list[CalibrationPair]]] = {bucket: {} for bucket in reranker.buckets}
    for query, document in _different_pairs(given):
        pair = _encode(reranker, encoder, query, document)
        found[pair.bucket].setdefault(pair.script, []).append(pair)
    available = sum(len(pairs) for of_script in found.values() for pairs in of_script.values())
    limit, chosen = PAIRS_PER_BUCKET, _draw(reranker, found, PAIRS_PER_BUCKET)
    while len(chosen) < min(MINIMUM_PAIRS, available):  # few buckets, or few lengths in the file
        limit *= 2
        chosen = _draw(reranker, found, limit)
    if len(chosen) < MINIMUM_PAIRS:
        raise PairsError(
            f"{reranker.name}: {source} gives {len(chosen)} different pairs to calibrate INT8 with; at least "
            f"{MINIMUM_PAIRS} are needed. Give a larger file of real "
            f"queries and documents, or build without INT8: --precision {reranker.base_precision}."
        )
    return chosen


def _draw(reranker: Reranker, found: dict[int, dict[str, list[CalibrationPair]]], limit: int) -> list[CalibrationPair]:
    return [pair for bucket in reranker.buckets for pair in _by_turns(found[bucket], limit)]


def some_pairs(
    reranker: Reranker, encoder: pair_encoding.PairEncoder, given: Sequence[Candidates]
) -> list[CalibrationPair]:
    """Return a few pairs to run a graph on where nothing is calibrated."""
    return [_encode(reranker, encoder, *pair) for pair in list(_different_pairs(given))[:SOME]]


def calibrate(
    reranker: Reranker, graph: Path, chosen: Sequence[CalibrationPair], out: Path, advance: Callable[[], None]
) -> dict[str, Any]:
    """Run the FP32 graph on every pair and write `ranges.json` into `out`; return what was used."""
    model = onnx.load(graph, load_external_data=False)
    nodes = linear_layers(model.graph)
    wanted = {node.input[0] for node in nodes}
    if reranker.int8_attention:
        wanted |= {name for node in attention_products(model.graph) for name in node.input}
    names = sorted(wanted)
    session = _session(graph, model, names)
    ranges = dict.fromkeys(names, 0.0)
    for pair in chosen:
        for name, values in zip(names, session.run(names, pair.arrays), strict=True):
            # NumPy's maximum passes NaN on; Python's may drop it.
            ranges[name] = float(np.maximum(ranges[name], np.abs(values).max()))
        advance()
    bad = [name for name, value in ranges.items() if not 0 < value < float("inf")]
    if bad:
        raise ExportError(f"{graph}: the activation {bad[0]} is {ranges[bad[0]]} on real pairs; the model is damaged.")
    (out / "ranges.json").write_text(json.dumps(ranges, indent=1), encoding="utf-8")
    return {
        "pairs": len(chosen),
        "largest_activation": max(ranges.values()),
        "pairs_per_bucket": dict(Counter(pair.bucket for pair in chosen)),
        "empty_buckets": [bucket for bucket in reranker.buckets if all(pair.bucket != bucket for pair in chosen)],
        "scripts": dict(Counter(pair.script for pair in chosen)),
        "ids_sha256": hashlib.sha256(b"".join(pair.arrays["input_ids"].tobytes() for pair in chosen)).hexdigest(),
    }


def script_of(text: str) -> str:
    """Return the script of most letters, as Unicode names it ("LATIN", "CJK", "CYRILLIC", ...)."""
    letters = [letter for letter in text if letter.isalpha()][:_SCRIPT_LETTERS]
    words = Counter(unicodedata.name(letter, "UNKNOWN").split()[0] for letter in letters)
    return words.most_common(1)[0][0] if words else "NONE"


def _different_pairs(given: Sequence[Candidates]) -> Iterable[tuple[str, str]]:
    queries = list(given)
    random.Random(SEED).shuffle(queries)  # noqa: S311 - a repeatable draw, not a secret
    pairs = dict.fromkeys((candidates.query, text) for candidates in queries for text in candidates.documents)
    return list(pairs)[:_LOOKED_AT]


def _encode(reranker: Reranker, encoder: pair_encoding.PairEncoder, query: str, document: str) -> CalibrationPair:
    try:
        pairs = encoder.encode([query.encode()], [document.encode()])
    except pair_encoding.TextError as error:
        raise PairsError(f"The query {query[:60]!r} cannot be used: {error}") from error
    length = int(pairs.attention_mask.sum())
    arrays = {name: array[:, :length] for name, array in pairs.arrays.items()}
    bucket = next(bucket for bucket in reranker.buckets if bucket >= length)
    return CalibrationPair(bucket, script_of(document), arrays)


def _by_turns(of_script: dict[str, list[CalibrationPair]], limit: int) -> list[CalibrationPair]:
    turns: list[CalibrationPair] = []
    longest = max(map(len, of_script.values()), default=0)
    for turn in range(longest):
        turns += [pairs[turn] for _, pairs in sorted(of_script.items()) if turn < len(pairs)]
        if len(turns) >= limit:
            break
    return turns[:limit]


def _session(graph: Path, model: onnx.ModelProto, outputs: Sequence[str]) -> ort.InferenceSession:
    """Open the graph with more of its tensors as outputs; its weights stay in their file."""
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in outputs)
    options = ort.SessionOptions()
    # Where a model given as bytes finds its external weights.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph.parent))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
