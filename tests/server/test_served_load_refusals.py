# SPDX-License-Identifier: Apache-2.0
"""A repository that was changed after the build is not served, and the error says what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from build_engines.configs import repository_files
from build_engines.triton_server import TritonInstallation
from tests.checkpoints import row
from tests.server.served import BERT, INTERMEDIATE, XLM_R, Served
from tests.server.spoiled import Fault, assert_refused, start_all

TOKENIZER = Path(f"{BERT}_tokenizer") / "1"
SCORER = Path(f"{BERT}_scorer") / "1"


def change_tokenizer(repository: Path) -> None:
    path = repository / TOKENIZER / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")


def change_golden_id(repository: Path) -> None:
    path = repository / TOKENIZER / "pairing.json"
    pairing = json.loads(path.read_text(encoding="utf-8"))
    pairing["golden"][0]["ids"][1] += 1
    path.write_text(json.dumps(pairing), encoding="utf-8")


def break_pairing(repository: Path) -> None:
    (repository / TOKENIZER / "pairing.json").write_text("{", encoding="utf-8")


def remove(path: Path) -> Callable[[Path], None]:
    return lambda repository: (repository / path).unlink()


def truncate_graph(repository: Path) -> None:
    graph = repository / SCORER / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1])


def declare_lower_max_length(repository: Path) -> None:
    path = repository / TOKENIZER / "pairing.json"
    pairing = json.loads(path.read_text(encoding="utf-8"))
    pairing["max_length"] = 8
    path.write_text(json.dumps(pairing), encoding="utf-8")


def declare_segment_ids(repository: Path) -> None:
    wrong = dataclasses.replace(row(XLM_R, INTERMEDIATE / "checkpoints" / XLM_R), segment_ids=True)
    for name, text in repository_files(wrong, 1).items():
        (repository / name).write_text(text, encoding="utf-8")


_SCORER_TAKES = r"the graph takes \['attention_mask', 'input_ids'\], the config declares "
FAULTS = {
    "another tokenizer": Fault(change_tokenizer, r"tokenizer\.json has sha256 \w{64}, pairing\.json expects \w{64}"),
    "another golden id": Fault(change_golden_id, r"The golden pair 'what is a panda\?' .* has ids .*at build time"),
    "another max_length": Fault(declare_lower_max_length, r"buckets .* must rise and end with max_length 8"),
    "pairing cut short": Fault(break_pairing, r"pairing\.json cannot be read"),
    "no pairing": Fault(remove(TOKENIZER / "pairing.json"), r"pairing\.json.*python -m build_engines build"),
    "no tokenizer": Fault(remove(TOKENIZER / "tokenizer.json"), r"tokenizer\.json.*python -m build_engines build"),
    "no manifest": Fault(remove(SCORER / "manifest.json"), r"manifest\.json.*python -m build_engines build"),
    "no graph": Fault(remove(SCORER / "model.onnx"), r"model\.onnx is missing, the build wrote \d+ bytes"),
    "graph cut short": Fault(truncate_graph, r"model\.onnx has \d+ bytes, the build wrote \d+ bytes\. .* build again"),
    "a scorer input that the graph lacks": Fault(
        declare_segment_ids,
        _SCORER_TAKES + r"\['attention_mask', 'input_ids', 'token_type_ids'\]\. Set segment_ids in rerankers\.toml",
        reranker=XLM_R,
        loaded=f"{XLM_R}_scorer",
    ),
    "a tokenizer output that is not made": Fault(
        declare_segment_ids,
        r"config\.pbtxt declares \{'token_type_ids'\}, the built files give none\. Set segment_ids",
        reranker=XLM_R,
        loaded=f"{XLM_R}_tokenizer",
    ),
}


@pytest.fixture(scope="module")
def refusals(
    served: Served, installation: TritonInstallation, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    return start_all(FAULTS, served, installation, tmp_path_factory)


@pytest.mark.parametrize("name", FAULTS)
def test_a_repository_changed_after_the_build_is_not_served_and_the_error_says_why(
    refusals: dict[str, str], name: str
) -> None:
    assert_refused(refusals[name], FAULTS[name])
