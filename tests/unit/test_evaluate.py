# SPDX-License-Identifier: Apache-2.0
"""`evaluate` says what independent code finds about a reranker's order and the given one, or why it cannot."""

from __future__ import annotations

import io
import json
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from rich.console import Console
from sklearn.metrics import ndcg_score  # type: ignore[import-untyped]

from build_engines.__main__ import main
from build_engines.build import build
from build_engines.configs import MAX_TEXT_BYTES
from build_engines.errors import GateError
from build_engines.hashing import sha256_file
from build_engines.pairs import read_pairs
from build_engines.request import BuildRequest
from build_engines.score_pairs import score_installed
from build_engines.serving_code import graph_scoring, pair_encoding
from build_engines.table import DEFAULT_TABLE, Reranker
from tests.checkpoints import row, write_xlm_roberta
from tests.server.references import CrossEncoder
from tests.unit.random_texts import random_text
from tests.unit.scripted_triton import ScriptedTriton, serve

Row = dict[str, Any]
Capture = pytest.CaptureFixture[str]
MAX_LENGTH = 128


@dataclass(frozen=True, slots=True)
class Built:
    """A repository with a tiny reranker: version 1 in FP32, which is served, and version 2 in INT8."""

    reranker: Reranker
    repository: Path
    table: Path

    def evaluate(self, *arguments: object) -> int:
        places = ("--repository", self.repository, "--table", self.table)
        return main([str(argument) for argument in ("evaluate", "tiny", *arguments, *places)])

    def folder(self, model: str, version: int = 1) -> Path:
        return self.repository / f"tiny_{model}" / str(version)

    def copy(self, repository: Path) -> Built:
        shutil.copytree(self.repository, repository)
        return replace(self, repository=repository)

    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder("scorer") / "manifest.json").read_text(encoding="utf-8"))
        return found

    def change_manifest(self, **values: Any) -> None:
        changed = json.dumps(self.manifest() | values)
        (self.folder("scorer") / "manifest.json").write_text(changed, encoding="utf-8")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    root = tmp_path_factory.mktemp("evaluate")
    checkpoint = write_xlm_roberta(root / "checkpoint", layers=1)
    reranker = row("tiny", checkpoint, precision="fp32", max_length=MAX_LENGTH)
    for precision in ("fp32", "int8"):
        one = replace(reranker, precision=precision)
        build(BuildRequest(one, "cpu", root / "repository", root / precision), Console(file=io.StringIO()))
    table = root / "rerankers.toml"
    fields = f'checkpoint = "{checkpoint}"\nhead = "sequence_classification"\nsegment_ids = false\n'
    limits = f"max_length = {MAX_LENGTH}\nbuckets = {list(reranker.buckets)}\n"
    table.write_text(f"{DEFAULT_TABLE.read_text(encoding='utf-8')}\n[tiny]\n{fields}{limits}", encoding="utf-8")
    return Built(reranker, root / "repository", table)


@pytest.fixture
def script() -> Iterator[ScriptedTriton]:
    script = ScriptedTriton(model="served")
    with serve(script):
        yield script


@pytest.fixture
def ask(script: ScriptedTriton, tmp_path: Path) -> Callable[..., Row]:
    """Evaluate rows on the scripted server and return what `--json` wrote."""

    def asked(rows: list[Row], *arguments: str) -> Row:
        target = tmp_path / "figures.json"
        pairs = write(tmp_path / "pairs.jsonl", rows)
        told = ["evaluate", "served", "--pairs", str(pairs), "--url", script.url, "--json", str(target), *arguments]
        assert main(told) == 0
        found: Row = json.loads(target.read_text(encoding="utf-8"))
        return found

    return asked


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return path


def query(scores: Sequence[float], relevance: Sequence[float] | None, text: str = "panda") -> Row:
    """A query whose documents the scripted server gives these scores."""
    return {"query": text, "documents": [f"logit:{score}" for score in scores], "relevance": relevance}


