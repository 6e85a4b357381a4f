# SPDX-License-Identifier: Apache-2.0
"""`python -m build_engines evaluate` finds the same with a running server as in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from build_engines.pairs import SAMPLE
from build_engines.table import DEFAULT_TABLE
from build_engines.triton_server import TritonServer
from tests.server.served import INT8, LIGHT, Served


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """The sample, each with a document that is too long, of which one is the relevant one."""
    rows = [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows):
        row["documents"].append(" ".join(row["documents"]) * 40)
        row["relevance"].append(int(number == 0))
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def evaluate(name: str, pairs: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run the command as a person does; return its figures and what it printed."""
    target = pairs.with_name("figures.json")
    target.unlink(missing_ok=True)
    command = (sys.executable, "-m", "build_engines", "evaluate", name, "--pairs", str(pairs), "--json", str(target))
    done = subprocess.run((*command, *arguments), capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(target.read_text(encoding="utf-8")), done.stdout


@pytest.mark.parametrize("name", [LIGHT, INT8])
def test_evaluate_gives_the_same_figures_with_a_server_as_without(
    served: Served, server: TritonServer, pairs: Path, name: str
) -> None:
    table = pairs.with_name("rerankers.toml")
    row = f'[{INT8}]\ncheckpoint = "not read"\nhead = "bi_encoder"\nsegment_ids = true\n'
    table.write_text(f"{DEFAULT_TABLE.read_text(encoding='utf-8')}\n{row}", encoding="utf-8")
    here, printed = evaluate(name, pairs, "--repository", str(served.repository), "--table", str(table))
    there, _ = evaluate(name, pairs, "--url", server.grpc_url)
    differ = ("pairs_per_second", "precision", "url")
    assert {key: value for key, value in here.items() if key not in differ} == {
        key: value for key, value in there.items() if key not in differ
    }
    assert (here["precision"], there["precision"]) == ("int8" if name == INT8 else "fp32", None)
    assert (here["url"], there["url"]) == (None, server.grpc_url)
    assert here["queries"] == 16 == here["pairs_cut"]
    assert here["ndcg_at_10"]["difference"] > 0.1
    assert here["sentence"] in printed
