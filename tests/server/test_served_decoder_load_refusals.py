# SPDX-License-Identifier: Apache-2.0
"""A decoder that was changed after the build or does not answer its prompt is not served, and the error says why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from build_engines.triton_server import TritonInstallation
from tests.server.served import Served
from tests.server.served_decoders import CLASSIFIER, GEMMA, QWEN2, QWEN3, other_gemma_graph
from tests.server.spoiled import Fault, assert_refused, start_all

_GOLDEN = r"The golden pair 'what is a panda\?' .* has ids .*, at build time .* build again"


def verdict(name: str, mass: float, floor: float) -> Callable[[Path], None]:
    """What the build found on a good pair, and what is asked."""

    def spoil(repository: Path) -> None:
        path = repository / f"{name}_scorer" / "1" / "manifest.json"
        manifest = json.loads(path.read_text(encoding="utf-8"))
        manifest["verdict"] |= {"mass": mass, "floor": floor}
        path.write_text(json.dumps(manifest), encoding="utf-8")

    return spoil


def exchange_graph(repository: Path) -> None:
    graph = repository / f"{GEMMA}_scorer" / "1" / "model.onnx"
    size_bytes = graph.stat().st_size
    shutil.copyfile(other_gemma_graph(), graph)
    assert graph.stat().st_size == size_bytes, "else the size alone gives it away"


def change_prompt(name: str, field: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def spoil(repository: Path) -> None:
        path = repository / f"{name}_tokenizer" / "1" / "pairing.json"
        pairing = json.loads(path.read_text(encoding="utf-8"))
        before = pairing[field]
        pairing[field] = change(before)
        assert pairing[field] != before
        path.write_text(json.dumps(pairing), encoding="utf-8")

    return spoil


FAULTS = {
    "a prompt that is not answered": Fault(
        verdict(QWEN3, 0.0123, 0.05),
        rf"{QWEN3}_scorer: P\(yes\) \+ P\(no\) was 0\.012 when it was built, at least 0\.05 is asked",
        QWEN3,
        f"{QWEN3}_scorer",
    ),
    "a prompt of one verdict that is not answered": Fault(
        verdict(GEMMA, 1e-6, 1e-5),
        rf"{GEMMA}_scorer: P\(Yes\) was 1e-06 when it was built, at least 1e-05 is asked",
        GEMMA,
        f"{GEMMA}_scorer",
    ),
    "a verdict that is no number": Fault(
        verdict(GEMMA, float("nan"), 0.0),
        r"P\(Yes\) was nan when it was built, at least 0 is asked",
        GEMMA,
        f"{GEMMA}_scorer",
    ),
    "the graph of other weights": Fault(
        exchange_graph,
        rf"{GEMMA}_scorer: the self-test pair scores -?\d+\.\d{{4}} here and scored -?\d+\.\d{{4}} when it was built",
        GEMMA,
        f"{GEMMA}_scorer",
    ),
    "a token of the prefix": Fault(
        change_prompt(QWEN2, "prefix_ids", lambda ids: [*ids[:5], ids[5] + 1, *ids[6:]]),
        _GOLDEN,
        QWEN2,
        f"{QWEN2}_tokenizer",
    ),
    "a token less in the suffix": Fault(
        change_prompt(CLASSIFIER, "suffix_ids", lambda ids: ids[:-1]), _GOLDEN, CLASSIFIER, f"{CLASSIFIER}_tokenizer"
    ),
    "no space before the document": Fault(
        change_prompt(QWEN3, "document_head", lambda _: ""), _GOLDEN, QWEN3, f"{QWEN3}_tokenizer"
    ),
    "another end of a query that is cut": Fault(
        change_prompt(QWEN3, "query_tail_ids", lambda ids: [ids[0] + 1]),
        r"The golden pair 'query query .* has ids .*, at build time .* build again",
        QWEN3,
        f"{QWEN3}_tokenizer",
    ),
}


@pytest.fixture(scope="module")
def refusals(
    served_decoders: Served, installation: TritonInstallation, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    return start_all(FAULTS, served_decoders, installation, tmp_path_factory)


@pytest.mark.parametrize("name", FAULTS)
def test_a_decoder_changed_after_the_build_is_not_served_and_the_error_says_why(
    refusals: dict[str, str], name: str
) -> None:
    assert_refused(refusals[name], FAULTS[name])
