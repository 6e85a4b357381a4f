# SPDX-License-Identifier: Apache-2.0
"""Step `export`: checkpoint -> `model.onnx` in FP32, opset 20, any batch and length, or a refusal."""

from __future__ import annotations

import ast
import io
import logging
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import NodeProto, helper
from torch import Tensor

from build_engines.decoders import check_verdict
from build_engines.errors import ExportError
from build_engines.families import graph_of, load_model, reference_scores
from build_engines.fetch import Checkpoint
from build_engines.onnx_files import INLINE_BYTES
from build_engines.table import Reranker, fp32_tolerance

# Opset 20 keeps Gelu and LayerNormalization as single operators and is read by every TensorRT since 10.0; the exporter
# writes IR 10 with it (newer IRs are refused there).
OPSET = 20
IR_VERSION = 10


def export(checkpoint: Checkpoint, reranker: Reranker, out: Path) -> dict[str, Any]:
    """Write `model.onnx` into `out`; raise CheckpointError or ExportError rather than write another model."""
    model = load_model(checkpoint, reranker)
    verdict = check_verdict(model, reranker, checkpoint)
    samples = _samples(reranker, int(checkpoint.config["vocab_size"]))
    expected = [reference_scores(model, reranker, checkpoint, arrays).numpy() for arrays in samples]
    graph = graph_of(model, reranker, checkpoint)
    parameters = sum(p.numel() for p in graph.parameters())
    del model
    path = out / "model.onnx"
    _write(graph, reranker, path, external=4 * parameters > INLINE_BYTES)
    del graph
    _rewrite(path)
    _check_form(path, reranker)
    difference, allowed = _difference(path, samples, expected), fp32_tolerance(reranker)
    if not difference <= allowed:
        raise ExportError(
            f"{path}: scores differ from PyTorch by {difference:.2e}, allowed is {allowed:.0e}. The exported graph "
            "is not the model; check the versions of torch and transformers against pyproject.toml."
        )
    facts: dict[str, Any] = {"parameters": parameters, "largest_difference_from_pytorch": difference}
    if verdict:
        facts |= {"yes_and_no_probability": verdict["mass"], "verdict": verdict}
    return facts


def _write(graph: torch.nn.Module, reranker: Reranker, path: Path, *, external: bool) -> None:
    batch = torch.export.Dim("batch", min=1, max=reranker.max_batch_size)
    length = torch.export.Dim("length", min=2, max=reranker.max_length)
    names = ["input_ids", "attention_mask"] + (["token_type_ids"] if reranker.segment_ids else [])
    ids = torch.full((2, 16), 5, dtype=torch.int64)
    examples = [ids, torch.ones_like(ids), torch.cat([torch.zeros_like(ids[:, 8:]), torch.ones_like(ids[:, 8:])], 1)]
    noise = io.StringIO()
    # It warns that torchvision is missing, which is not needed.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    # The exporter reports its progress to whoever watches standard output; ours is the step's own line.
    with redirect_stdout(noise), redirect_stderr(noise), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            graph,
            tuple(examples[: len(names)]),
            path,
            dynamo=True,
            opset_version=OPSET,
            input_names=names,
            output_names=["SCORE"],
            dynamic_shapes={name: {0: batch, 1: length} for name in names},
            external_data=external,
        )


def _rewrite(path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    _name_layers(model.graph)
    _strip_traces(model)
    _scale_queries(model.graph)
    path.write_bytes(model.SerializeToString(deterministic=True))


def _scale_queries(graph: onnx.GraphProto) -> None:
    """Multiply queries by attention's scale before their product with the keys, not the product after it.

    It is what TensorRT's fused attention looks for (developer guide, "Fused Attention"), and fewer values to multiply.
    """
    constant = {weight.name for weight in graph.initializer}
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for product in [n for n in graph.node if n.op_type == "MatMul" and not constant & set(n.input)]:
        after = readers[product.output[0]]
        if len(after) != 1 or after[0].op_type != "Mul" or after[0].input[1] not in constant:
            continue
        scale = after[0]
        scaled = f"{product.input[0]}_scaled"
        before = helper.make_node("Mul", [product.input[0], scale.input[1]], [scaled], scale.name)
        product.input[0], product.output[0] = scaled, scale.output[0]
        graph.node.insert(list(graph.node).index(product), before)
        graph.node.remove(scale)


def _name_layers(graph: onnx.GraphProto) -> None:
    """Call linear layers what the checkpoint calls them, for reports and profiles; the exporter numbers them."""
    constant = {weight.name for weight in graph.initializer}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in constant:
            notes = {note.key: note.value for note in node.metadata_props}
            # The modules around the product, as a list in Python's notation, and last the operator itself.
            scopes = ast.literal_eval(notes.get("pkg.torch.onnx.name_scopes", "[]"))
            if len(scopes) > 1:
                node.name = scopes[-2].removeprefix("model.")


def _strip_traces(model: onnx.ModelProto) -> None:
    """Drop the exporter's notes on nodes: they hold this machine's paths, and make equal models differ."""
    graph = model.graph
    parts: list[Any] = [model, graph, *graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output]
    for part in parts:
        del part.metadata_props[:]
        part.doc_string = ""


def _check_form(path: Path, reranker: Reranker) -> None:
    graph = onnx.load(path, load_external_data=False)
    onnx.checker.check_model(str(path))
    opset = {entry.domain: entry.version for entry in graph.opset_import}.get("")
    if (opset, graph.ir_version) != (OPSET, IR_VERSION):
        raise ExportError(f"{path} has opset {opset}, IR {graph.ir_version}; wanted are {OPSET} and {IR_VERSION}.")
    found = {node.name for node in graph.graph.input}
    wanted = {"input_ids", "attention_mask"} | ({"token_type_ids"} if reranker.segment_ids else set())
    if found != wanted:
        raise ExportError(
            f"{path} takes {sorted(found)}, but {reranker.name} declares {sorted(wanted)}: the model does not "
            "use an input. Correct segment_ids in rerankers.toml."
        )


def _samples(reranker: Reranker, vocabulary: int) -> list[dict[str, Tensor]]:
    """Ragged batches, right-padded: a lone pair, mixed lengths, and a long row beside a short one."""
    rng = np.random.default_rng(0)
    longest = min(reranker.max_length, 160)
    return [_batch(rng, lengths, reranker, vocabulary) for lengths in ([9], [40, 7, 23, 4, 31], [longest, 5])]


def _batch(rng: np.random.Generator, lengths: list[int], reranker: Reranker, vocabulary: int) -> dict[str, Tensor]:
    rows = len(lengths)
    ids = rng.integers(5, vocabulary, (rows, max(lengths)))
    position = np.arange(max(lengths))
    mask = (position < np.array(lengths)[:, None]).astype(np.int64)
    arrays = {"input_ids": ids * mask, "attention_mask": mask}
    if reranker.segment_ids:
        starts = np.array([max(1, length // 3) for length in lengths])[:, None]
        arrays["token_type_ids"] = (position >= starts).astype(np.int64) * mask
    else:
        arrays["input_ids"] = np.where(mask == 1, ids, 1)  # RoBERTa's position of a token depends on pad ids being 1
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _difference(path: Path, samples: list[dict[str, Tensor]], expected: list[Any]) -> float:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = [session.run(None, {name: t.numpy() for name, t in arrays.items()})[0] for arrays in samples]
    if any(not np.isfinite(scores).all() for scores in found):
        return float("nan")
    return max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))
