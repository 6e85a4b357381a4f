# SPDX-License-Identifier: Apache-2.0
"""A second version beside the one that serves: it changes nothing until it is pinned and loaded."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from triton_rerank import ModelNotFound, RerankClient, ServerUnavailable
from tritonclient.utils import InferenceServerException

from build_engines.install import installed_versions, pin
from build_engines.triton_server import ServerOptions, TritonInstallation, TritonServer
from tests.server.references import CrossEncoder
from tests.server.served import XLM_R, Served, build_second_version, copy_of
from tests.server.texts import QUERY

DOCUMENT = "a bear that eats bamboo"
OLD, NEW, GAP = "version 1", "version 2", "between versions"


@pytest.fixture
def copy(served: Served, tmp_path: Path) -> Served:
    return copy_of(served, XLM_R, tmp_path / "models")


@contextlib.contextmanager
def serving(copy: Served, installation: TritonInstallation) -> Iterator[TritonServer]:
    with TritonServer(
        ServerOptions(repository=copy.repository, models=(XLM_R,), config_name="cpu"), installation
    ) as server:
        yield server


class Traffic:
    """A caller that never pauses, and what it was answered."""

    def __init__(self, url: str, scores: dict[str, float]) -> None:
        self._url = url
        self._scores = scores
        self._answers: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def answers(self) -> list[str]:
        """What was answered since the last call, at least a few answers to requests that began after this one."""
        self._wait_for(5)
        answers, self._answers = self._answers, []
        return answers

    def _wait_for(self, more: int) -> None:
        wanted, deadline = len(self._answers) + more, time.monotonic() + 20
        while len(self._answers) < wanted:
            assert time.monotonic() < deadline, "the traffic has stopped"
            time.sleep(0.01)

    def _run(self) -> None:
        with RerankClient(self._url, model=XLM_R) as client:
            while not self._stop.is_set():
                self._answers.append(self._ask(client))
                time.sleep(0.005)

    def _ask(self, client: RerankClient) -> str:
        try:
            (hit,) = client.rerank(QUERY, [DOCUMENT])
        except (ServerUnavailable, ModelNotFound):
            return GAP
        if abs(hit.score - self._scores.get(f"version {hit.model_version}", float("inf"))) < 1e-4:
            return f"version {hit.model_version}"
        return f"a score that is not of the version named, {hit}"


def test_version_1_answers_until_version_2_is_pinned_and_loaded(copy: Served, installation: TritonInstallation) -> None:
    with serving(copy, installation) as server, triton.InferenceServerClient(server.grpc_url) as control:
        second, checkpoint = build_second_version(copy)
        assert installed_versions(copy.repository, second) == [1, 2]
        checkpoints = {OLD: copy.checkpoints[XLM_R], NEW: checkpoint}
        scores = {
            version: CrossEncoder(folder, second.max_length).score(QUERY, DOCUMENT)
            for version, folder in checkpoints.items()
        }
        assert abs(scores[OLD] - scores[NEW]) > 1e-2
        with Traffic(server.grpc_url, scores) as traffic:
            assert set(traffic.answers()) == {OLD}
            # A folder that an interrupted installation left, and a load that has nothing to do.
            shutil.copytree(copy.repository / second.scorer / "2", copy.repository / second.scorer / ".installing-3-1")
            for model in (second.tokenizer, second.scorer, XLM_R):
                control.load_model(model)
            assert set(traffic.answers()) == {OLD}
            pin(copy.repository, second, 2)
            assert set(traffic.answers()) == {OLD}
            control.load_model(XLM_R)
            # Triton swaps the steps one after the other, with moments in which the ensemble has none.
            assert set(traffic.answers()) <= {OLD, NEW, GAP}
            assert set(traffic.answers()) == {NEW}
            pin(copy.repository, second, 1)
            control.load_model(XLM_R)
            assert set(traffic.answers()) <= {OLD, NEW, GAP}
            assert set(traffic.answers()) == {OLD}


def test_a_broken_version_beside_the_pinned_one_stops_neither_a_start_nor_a_load(
    copy: Served, installation: TritonInstallation
) -> None:
    reranker = copy.rows[XLM_R]
    for model in (reranker.tokenizer, reranker.scorer):
        broken = copy.repository / model / "2"
        shutil.copytree(copy.repository / model / "1", broken)
        (broken / "model.py").write_text('raise RuntimeError("this version is broken")\n', encoding="utf-8")
    (copy.repository / reranker.scorer / "3").mkdir()  # a version of which nothing is there yet
    with (
        serving(copy, installation) as server,
        RerankClient(server.grpc_url, model=XLM_R) as client,
        triton.InferenceServerClient(server.grpc_url) as control,
    ):
        assert client.is_ready()
        before = client.score([(QUERY, DOCUMENT)])
        assert control.is_server_ready()
        control.load_model(XLM_R)
        assert client.score([(QUERY, DOCUMENT)]) == pytest.approx(before, abs=1e-4)


def test_a_broken_version_that_is_pinned_is_refused_and_pinning_the_old_one_repairs_it(
    copy: Served, installation: TritonInstallation
) -> None:
    second, _ = build_second_version(copy)
    (copy.repository / second.scorer / "2" / "model.py").write_text("raise RuntimeError()\n", encoding="utf-8")
    with (
        serving(copy, installation) as server,
        RerankClient(server.grpc_url, model=XLM_R) as client,
        triton.InferenceServerClient(server.grpc_url) as control,
    ):
        before = client.score([(QUERY, DOCUMENT)])
        pin(copy.repository, second, 2)
        with pytest.raises(InferenceServerException, match=f"'{second.scorer}' whose required version 2 is not loaded"):
            control.load_model(XLM_R)
        pin(copy.repository, second, 1)
        control.load_model(XLM_R)
        assert client.is_ready()
        assert client.score([(QUERY, DOCUMENT)]) == pytest.approx(before, abs=1e-4)
