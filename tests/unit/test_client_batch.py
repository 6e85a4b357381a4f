# SPDX-License-Identifier: Apache-2.0
"""The batch job: order, bounded memory, resuming, bad rows, a server that goes away."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from triton_rerank import AsyncRerankClient, InvalidRequest, ModelNotFound, ServerUnavailable
from triton_rerank._batch import BatchJob, Summary, run_batch
from triton_rerank._progress import Progress

from tests.unit.scripted_triton import NOT_READY, ScriptedTriton, score_of, serve, tokens_of


@pytest.fixture
def script() -> Iterator[ScriptedTriton]:
    script = ScriptedTriton(max_batch_size=64)
    with serve(script):
        yield script


def some_rows(count: int) -> list[dict[str, Any]]:
    return [
        {"query": f"query {row}", "documents": [f"document {row} {n}" for n in range(row % 4 + 1)], "id": f"id-{row}"}
        for row in range(count)
    ]


def expected(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = []
    for line, row in enumerate(rows, 1):
        scores = [score_of(row["query"], document) for document in row["documents"]]
        order = sorted(range(len(scores)), key=lambda index, scores=scores: (-scores[index], index))  # type: ignore[misc]
        results = [
            {"index": i, "score": scores[i], "tokens": tokens_of(row["query"], row["documents"][i])} for i in order
        ]
        lines.append({"line": line, "id": row["id"], "model_version": "1", "results": results})
    return lines


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(script: ScriptedTriton, source: Path, target: Path, *, max_retries: int = 0, **settings: Any) -> Summary:
    async def job() -> Summary:
        async with AsyncRerankClient(script.url, model="m", max_retries=max_retries) as client:
            return await run_batch(client, BatchJob(source, target, **settings), io.StringIO())

    return asyncio.run(job())


def test_every_row_is_answered_in_order_with_a_bounded_number_in_flight(script: ScriptedTriton, tmp_path: Path) -> None:
    rows = some_rows(200)
    script.delay_s = 0.005
    source = write(tmp_path / "in.jsonl", rows)
    assert run(script, source, tmp_path / "out.jsonl", concurrency=3) == Summary(200, 0, 0)
    assert read(tmp_path / "out.jsonl") == expected(rows)
    assert script.most_in_flight == 3


def test_memory_is_bounded_by_a_window_of_rows(script: ScriptedTriton, tmp_path: Path) -> None:
    started: list[int] = []

    class Watching(AsyncRerankClient):
        async def rerank(self, query: str, *arguments: Any, **settings: Any) -> Any:
            written = len((tmp_path / "out.jsonl").read_bytes().splitlines())
            started.append(int(query.split()[1]) - written)
            await asyncio.sleep(0.05 if query == "query 0" else 0)  # everything else waits behind the first
            return await super().rerank(query, *arguments, **settings)

    async def job() -> None:
        async with Watching(script.url, model="m") as client:
            source = write(tmp_path / "in.jsonl", some_rows(300))
            await run_batch(client, BatchJob(source, tmp_path / "out.jsonl", concurrency=4), io.StringIO())

    asyncio.run(job())
    assert max(started) <= 4 * 4
    assert len(read(tmp_path / "out.jsonl")) == 300


def test_a_job_cut_off_at_any_byte_resumes_to_the_same_output(script: ScriptedTriton, tmp_path: Path) -> None:
    rows = some_rows(5)
    source = write(tmp_path / "in.jsonl", rows)
    target = tmp_path / "out.jsonl"
    run(script, source, target)
    whole = target.read_bytes()
    for length in {*range(0, len(whole), 13), 1, *(len(whole) - back for back in range(3))}:
        target.write_bytes(whole[:length])
        script.received.clear()
        summary = run(script, source, target)
        assert target.read_bytes() == whole
        assert summary == Summary(5, 0, whole[:length].count(b"\n"))
        assert len(script.received) == 5 - summary.resumed_after


BAD_ROWS = [
    ("not json", "not JSON"),
    ("", "not JSON"),
    ('{"query": "q", "documents": ["a"]', "not JSON"),
    ('{"query": "q", "documents": ["a"], "id": NaN}', "NaN is not a JSON number"),
    ("[" * 100_000, "nested too deeply"),
    ("[1, 2]", "must be an object"),
    ({"documents": ["a"]}, "has no query"),
    ({"query": "q"}, "has no documents"),
    ({"query": "q", "documents": "a"}, "documents must be a list"),
    ({"query": 3, "documents": ["a"]}, "query must be a string"),
    ({"query": " ", "documents": ["a"]}, "query is blank"),
    ({"query": "q", "documents": ["a", None]}, "documents[1]"),
    ({"query": "q", "documents": ["\ud800"]}, "surrogate"),
    ({"query": "q", "documents": ["a"], "id": {"a": 1}}, "id must be"),
    ({"query": "q", "documents": ["a"], "id": True}, "id must be"),
    ('{"query": "q", "documents": ["a"], "id": 1e999}', "id must be"),
]


def test_bad_rows_are_recorded_and_the_others_go_on(script: ScriptedTriton, tmp_path: Path) -> None:
    good = some_rows(1)[0]
    rows = [row for bad, _ in BAD_ROWS for row in (good, bad)] + [{"query": "q", "documents": []}]
    source = write(tmp_path / "in.jsonl", rows)
    with source.open("ab") as stream:
        stream.write(b'\xff\xfe\n{"query": "q", "documents": [{"text": "last, without a line end"}], "id": 7}')
    assert run(script, source, tmp_path / "out.jsonl").failed == len(BAD_ROWS) + 1
    lines = read(tmp_path / "out.jsonl")
    assert [line["line"] for line in lines] == list(range(1, 2 * len(BAD_ROWS) + 4))
    for (_, says), line in zip(BAD_ROWS, lines[1::2], strict=False):
        assert line["error"]["type"] == "InvalidRequest"
        assert says in line["error"]["message"]
    assert all(line["results"] for line in lines[: 2 * len(BAD_ROWS) : 2])
    assert lines[-3] == {"line": len(lines) - 2, "model_version": None, "results": []}
    assert lines[-1]["id"] == 7
    assert run(script, source, tmp_path / "out.jsonl") == Summary(len(lines), len(BAD_ROWS) + 1, len(lines))


def test_what_the_server_rejects_is_recorded_with_its_id(script: ScriptedTriton, tmp_path: Path) -> None:
    rows = some_rows(30)

    def refuse(pairs: list[tuple[str, str]]) -> Any:
        return (grpc.StatusCode.INVALID_ARGUMENT, "not this one") if pairs[0][0] == "query 7" else None

    script.fault_for = refuse
    source = write(tmp_path / "in.jsonl", rows)
    assert run(script, source, tmp_path / "out.jsonl") == Summary(30, 1, 0)
    wanted = expected(rows)
    lines = read(tmp_path / "out.jsonl")
    assert lines[:7] + lines[8:] == wanted[:7] + wanted[8:]
    assert (lines[7]["id"], lines[7]["error"]["type"]) == ("id-7", "InvalidRequest")


def unavailable_from(row: int, until: int = 10**9) -> Callable[[list[tuple[str, str]]], Any]:
    return lambda pairs: NOT_READY if row <= int(pairs[0][0].split()[1]) < until else None


def test_a_server_that_stays_away_stops_the_job_which_then_resumes(script: ScriptedTriton, tmp_path: Path) -> None:
    rows = some_rows(100)
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    script.fault_for = unavailable_from(50)
    with pytest.raises(ServerUnavailable, match="Run the same command again to resume"):
        run(script, source, target)
    assert read(target) == expected(rows)[:50]
    assert len(script.received) < 50 + 20 + 4 * 8 + 1
    script.fault_for = lambda pairs: None
    assert run(script, source, target) == Summary(100, 0, 50)
    assert read(target) == expected(rows)


def test_a_short_outage_is_recorded_when_the_server_comes_back(script: ScriptedTriton, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", some_rows(60)), tmp_path / "out.jsonl"
    script.fault_for = unavailable_from(20, 30)
    assert run(script, source, target) == Summary(60, 10, 0)
    assert [line["line"] - 1 for line in read(target) if "error" in line] == list(range(20, 30))


def test_an_outage_at_the_very_end_is_not_written_off(script: ScriptedTriton, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", some_rows(10)), tmp_path / "out.jsonl"
    script.fault_for = unavailable_from(7)
    with pytest.raises(ServerUnavailable):
        run(script, source, target)
    assert len(read(target)) == 7


def test_an_unknown_model_stops_the_job_before_it_writes_anything(script: ScriptedTriton, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", some_rows(10)), tmp_path / "out.jsonl"
    with pytest.raises(ModelNotFound):
        run(script, source, target, model_version="9")
    assert target.read_bytes() == b""


def test_files_that_do_not_belong_together_are_refused_and_left_alone(script: ScriptedTriton, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", some_rows(5)), tmp_path / "out.jsonl"
    run(script, source, target)
    whole = target.read_bytes()
    for content, says in [
        (b"my diary\n", "not the output of this job"),
        (b"my diary", "not the output of this job"),
        (b'{"line": 7}\n', "not the output of this job"),
        (b"[]\n", "not the output of this job"),
        (whole.replace(b"id-4", b"id-9"), "the output belongs to another input"),
        (whole + b'{"line": 6}\n', "the output belongs to another input"),
    ]:
        target.write_bytes(content)
        with pytest.raises(InvalidRequest, match=says):
            run(script, source, target)
        assert target.read_bytes() == content
    assert run(script, source, target, overwrite=True) == Summary(5, 0, 0)
    assert target.read_bytes() == whole
    with pytest.raises(InvalidRequest, match="would overwrite the input"):
        run(script, source, source)
    with pytest.raises(FileNotFoundError):
        run(script, tmp_path / "missing.jsonl", target)


def test_two_jobs_cannot_write_one_output(script: ScriptedTriton, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", some_rows(5)), tmp_path / "out.jsonl"
    with target.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InvalidRequest, match="another job is writing"):
            run(script, source, target)


@pytest.mark.parametrize("settings", [{"concurrency": 0}, {"stop_after": 0}, {"top_n": 0}, {"model_version": "x"}])
def test_a_job_cannot_be_built_wrong(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        BatchJob(tmp_path / "in", tmp_path / "out", **settings)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_a_file_that_resumes(script: ScriptedTriton, tmp_path: Path, sent: signal.Signals) -> None:
    rows = some_rows(300)
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    script.delay_s = 0.05
    program = "import sys; from triton_rerank.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "batch", str(source), str(target), "--url", script.url, "--model", "m"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        end_s = time.monotonic() + 20
        while not (target.exists() and target.stat().st_size) and time.monotonic() < end_s:
            time.sleep(0.01)
        os.kill(process.pid, sent)
        stderr = process.communicate(timeout=20)[1]
    assert process.returncode == (130 if sent is signal.SIGINT else -sent)
    if sent is signal.SIGINT:
        assert stderr.splitlines()[-1] == "triton-rerank: interrupted; run the same command again to resume"
        assert "Traceback" not in stderr
    script.delay_s = 0
    summary = run(script, source, target)
    assert 0 < summary.resumed_after < 300
    assert read(target) == expected(rows)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_every_ten_seconds_in_a_log() -> None:
    stream, now = io.StringIO(), [0.0]
    progress = Progress(stream, 1000, 0, lambda: now[0])
    for row in range(1, 26):
        now[0] += 1
        progress.advance(row * 10, failed=row == 3)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "10%: 10 rows, 1.0 rows/s, 1 failed, 0:01:30 left",
        "20%: 20 rows, 1.0 rows/s, 1 failed, 0:01:20 left",
    ]


def test_progress_is_a_bar_on_a_terminal() -> None:
    stream, now = Terminal(), [0.0]
    progress = Progress(stream, 100, 50, lambda: now[0])
    for row in range(1, 6):
        now[0] += 1
        progress.advance(50 + row * 10, failed=False)
    progress.close()
    shown = stream.getvalue()
    assert shown.endswith("\n")
    assert "\r[##############----------]  60% 1 rows, 1.0 rows/s, 0 failed, 0:00:04 left" in shown
    assert "\r[########################] 100% 5 rows" in shown
