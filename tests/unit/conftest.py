# SPDX-License-Identifier: Apache-2.0
"""What the unit tests share: tiny models, built once a session, and a server that does as it is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import build_engines.finish
from tests.unit.decoder_graphs import DecoderGraphs
from tests.unit.scripted_triton import ScriptedTriton, serve
from tests.unit.tiny_models import TinyModels


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> DecoderGraphs:
    return DecoderGraphs(tmp_path_factory.mktemp("decoders"))


@pytest.fixture(scope="module")
def no_gpu() -> Iterator[None]:
    """What finishes a gpu build sees no GPU, whatever the machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_engines.finish, "find_gpu", lambda: None)
        yield


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which of the two clients, for `connect`."""
    return str(request.param)


@pytest.fixture
def script() -> Iterator[ScriptedTriton]:
    script = ScriptedTriton()
    with serve(script):
        yield script