BETTER, WORSE, TIED = query([1, 2], [0, 1]), query([1, 2], [1, 0]), query([3, 3], [0, 1])


def random_rows() -> list[Row]:
    rng = random.Random(5)
    rows = []
    for number in range(16):
        # The last document of each query is longer than the model reads.
        documents = [random_text(rng, longest=60) for _ in range(12)] + [random_text(rng, longest=60) * 30]
        grades = [float(rng.choice([0, 0, 0, 1, 3])) for _ in documents]
        rows.append({"query": f"{number} {random_text(rng, longest=8)}", "documents": documents, "relevance": grades})
    return [*rows, {"query": "ungraded", "documents": ["a"]}, {"query": "b", "documents": ["b"], "relevance": [0]}]


def own_figures(gains: list[list[float]], scores: list[list[float]]) -> tuple[list[float], list[float]]:
    """nDCG@10 by scikit-learn and 1 / rank counted one by one, for each query."""
    ndcg = [float(ndcg_score([g], [s], k=10)) for g, s in zip(gains, scores, strict=True)]
    ranks = []
    for g, s in zip(gains, scores, strict=True):
        ordered = [gain for _, gain in sorted(zip(s, g, strict=True), key=lambda pair: -pair[0])]
        ranks.append(next((1 / rank for rank, gain in enumerate(ordered[:10], 1) if gain), 0.0))
    return ndcg, ranks


def test_figures_equal_those_of_independent_code_on_the_checkpoint(built: Built, tmp_path: Path) -> None:
    rows, target = random_rows(), tmp_path / "figures.json"
    assert built.evaluate("--pairs", write(tmp_path / "pairs.jsonl", rows), "--json", target) == 0
    found = json.loads(target.read_text(encoding="utf-8"))
    checkpoint, counted = CrossEncoder(Path(built.reranker.checkpoint), MAX_LENGTH), rows[:16]
    gains = [[2**grade - 1 for grade in row["relevance"]] for row in counted]
    assert all(any(g) for g in gains)
    scores = [[checkpoint.score(row["query"], text) for text in row["documents"]] for row in counted]
    own = own_figures(gains, scores)
    falling = own_figures(gains, [[-float(at) for at in range(13)] for _ in counted])
    for key, reranked, given in zip(("ndcg_at_10", "mrr_at_10"), own, falling, strict=True):
        difference = np.array(reranked) - np.array(given)
        assert found[key]["reranked"] == pytest.approx(np.mean(reranked), abs=1e-9)
        assert found[key]["given"] == pytest.approx(np.mean(given), abs=1e-9)
        assert found[key]["difference"] == pytest.approx(difference.mean(), abs=1e-9)
        counts = tuple(int((np.sign(difference.round(9)) == sign).sum()) for sign in (1, -1, 0))
        assert (found[key]["improved"], found[key]["worse"], found[key]["equal"]) == counts
        low, high = found[key]["interval"]
        half = 1.96 * difference.std() / 4  # by the normal distribution, of the mean of 16
        assert (low, high) == pytest.approx((difference.mean() - half, difference.mean() + half), abs=0.25 * half)
    tokens = [checkpoint.tokens(row["query"], text) for row in counted for text in row["documents"]]
    assert found["pairs_cut"] == sum(length > MAX_LENGTH for length in tokens) > 0
    assert (found["queries"], found["pairs"]) == (16, 16 * 13)
    assert (found["queries_without_relevance"], found["queries_without_relevant_documents"]) == (1, 1)
    assert (found["version"], found["precision"], found["url"]) == ("1", "fp32", None)
    assert found["pairs_per_second"] > 0


