# SPDX-License-Identifier: Apache-2.0
"""The console command, run as `main(argv)` against a real socket."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from triton_rerank import __version__
from triton_rerank._table import shortened
from triton_rerank.cli import main

from tests.unit.scripted_triton import ScriptedTriton, score_of, serve

TOKEN = "s3cret-token-of-mine"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedTriton]:
    monkeypatch.delenv("TRITON_RERANK_TOKEN", raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    script = ScriptedTriton(model="light_reranker")
    with serve(script):
        yield script


Capture = pytest.CaptureFixture[str]


def test_rank_prints_an_aligned_table(script: ScriptedTriton, capsys: Capture) -> None:
    long = "a document\n\x1b[31m" + "with many words " * 50
    status = main(["rank", "q", "logit:-3.5", "logit:12", long, "熊猫" * 50, "--url", script.url])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert lines[0].split() == ["rank", "score", "index", "document"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3", "4"]
    documents = {line[: lines[0].index("document")].split()[2]: line[lines[0].index("document") :] for line in lines}
    assert (documents["0"], documents["1"]) == ("logit:-3.5", "logit:12")
    assert next(line for line in lines if line.endswith("logit:12")).split()[1] == "12.0000"
    assert all(len(line) <= 60 for line in lines)
    assert "\x1b" not in "".join(lines)
    assert sum(line.endswith("…") for line in lines) == 2


def test_rank_prints_json(script: ScriptedTriton, capsys: Capture) -> None:
    arguments = ["rank", "q", "logit:1", "--json", "--normalize", "--top-n", "2", "logit:0", "logit:-1"]
    assert main([*arguments, "--url", script.url]) == 0
    ranking = json.loads(capsys.readouterr().out)
    assert (ranking["model"], ranking["model_version"]) == ("light_reranker", "1")
    assert [hit["index"] for hit in ranking["results"]] == [0, 1]
    assert ranking["results"][1] == {
        "rank": 2, "index": 1, "score": 0.5, "tokens": 6, "truncated": False, "document": "logit:0",
    }  # fmt: skip


def test_documents_come_from_a_file_or_from_standard_input(
    script: ScriptedTriton, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a é", "", "c 熊"]
    (tmp_path / "documents.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO("\r\n".join(texts)))
    for name in (str(tmp_path / "documents.txt"), "-"):
        assert main(["rank", "q", "--file", name, "--json", "--url", script.url]) == 0
        results = json.loads(capsys.readouterr().out)["results"]
        assert {hit["index"]: hit["score"] for hit in results} == {i: score_of("q", t) for i, t in enumerate(texts)}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rank", "q"], "there are no documents"),
        (["rank", " ", "d"], "query is blank"),
        (["rank", "q", "d", "--top-n", "0"], "top_n must be"),
        (["rank", "q", "d", "--timeout-s", "nan"], "timeout_s must be"),
        (["rank", "q", "d", "--model", "nobody"], "unknown model: 'nobody'"),
        (["rank", "q", "d", "--model-version", "8"], "version 8 is not found"),
        (["rank", "q", "--file", "/nowhere/d.txt"], "/nowhere/d.txt"),
        (["rank", "q", "d", "--tls-ca", "/nowhere/ca.pem"], "/nowhere/ca.pem"),
        (["rank", "q", "d", "--tls-key", __file__], "certificate_chain is missing"),
        (["batch", "/nowhere/in.jsonl", "/nowhere/out.jsonl"], "/nowhere/in.jsonl"),
    ],
)
def test_what_cannot_run_is_told_in_one_line(
    script: ScriptedTriton, capsys: Capture, arguments: list[str], says: str
) -> None:
    assert main([*arguments, "--url", script.url]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("triton-rerank: ")
    assert says in output.err


def test_a_server_that_is_down_is_told_in_one_line(capsys: Capture) -> None:
    script = ScriptedTriton()
    with serve(script):
        pass
    assert main(["rank", "q", "d", "--url", script.url]) == 2
    assert capsys.readouterr().err.startswith("triton-rerank: ServerUnavailable: ")


@pytest.mark.parametrize("arguments", [[], ["rank"], ["rank", "q", "d", "--top", "1"], ["batch", "a", "b", "c"]])
def test_usage_errors_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2


def test_a_malformed_header_is_not_repeated(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["rank", "q", "d", "--header", TOKEN])
    assert TOKEN not in capsys.readouterr().err


def test_token_and_headers_are_sent_and_never_shown(
    script: ScriptedTriton, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_RERANK_TOKEN", TOKEN)
    script.infer_faults.append((grpc.StatusCode.UNAUTHENTICATED, f"bad token {TOKEN}"))
    arguments = ["rank", "q", "d", "--url", script.url, "--header", "x-a=1=2", "--header", "x-b="]
    assert main(arguments) == 2
    assert main(arguments) == 0
    for request in script.received:
        assert request.metadata["authorization"] == f"Bearer {TOKEN}"
        assert (request.metadata["x-a"], request.metadata["x-b"]) == ("1=2", "")
    output = capsys.readouterr()
    assert TOKEN not in output.out + output.err


def test_help_and_version(capsys: Capture) -> None:
    for arguments, says in [
        (["--help"], 'triton-rerank rank "what is a panda?"'),
        (["rank", "--help"], "--file documents.txt"),
        (["batch", "--help"], "Exit status: 0 all rows scored"),
        (["--version"], __version__),
    ]:
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 0
        assert says in capsys.readouterr().out


def test_batch_exit_status_says_whether_all_rows_were_scored(
    script: ScriptedTriton, capsys: Capture, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    arguments = ["batch", str(source), str(target), "--url", script.url]
    good = json.dumps({"query": "q", "documents": ["logit:1", "logit:2"]})
    source.write_text(f"{good}\n{good}\n")
    assert main([*arguments, "--top-n", "1"]) == 0
    assert capsys.readouterr().err == f"2 rows, 0 failed; see {target}\n"
    assert json.loads(target.read_text().splitlines()[1])["results"] == [{"index": 1, "score": 2.0, "tokens": 6}]
    source.write_text(f"{good}\n{good}\nbad\n")
    assert main(arguments) == 1
    assert capsys.readouterr().err == f"3 rows (resumed after 2), 1 failed; see {target}\n"
    assert main(arguments) == 1
    source.write_text(f"{good}\n")
    assert main(arguments) == 2
    assert main([*arguments, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("short", 20, "short"),
        ("exactly ten", 11, "exactly ten"),
        ("exactly ten", 10, "exactly t…"),
        ("two\nlines\tand a \x1b[0m", 30, "two lines and a [0m"),
        ("熊猫熊猫", 8, "熊猫熊猫"),
        ("熊猫熊猫", 7, "熊猫熊…"),
        ("e\u0301" * 5, 5, "e\u0301" * 5),
        ("", 5, ""),
    ],
)
def test_documents_are_shortened_by_terminal_cells(text: str, columns: int, shown: str) -> None:
    assert shortened(text, columns) == shown
