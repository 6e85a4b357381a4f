# SPDX-License-Identifier: Apache-2.0
"""A range is the largest value that PyTorch itself computes on the calibration pairs, or the model is refused."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from transformers import AutoModelForSequenceClassification

import build_engines.onnx_files
from build_engines.calibrate import CalibrationPair, calibrate
from build_engines.errors import ExportError
from build_engines.onnx_files import save
from build_engines.quantize import attention_products, linear_layers
from tests.checkpoints import row
from tests.unit.test_calibration_pairs import candidates, choose, tokens
from tests.unit.tiny_models import TinyModel, TinyModels


def pairs_of(model: TinyModel, count: int) -> list[CalibrationPair]:
    """Return some pairs of many lengths, chosen as a build chooses."""
    chosen = choose(model, candidates(60, 10, words=120))
    return chosen[:: len(chosen) // count][:count]


def measured(model: TinyModel, chosen: Sequence[CalibrationPair]) -> dict[str, Any]:
    """Return weight of a linear layer as bytes -> its largest input; and the largest softmax, key and value of each."""
    torch_model = AutoModelForSequenceClassification.from_pretrained(
        model.checkpoint.folder, attn_implementation="eager"
    ).eval()
    found: dict[str, Any] = {"inputs": {}, "outputs": {}, "softmax": [0.0, 0.0]}

    def largest(kept: dict[Any, float], key: Any, values: Any) -> None:
        kept[key] = max(kept.get(key, 0.0), float(values.abs().max()))

    def watch(name: str, module: Any) -> None:
        def note(_: Any, inputs: Any, output: Any) -> None:
            largest(found["inputs"], module.weight.detach().numpy().T.tobytes(), inputs[0])
            largest(found["outputs"], name.split("encoder.")[1], output)

        module.register_forward_hook(note)

    for name, module in torch_model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layer." in name:
            watch(name, module)
    with torch.no_grad():
        for pair in chosen:
            arrays = {name: torch.from_numpy(array) for name, array in pair.arrays.items()}
            attentions = torch_model(**arrays, output_attentions=True).attentions
            found["softmax"] = [max(a, float(b.max())) for a, b in zip(found["softmax"], attentions, strict=True)]
    return found


def calibrated(model: TinyModel, graph: Path, chosen: Sequence[CalibrationPair], out: Path, **fields: Any) -> Any:
    """Calibrate; return the ranges on disk and the facts."""
    out.mkdir(exist_ok=True)
    reranker = row("tiny", model.checkpoint.folder, **fields)
    facts = calibrate(reranker, graph, chosen, out, lambda: None)
    assert [file.name for file in out.iterdir()] == ["ranges.json"]
    return json.loads((out / "ranges.json").read_text(encoding="utf-8")), facts


@pytest.mark.parametrize("family", ["bert", "xlm_roberta"])
def test_ranges_are_the_largest_inputs_that_pytorch_has(tiny: TinyModels, tmp_path: Path, family: str) -> None:
    model, graph = tiny.model(family), tiny.graph(family)
    chosen = pairs_of(model, 40)
    expected = measured(model, chosen)["inputs"]
    ranges, _ = calibrated(model, graph, chosen, tmp_path)
    onnx_graph = onnx.load(graph).graph
    stored = {weight.name: numpy_helper.to_array(weight) for weight in onnx_graph.initializer}
    nodes = linear_layers(onnx_graph)
    assert set(ranges) == {node.input[0] for node in nodes}
    assert len(nodes) == len(expected) == 12
    for node in nodes:
        np.testing.assert_allclose(ranges[node.input[0]], expected[stored[node.input[1]].tobytes()], rtol=1e-4)
    # A single pair would not do: the test sees whether the largest of all is kept.
    few = measured(model, chosen[:1])["inputs"]
    assert sum(few[weight] < 0.98 * expected[weight] for weight in expected) >= 6


def test_attention_has_ranges_where_it_is_to_be_int8(tiny: TinyModels, tmp_path: Path) -> None:
    model, graph = tiny.model("xlm_roberta"), tiny.graph("xlm_roberta")
    chosen = pairs_of(model, 10)
    expected = measured(model, chosen)
    ranges, _ = calibrated(model, graph, chosen, tmp_path, int8_attention=True)
    products = attention_products(onnx.load(graph).graph)
    assert set(ranges) == {node.input[0] for node in linear_layers(onnx.load(graph).graph)} | {
        name for node in products for name in node.input
    }
    for layer, (scores, context) in enumerate(zip(products[::2], products[1::2], strict=True)):
        outputs = expected["outputs"]
        value = outputs[f"layer.{layer}.attention.self.value"]
        np.testing.assert_allclose(ranges[context.input[0]], expected["softmax"][layer], rtol=1e-4)
        np.testing.assert_allclose(ranges[context.input[1]], value, rtol=1e-4)
        # Eight numbers a head; where the graph multiplies by their root is its own affair.
        sizes = [outputs[f"layer.{layer}.attention.self.{name}"] for name in ("query", "key")]
        found = ranges[scores.input[0]] * ranges[scores.input[1]]
        assert any(np.isclose(found, sizes[0] * sizes[1] * share, rtol=1e-4) for share in (1, 8**-0.5))


def test_facts_say_what_was_used_and_what_was_missing(tiny: TinyModels, tmp_path: Path) -> None:
    model, graph = tiny.model("bert"), tiny.graph("bert")
    chosen = [pair for pair in pairs_of(model, 20) if pair.bucket in (32, 128)]
    steps: list[None] = []
    facts = calibrate(model.reranker, graph, chosen, tmp_path, lambda: steps.append(None))
    assert len(steps) == facts["pairs"] == len(chosen) > 4
    assert facts["pairs_per_bucket"] == Counter(pair.bucket for pair in chosen)
    assert facts["empty_buckets"] == [64, 256, 512]
    assert facts["scripts"] == {"LATIN": len(chosen)}
    ranges = json.loads((tmp_path / "ranges.json").read_text(encoding="utf-8"))
    assert facts["largest_activation"] == max(ranges.values())
    other, same = (
        calibrated(model, graph, other, tmp_path / str(index))[1]["ids_sha256"]
        for index, other in enumerate((chosen[1:], chosen))
    )
    assert same == facts["ids_sha256"] != other


def test_weights_beside_the_graph_are_found_wherever_it_lies(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graph = tiny.model("xlm_roberta"), tiny.graph("xlm_roberta")
    chosen = pairs_of(model, 5)
    (tmp_path / "written").mkdir()
    monkeypatch.setattr(build_engines.onnx_files, "INLINE_BYTES", 1000)
    save(onnx.load(graph), tmp_path / "written" / "model.onnx")
    shutil.move(tmp_path / "written", tmp_path / "moved")
    assert (tmp_path / "moved" / "model.onnx.data").stat().st_size > 100_000
    beside, _ = calibrated(model, tmp_path / "moved" / "model.onnx", chosen, tmp_path / "a")
    inside, _ = calibrated(model, graph, chosen, tmp_path / "b")
    assert beside == pytest.approx(inside, rel=1e-5)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_model_that_breaks_on_a_word_is_refused(tiny: TinyModels, tmp_path: Path, value: float) -> None:
    model = tiny.model("xlm_roberta")
    chosen = pairs_of(model, 12)
    rare = min(Counter(token for pair in chosen for token in set(tokens(pair))).items(), key=lambda item: item[1])
    assert rare[1] == 1
    broken = onnx.load(tiny.graph("xlm_roberta"))
    (words,) = (w for w in broken.graph.initializer if w.name.endswith("word_embeddings.weight"))
    array = numpy_helper.to_array(words).copy()
    array[rare[0]] = value
    words.CopyFrom(numpy_helper.from_array(array, words.name))
    onnx.save(broken, tmp_path / "model.onnx")
    for pairs in (chosen, chosen[::-1]):
        with pytest.raises(ExportError, match=r"the activation \S+ is (nan|inf) on real pairs; the model is damaged"):
            calibrate(model.reranker, tmp_path / "model.onnx", pairs, tmp_path, lambda: None)
    assert not (tmp_path / "ranges.json").exists()


def test_an_activation_that_is_always_zero_is_refused(tiny: TinyModels, tmp_path: Path) -> None:
    model = tiny.model("xlm_roberta")
    broken = onnx.load(tiny.graph("xlm_roberta"))
    first = linear_layers(broken.graph)[0].input[0]
    norm = next(node for node in broken.graph.node if first in node.output)
    for weight in broken.graph.initializer:
        if weight.name in norm.input[1:]:
            zeros = np.zeros_like(numpy_helper.to_array(weight))
            weight.CopyFrom(numpy_helper.from_array(zeros, weight.name))
    onnx.save(broken, tmp_path / "model.onnx")
    with pytest.raises(ExportError, match=r"is 0\.0 on real pairs; the model is damaged"):
        calibrate(model.reranker, tmp_path / "model.onnx", pairs_of(model, 2), tmp_path, lambda: None)