def test_another_version_is_scored_as_the_scorer_serves_int8_each_pair_by_itself(built: Built, tmp_path: Path) -> None:
    queries = read_pairs(write(tmp_path / "pairs.jsonl", random_rows()[:6]))
    found = score_installed(built.reranker, built.repository, 2, queries, Console(file=io.StringIO()))
    assert (found.version, found.precision) == ("2", "int8")
    folder, graph = built.folder("tokenizer", 2), built.folder("scorer", 2) / "model.onnx"
    encoder = pair_encoding.PairEncoder.load(folder, cache_bytes=0, max_text_bytes=MAX_TEXT_BYTES)
    limits = graph_scoring.Limits(10_000, MAX_LENGTH)
    alone, crowded = (graph_scoring.GraphScorer(graph, threads=1, tokens_per_run=tokens) for tokens in (0, 512))
    effect = 0.0
    for one, scores in zip(queries, found.scores, strict=True):
        texts = [text.encode() for text in one.documents]
        pairs = [encoder.encode([one.query.encode()] * len(some), some) for some in (texts, *([t] for t in texts))]
        crowd, *single = (graph_scoring.PaddedPairs.check(pair.arrays, limits) for pair in pairs)
        expected = np.concatenate([alone.score([pair])[0][:, 0] for pair in single])
        assert scores.tolist() == expected.tolist()
        effect = max(effect, float(np.abs(crowded.score([crowd])[0][:, 0] - expected).max()))
    assert effect > 0, "rows that share a run would not have shown"


def test_figures_by_hand(ask: Callable[..., Row], capsys: Capture) -> None:
    third = query([1, 5, 3], [0, 0, 2], text="twenty words " * 10)  # the relevant one from rank 3 to 2; all three cut
    tied = query([2, 2, 2], [0, 1, 0])  # stays at rank 2
    eleventh = query([0] * 10 + [1, 0], [0] * 10 + [1, 0])  # from rank 11, which does not count, to 1
    lost = query([1, 2], [1, 0])  # from 1 to 2
    found = ask([third, tied, eleventh, lost, query([1], None), query([1], [0])])
    second = 1 / math.log2(3)
    ndcg, mrr = found["ndcg_at_10"], found["mrr_at_10"]
    assert ndcg["given"] == pytest.approx((0.5 + second + 0 + 1) / 4)
    assert ndcg["reranked"] == pytest.approx((second + second + 1 + second) / 4)
    assert ndcg["difference"] == pytest.approx((second - 0.5 + 1 + second - 1) / 4)
    assert mrr["given"] == pytest.approx((1 / 3 + 1 / 2 + 0 + 1) / 4)
    assert mrr["reranked"] == pytest.approx((1 / 2 + 1 / 2 + 1 + 1 / 2) / 4)
    for measure in (ndcg, mrr):
        assert (measure["improved"], measure["worse"], measure["equal"]) == (2, 1, 1)
    assert (found["queries"], found["pairs"], found["pairs_cut"]) == (4, 20, 3)
    printed = capsys.readouterr().out
    assert "queries   4 (not counted: 1 without relevance, 1 without a relevant document)" in printed
    assert "pairs     20 (3 cut)" in printed
    assert f"nDCG@10        {ndcg['given']:.4f}     {ndcg['reranked']:.4f}" in printed
    assert f"MRR@10         {mrr['given']:.4f}     {mrr['reranked']:.4f}" in printed
    assert "nDCG@10 is higher for 2 queries, lower for 1, equal for 1." in printed


@pytest.mark.parametrize(
    ("rows", "verdict", "says"),
    [
        ([BETTER] * 6, "better", "served ranks better than the given order on these 6 queries"),
        ([WORSE] * 6, "worse", "served ranks worse than the given order on these 6 queries"),
        ([BETTER] * 5, "undecided", "on these 5 queries (nDCG@10 +0.3691"),
        ([BETTER, WORSE] * 10, "undecided", "served cannot be told apart from the given order on these 20 queries"),
        ([TIED] * 20, "undecided", "95 % interval +0.0000 to +0.0000"),
        ([BETTER] * 18 + [WORSE] * 2, "better", "on these 20 queries"),
    ],
)
def test_the_verdict_is_that_of_the_interval(
    ask: Callable[..., Row], capsys: Capture, rows: list[Row], verdict: str, says: str
) -> None:
    found = ask(rows)
    assert found["verdict"] == verdict
    assert says in found["sentence"]
    printed = capsys.readouterr().out
    assert found["sentence"] in printed
    assert ("fewer than 6 queries tell nothing" in printed) == (len(rows) < 6)
    assert ("is it your first stage's own order?" in printed) == (WORSE in rows and BETTER not in rows)


