# SPDX-License-Identifier: Apache-2.0
"""Two real tritonservers for the whole session, with every reranker that the tests ask: encoders, and decoders."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import tritonclient.grpc as triton

from build_engines.triton_server import ServerError, ServerOptions, TritonInstallation, TritonServer, find_tritonserver
from tests.server.served import ALL, Served, build_all
from tests.server.served_decoders import DECODERS, build_decoders


@pytest.fixture(scope="session")
def installation() -> TritonInstallation:
    try:
        return find_tritonserver()
    except ServerError as error:
        if os.environ.get("TRITON_RERANK_REQUIRE_TRITON") == "1":
            pytest.fail(f"TRITON_RERANK_REQUIRE_TRITON=1, but {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def served(installation: TritonInstallation, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return build_all(tmp_path_factory.mktemp("server-tests") / "models")


@pytest.fixture(scope="session")
def server(served: Served, installation: TritonInstallation) -> Iterator[TritonServer]:
    options = ServerOptions(repository=served.repository, models=ALL, config_name="cpu")
    with TritonServer(options, installation) as server:
        yield server


@pytest.fixture(scope="session")
def grpc(server: TritonServer) -> Iterator[triton.InferenceServerClient]:
    """A client that sends whatever it is given, unlike the SDK."""
    with triton.InferenceServerClient(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="session")
def served_decoders(installation: TritonInstallation, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return build_decoders(tmp_path_factory.mktemp("server-tests") / "decoders")


@pytest.fixture(scope="session")
def decoder_server(served_decoders: Served, installation: TritonInstallation) -> Iterator[TritonServer]:
    options = ServerOptions(repository=served_decoders.repository, models=DECODERS, config_name="cpu")
    with TritonServer(options, installation) as server:
        yield server


@pytest.fixture(scope="session")
def decoder_grpc(decoder_server: TritonServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(decoder_server.grpc_url) as client:
        yield client
