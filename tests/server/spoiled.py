# SPDX-License-Identifier: Apache-2.0
"""Repositories that were changed after the build, and what a server says that is to load them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from build_engines.triton_server import ServerError, ServerOptions, TritonInstallation, TritonServer
from tests.server.served import BERT, Served, copy_of


@dataclass(frozen=True, slots=True)
class Fault:
    """Something done to a built repository, and what the server's error must say."""

    spoil: Callable[[Path], None]
    said: str
    reranker: str = BERT
    loaded: str = BERT  # a fault that several models notice is shown on one of them


def start_all(
    faults: Mapping[str, Fault], served: Served, installation: TritonInstallation, folders: pytest.TempPathFactory
) -> dict[str, str]:
    """What each start says, several at a time: a server that fails to start spends most of its time waiting."""

    def start(fault: Fault) -> str:
        copy = copy_of(served, fault.reranker, folders.mktemp("spoiled") / "models")
        fault.spoil(copy.repository)
        options = ServerOptions(repository=copy.repository, models=(fault.loaded,), config_name="cpu")
        try:
            with TritonServer(options, installation):
                return "it started"
        except ServerError as error:
            return str(error)

    with ThreadPoolExecutor(4) as threads:
        return dict(zip(faults, threads.map(start, faults.values()), strict=True))


def assert_refused(answer: str, fault: Fault) -> None:
    """The server did not start, and named the model and the cause."""
    causes, log, _ = answer.partition("--- end of ")
    assert log, causes
    assert re.search(fault.said, causes), causes
    assert f"'{fault.reranker}_" in causes