def test_every_query_is_scored_by_the_version_that_answered_first(
    ask: Callable[..., Row], script: ScriptedTriton
) -> None:
    script.versions = ("1", "2")
    assert ask([BETTER] * 3)["version"] == "2"
    assert [request.version for request in script.received] == ["", "2", "2"]


def test_a_served_version_can_be_named(ask: Callable[..., Row], script: ScriptedTriton) -> None:
    script.versions = ("1", "2")
    assert ask([BETTER] * 3, "--version", "1")["version"] == "1"
    assert [request.version for request in script.received] == ["1"] * 3


def test_a_server_may_keep_to_itself_how_much_it_reads(
    ask: Callable[..., Row], script: ScriptedTriton, capsys: Capture
) -> None:
    script.max_length = None
    assert ask([BETTER])["pairs_cut"] is None
    assert "how many are cut is not known" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([query([1], None), query([1, 2], [0, 0])], "1 queries without relevance, 1 where every grade is 0"),
        (
            [BETTER, query([1, 2], [0, 1024])],
            "a grade of 1024; nDCG gives a document 2^grade - 1 points, so at most 1000",
        ),
        ([BETTER, {"query": "q", "documents": ["é" * 200_001], "relevance": [1]}], "has 400002 bytes; at most 400000"),
    ],
)
def test_a_file_that_cannot_be_judged_is_refused_before_anything_is_scored(
    script: ScriptedTriton, tmp_path: Path, capsys: Capture, rows: list[Row], says: str
) -> None:
    pairs = write(tmp_path / "pairs.jsonl", rows)
    assert main(["evaluate", "served", "--pairs", str(pairs), "--url", script.url]) == 1
    assert says in capsys.readouterr().err
    assert script.received == []


def test_figures_that_could_not_be_written_are_no_reason_to_score(
    script: ScriptedTriton, tmp_path: Path, capsys: Capture
) -> None:
    pairs = write(tmp_path / "pairs.jsonl", [BETTER])
    for target in (tmp_path, tmp_path / "missing" / "figures.json"):
        assert main(["evaluate", "served", "--pairs", str(pairs), "--url", script.url, "--json", str(target)]) == 1
        assert f"--json {target}: name a file in a folder that exists." in capsys.readouterr().err
    assert script.received == []


def test_a_text_that_the_server_refuses_is_named_by_its_query(
    script: ScriptedTriton, tmp_path: Path, capsys: Capture
) -> None:
    script.infer_faults.append((grpc.StatusCode.INVALID_ARGUMENT, "DOCUMENT in row 1 is too long"))
    pairs = write(tmp_path / "pairs.jsonl", [BETTER | {"query": "a [red] panda"}])
    assert main(["evaluate", "served", "--pairs", str(pairs), "--url", script.url]) == 1
    said = capsys.readouterr().err
    assert "The query 'a [red] panda' cannot be scored: DOCUMENT in row 1 is too long" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["other", "--url", "{url}"], "'other' is not found"),
        (["served", "--url", "{url}", "--version", "3"], "version 3 is not found"),
        (["served", "--url", "http://{url}"], "url must be"),
        (["served", "--url", "127.0.0.1:9"], "Check that tritonserver is up"),
    ],
)
def test_a_server_that_does_not_answer_is_an_error_in_one_piece(
    script: ScriptedTriton, tmp_path: Path, capsys: Capture, arguments: list[str], says: str
) -> None:
    pairs = write(tmp_path / "pairs.jsonl", [BETTER])
    told = [argument.format(url=script.url) for argument in arguments]
    assert main(["evaluate", *told, "--pairs", str(pairs)]) == 1
    printed = capsys.readouterr()
    assert says in printed.err
    assert "refused" in printed.err
    assert printed.out == ""


