# SPDX-License-Identifier: Apache-2.0
"""A decoder goes the whole way on the command line, for both targets, and its manifest says what it was asked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from build_engines.__main__ import NOT_FINISHED, main
from build_engines.request import BuildRequest
from build_engines.serving_code import pair_encoding
from tests.decoder_checkpoints import decoder_row, prompt_of, write_decoder
from tests.unit.gpu_builds import LOOSE, random_candidates, write_pairs, write_table

INSTRUCTION = "Given a legal question, retrieve the statutes that answer it"


@dataclass(frozen=True, slots=True)
class Place:
    """A table with one decoder, real-looking pairs, and what a command ends with."""

    root: Path

    def build(self, *arguments: str) -> int:
        """Run `build tiny` with these arguments."""
        folders = ["--repository", str(self.root / "repository"), "--build-folder", str(self.root / "build")]
        places = [*folders, "--table", str(self.root / "mine.toml")]
        return main(["build", "tiny", "--pairs", str(self.root / "pairs.jsonl"), *places, *arguments])

    def read(self, *path: str) -> Any:
        return json.loads(self.root.joinpath(*path).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("decoder")
    folder = write_decoder(root / "checkpoint", "qwen2")
    row = decoder_row("tiny", folder, "qwen2", precision="int8", gates=LOOSE, base_gates=LOOSE)
    write_table(root / "mine.toml", BuildRequest(row, "cpu", root, root))
    write_pairs(root / "pairs.jsonl", random_candidates(30, seed=1, documents=20))
    return Place(root)


@pytest.fixture(scope="module")
def for_gpu(place: Place) -> dict[str, Any]:
    """What a gpu build hands over to the machine that has one."""
    assert place.build("--target", "gpu") == NOT_FINISHED
    found: dict[str, Any] = place.read("build", "tiny", "handover.json")["manifest"]
    return found


def test_the_gpu_target_ends_with_int8_and_bf16(place: Place, for_gpu: dict[str, Any]) -> None:
    assert for_gpu["precision"] == "int8"
    report = place.read("build", "tiny", "verify-gpu", "report.json")
    assert report["base_precision"] == "bf16"
    # q, k, v, o, gate, up and down of two layers.
    assert len(report["int8_layers"]) == 14
    assert for_gpu["calibration"]["pairs"] >= 128


def test_the_manifest_has_the_prompt_and_the_verdicts_with_their_ids(for_gpu: dict[str, Any]) -> None:
    assert for_gpu["prompt"]["suffix"] == ["<｜Assistant｜><think>\n\n</think>\n\n"]
    verdict = for_gpu["verdict"]
    assert (verdict["yes"], verdict["yes_id"], verdict["no"], verdict["no_id"]) == ("yes", 9693, "no", 2152)
    assert 0 < verdict["mass"] < 0.01


def test_an_instruction_of_ones_own_is_in_what_is_served(place: Place) -> None:
    assert place.build("--instruction", INSTRUCTION) == 0
    manifest = place.read("repository", "tiny_scorer", "1", "manifest.json")
    assert manifest["prompt"]["instruction"] == INSTRUCTION
    assert manifest["precision"] == "int8"
    assert manifest["report"]["self_test"]["arrays"]["input_ids"][0] == 151_646
    served = place.root / "repository" / "tiny_tokenizer" / "1"
    encoder = pair_encoding.PairEncoder.load(served, cache_bytes=0, max_text_bytes=1000)
    tokenizer = encoder._tokenizer
    assert INSTRUCTION in tokenizer.decode(list(encoder.pairing.prefix_ids))
    assert prompt_of("qwen2").instruction not in tokenizer.decode(list(encoder.pairing.prefix_ids))


def test_an_encoder_has_no_place_for_an_instruction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "light_reranker", "--instruction", INSTRUCTION]) == 1
    assert "light_reranker has no prompt, so an instruction has no place" in capsys.readouterr().err
