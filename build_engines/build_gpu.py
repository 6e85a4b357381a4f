# SPDX-License-Identifier: Apache-2.0
"""The gpu target: calibrate, quantize, verify and convert need no GPU; `finish` builds the engine if there is one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from build_engines.calibrate import CalibrationPair, calibrate, choose_pairs, some_pairs, split, without_evaluation
from build_engines.convert import Verified, convert, largest_difference
from build_engines.errors import PairsError, TableError
from build_engines.fetch import Checkpoint
from build_engines.finish import finish, write_handover
from build_engines.hashing import sha256_file, sha256_value
from build_engines.install import Installed
from build_engines.pairs import SAMPLE, Candidates, read_pairs
from build_engines.progress import bars
from build_engines.quantize import attention_products, linear_layers
from build_engines.request import BuildRequest, Exported, code, manifest, pairs_hash, row, within_budget
from build_engines.serving_code import graph_scoring, pair_encoding
from build_engines.steps import StepResult
from build_engines.switched import write_switched
from build_engines.verify import Verifier
from build_engines.verify_gpu import verify_for_tensorrt

# Fused INT8 attention takes heads of at most this size (TensorRT developer guide, "Fused Attention").
INT8_ATTENTION_MAX_HEAD = 64
# A layer's sensitivity is measured on calibration pairs of this many tokens in all: enough to put the layers in order,
# and a run of a 568 M parameter model takes seconds.
_SENSITIVITY_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Shares:
    """Who calibrates and who judges; no query is in both. `source` is the file that calibration comes from."""

    calibration: list[Candidates]
    evaluation: list[Candidates]
    source: Path | None


@dataclass(frozen=True, slots=True)
class GpuBuild:
    """The steps of one gpu build, and what they have in common."""

    common: Exported
    chosen: tuple[CalibrationPair, ...]
    evaluation: tuple[Candidates, ...]

    def inputs(self, *modules: str, **others: Any) -> dict[str, Any]:
        """Return what a step depends on."""
        base = row(self.common.reranker, "base_precision", "int8_attention")
        return (
            {"fp32": dict(self.common.fp32.files), "row": base} | others | code("low_precision", "fp32_parts", *modules)
        )

    def calibrate(self) -> StepResult:
        """Measure the ranges of activations."""

        def make(out: Path) -> dict[str, Any]:
            with bars(self.common.steps.console)("calibrate", "pairs", len(self.chosen)) as advance:
                return calibrate(self.common.reranker, self.common.graph, self.chosen, out, advance)

        ids = sha256_value([pair.arrays["input_ids"].tolist() for pair in self.chosen])
        result = self.common.steps.run("calibrate", self.inputs("calibrate", "quantize", pairs=ids), make)
        empty = result.facts["empty_buckets"]
        if empty:
            self.common.steps.console.print(
                f"          no pairs of the buckets {empty}: their scales come from the others"
            )
        return result

    def quantize(self, ranges: StepResult | None) -> StepResult:
        """Write the twin with a switch at each product that may be INT8; none without ranges."""

        def make(out: Path) -> dict[str, Any]:
            graph = onnx.load(self.common.graph, load_external_data=False).graph
            nodes = [node.name for node in linear_layers(graph)] if ranges else []
            if ranges and self.common.reranker.int8_attention:
                nodes += [node.name for node in attention_products(graph)]
            write_switched(
                self.common.graph, _ranges(ranges), nodes, self.common.reranker.base_precision, out / "switched.onnx"
            )
            (out / "layers.json").write_text(json.dumps(nodes), encoding="utf-8")
            return {"layers": len(nodes)}

        made_from = dict(ranges.files) if ranges else None
        return self.common.steps.run("quantize-gpu", self.inputs("quantize", "switched", ranges=made_from), make)

    def verify(self, quantized: StepResult) -> StepResult:
        """Choose what ships."""
        reranker = self.common.reranker

        def make(out: Path) -> dict[str, Any]:
            common = self.common
            verifier = Verifier(reranker, common.pairing.folder, common.vocabulary, self.evaluation)
            switched, layers = quantized.folder / "switched.onnx", _layers(quantized)
            draw = bars(self.common.steps.console)
            return verify_for_tensorrt(verifier, self.common.graph, switched, layers, _sample(self.chosen), out, draw)

        fields = ("precision", "gates", "base_gates", "ndcg_above_chance", "search_budget", "buckets")
        inputs = self.inputs(
            "verify",
            "verify_gpu",
            "switched",
            "report",
            "quality",
            "pair_encoding",
            "text_ids",
            "graph_scoring",
            pairing=dict(self.common.pairing.files),
            quantized=dict(quantized.files),
            verified=row(reranker, *fields),
            pairs=pairs_hash(self.evaluation),
        )
        return self.common.steps.run("verify-gpu", inputs, make)

    def convert(
        self, name: str, ranges: StepResult | None, quantized: StepResult, int8: list[str], shift: float
    ) -> StepResult:
        """Write the graph for TensorRT with these products in INT8, and see that it scores as verified.

        `shift` is the largest change against FP32 that verification found.
        """
        base = self.common.reranker.base_precision

        def make(out: Path) -> dict[str, Any]:
            facts = convert(self.common.graph, _ranges(ranges), int8, base, out)
            if base == "bf16":
                return facts
            sample = _sample(self.chosen)
            switched = quantized.folder / "switched.onnx"
            verified = Verified(switched, tuple(_layers(quantized)), tuple(int8), shift)
            return facts | {"difference_from_verified": largest_difference(out / "model.onnx", verified, sample)}

        made_from = {"quantized": dict(quantized.files), "int8": int8, "shift": shift}
        return self.common.steps.run(name, self.inputs("convert", "quantize", "switched", **made_from), make)


def build_for_gpu(common: Exported, shares: Shares) -> Installed | Path:
    """Build and install the engine; return the verified graph where there is no GPU or no TensorRT to build it."""
    request, reranker, console = common.request, common.reranker, common.steps.console
    evaluation = within_budget(reranker, shares.evaluation, console)
    encoder = pair_encoding.PairEncoder.load(common.pairing.folder, cache_bytes=64 << 20, max_text_bytes=1 << 20)
    if shares.source is None:
        chosen = some_pairs(reranker, encoder, evaluation)
    else:
        chosen = choose_pairs(reranker, encoder, shares.calibration, str(shares.source))
    work = GpuBuild(common, tuple(chosen), tuple(evaluation))
    ranges = None if shares.source is None else work.calibrate()
    quantized = work.quantize(ranges)
    report = work.verify(quantized)
    console.print(f"          {report.facts['precision'].upper()}: {report.facts['reason']}")
    console.print(f"          report: {report.folder / 'report.md'}")
    candidates = report.facts["candidates"]
    ships = next(candidate["max_shift"] for candidate in candidates if candidate["ships"])
    graphs = [work.convert("convert", ranges, quantized, report.facts["int8_layers"], ships)]
    if report.facts["int8_layers"] and reranker.precision == "auto":
        # Where a GPU finds INT8 no faster, this ships.
        graphs.append(work.convert("convert-base", ranges, quantized, [], candidates[0]["max_shift"]))
    facts = manifest(common, report, {})
    if ranges is not None and shares.source is not None:
        facts["calibration"] = {"file_sha256": sha256_file(shares.source), **ranges.facts}
    write_handover(request, facts, (common.pairing, report, *graphs))
    return finish(request, console)


def share_out(request: BuildRequest, given: list[Candidates], checkpoint: Checkpoint) -> Shares:
    """Part the pairs; raise TableError or PairsError for what this target cannot do, before steps that take minutes."""
    reranker = request.reranker
    if reranker.precision not in ("auto", "int8", reranker.base_precision):
        raise TableError(
            f"{reranker.name}: precision {reranker.precision} with base_precision {reranker.base_precision} is not for "
            f"the gpu target; use auto, int8 or {reranker.base_precision}."
        )
    config = checkpoint.config
    head_size = int(config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"]))
    if reranker.int8_attention and head_size > INT8_ATTENTION_MAX_HEAD:
        raise TableError(
            f"{reranker.name}: int8_attention is for heads of at most {INT8_ATTENTION_MAX_HEAD}, and this checkpoint's "
            f"have {head_size}; TensorRT would not fuse them. Set int8_attention = false."
        )
    if reranker.precision == reranker.base_precision:  # no INT8, so nothing to calibrate
        return Shares([], given, None)
    if request.calibration is not None:
        return Shares(without_evaluation(read_pairs(request.calibration), given), given, request.calibration)
    if request.pairs == SAMPLE:
        raise PairsError(
            f"{reranker.name}: INT8 on the gpu target is calibrated on your own queries and documents; "
            "give them with --pairs FILE.jsonl (parted in two, for calibration and verification) and, if you "
            f"have two files, --calibration FILE.jsonl. Without INT8: --precision {reranker.base_precision}."
        )
    calibration, evaluation = split(given)
    if not calibration or not evaluation:
        raise PairsError(
            f"{request.pairs} holds too few different queries to be parted in two; give --calibration too."
        )
    return Shares(calibration, evaluation, request.pairs)


def _ranges(step: StepResult | None) -> dict[str, float]:
    ranges: dict[str, float] = json.loads((step.folder / "ranges.json").read_text("utf-8")) if step else {}
    return ranges


def _layers(quantized: StepResult) -> list[str]:
    layers: list[str] = json.loads((quantized.folder / "layers.json").read_text("utf-8"))
    return layers


def _sample(chosen: tuple[CalibrationPair, ...]) -> list[graph_scoring.PaddedPairs]:
    """Return some calibration pairs as requests of one row, of every length in turn, the shortest bucket first."""
    of_bucket: dict[int, list[CalibrationPair]] = {}
    for pair in chosen:
        of_bucket.setdefault(pair.bucket, []).append(pair)
    turns = max(map(len, of_bucket.values()), default=0)
    sample: list[graph_scoring.PaddedPairs] = []
    tokens = 0
    for turn in range(turns):
        for pairs in of_bucket.values():
            if turn < len(pairs):
                length = pairs[turn].arrays["input_ids"].shape[1]
                tokens += length
                if tokens > _SENSITIVITY_TOKENS and sample:
                    return sample
                sample.append(graph_scoring.PaddedPairs(pairs[turn].arrays, np.array([length])))
    return sample