def refusal(built: Built, tmp_path: Path, capsys: Capture, *arguments: object) -> str:
    assert built.evaluate("--pairs", write(tmp_path / "pairs.jsonl", [BETTER]), *arguments) == 1
    return capsys.readouterr().err


def test_a_version_that_is_not_installed_is_refused_with_those_that_are(
    built: Built, tmp_path: Path, capsys: Capture
) -> None:
    said = refusal(built, tmp_path, capsys, "--version", 7)
    assert "tiny has no installed version 7" in said
    assert "installed: 1, 2" in said


def test_a_reranker_that_is_not_built_is_refused_with_the_command_that_builds_it(
    built: Built, tmp_path: Path, capsys: Capture
) -> None:
    said = refusal(replace(built, repository=tmp_path / "empty"), tmp_path, capsys)
    assert "installed: none. Build one: python -m build_engines build tiny" in said


def test_an_engine_is_refused_with_the_way_to_have_it_scored(built: Built, tmp_path: Path, capsys: Capture) -> None:
    copy = built.copy(tmp_path / "repository")
    copy.change_manifest(target="gpu")
    said = refusal(copy, tmp_path, capsys)
    assert "Version 1 of tiny is a TensorRT engine" in said
    assert "--url localhost:8001" in said


def test_a_graph_that_has_changed_is_refused(built: Built, tmp_path: Path, capsys: Capture) -> None:
    copy = built.copy(tmp_path / "repository")
    with (copy.folder("scorer") / "model.onnx").open("ab") as file:
        file.write(b"?")
    assert "model.onnx has" in refusal(copy, tmp_path, capsys)


def test_a_tokenizer_of_another_format_is_refused(built: Built, tmp_path: Path, capsys: Capture) -> None:
    copy = built.copy(tmp_path / "repository")
    path = copy.folder("tokenizer") / "pairing.json"
    pairing = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(pairing | {"format": 99}), encoding="utf-8")
    known = {"pairing.json": {"sha256": sha256_file(path), "bytes": path.stat().st_size}}
    copy.change_manifest(files=known)
    assert "pairing.json has format 99" in refusal(copy, tmp_path, capsys)


def test_a_graph_that_does_not_score_as_it_was_verified_is_refused(
    built: Built, tmp_path: Path, capsys: Capture
) -> None:
    copy = built.copy(tmp_path / "repository")
    report = copy.manifest()["report"]
    report["self_test"]["score"] += 1
    copy.change_manifest(report=report)
    assert "Version 1 of tiny cannot be served: the self-test pair scores" in refusal(copy, tmp_path, capsys)


def test_a_score_that_is_not_finite_is_refused(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nan = np.full((2, 1), np.nan, dtype=np.float32)
    monkeypatch.setattr(graph_scoring.GraphScorer, "check", lambda *_: None)
    monkeypatch.setattr(graph_scoring.GraphScorer, "score", lambda *_: [nan])
    queries = read_pairs(write(tmp_path / "pairs.jsonl", [BETTER]))
    with pytest.raises(GateError, match="a score of the query 'panda' is not finite"):
        score_installed(built.reranker, built.repository, None, queries, Console(file=io.StringIO()))


def test_evaluating_on_a_server_imports_neither_onnx_nor_its_runtime(script: ScriptedTriton, tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs.jsonl", [BETTER])
    told = ["evaluate", "served", "--pairs", str(pairs), "--url", script.url]
    code = f"""
import sys
from build_engines.__main__ import main
status = main({told})
heavy = {{"onnx", "onnxruntime", "torch", "tokenizers"}} & set(sys.modules)
sys.exit(f"status {{status}}, imported {{heavy}}" if status or heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
