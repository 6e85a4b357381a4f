# SPDX-License-Identifier: Apache-2.0
"""Credentials reach the server and nobody else; TLS on a real socket."""

from __future__ import annotations

import shutil
import subprocess
import traceback
import warnings
from pathlib import Path

import grpc
import pytest
from triton_rerank import AuthenticationError, InvalidRequest, Keepalive, RerankClient, ServerUnavailable, Tls

from tests.unit.scripted_triton import ScriptedTriton, connect, serve

SECRET = "s3cret-token-of-mine"


async def test_headers_and_bearer_token_arrive_as_metadata(kind: str, script: ScriptedTriton) -> None:
    headers = {"X-Tenant": "blue", "x.empty": ""}
    async with connect(kind, script.url, headers=headers, bearer_token=SECRET) as client:
        await client.rerank("q", ["a"] * 9)
    for request in script.received:
        assert request.metadata["x-tenant"] == "blue"
        assert request.metadata["x.empty"] == ""
        assert request.metadata["authorization"] == f"Bearer {SECRET}"


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED])
async def test_secrets_show_neither_in_repr_nor_in_errors(
    kind: str, script: ScriptedTriton, status: grpc.StatusCode
) -> None:
    script.fault_for = lambda pairs: (status, f"token {SECRET} and key another-secret are not known here")
    async with connect(kind, script.url, bearer_token=SECRET, headers={"x-api-key": "another-secret"}) as client:
        with pytest.raises(AuthenticationError) as caught:
            await client.rerank("q", ["a"])
        shown = f"{client!r} {caught.value!r} {''.join(traceback.format_exception(caught.value))}"
    assert "token *** and key *** are not known here" in shown
    assert SECRET not in shown
    assert "another-secret" not in shown


@pytest.mark.parametrize("token", ["line\nend-secret", "späce-secret", "two words-secret"])
def test_a_refused_token_is_not_repeated(token: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RerankClient("localhost:8001", model="m", bearer_token=token)
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidRequest) as caught:
        RerankClient("localhost:8001", model="m", headers={"x-key": "bad\nsecret"})
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidRequest) as caught:
        RerankClient("https://me:secret@host:8001", model="m")
    assert "secret" not in str(caught.value)


def test_plaintext_credentials_to_another_machine_are_warned_about() -> None:
    with pytest.warns(UserWarning, match="unencrypted") as caught:
        RerankClient("triton.example.com:8001", model="m", bearer_token=SECRET)
    assert caught[0].filename == __file__
    assert SECRET not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RerankClient("localhost:8001", model="m", bearer_token=SECRET)
        RerankClient("[::1]:8001", model="m", bearer_token=SECRET)
        RerankClient("triton.example.com:8001", model="m", bearer_token=SECRET, tls=Tls())
        RerankClient("triton.example.com:8001", model="m", headers={"x-tenant": "blue"})


async def test_keepalive_settings_are_accepted_by_the_channel(kind: str, script: ScriptedTriton) -> None:
    keepalive = Keepalive(time_s=20, timeout_s=5, without_calls=True)
    async with connect(kind, script.url, keepalive=keepalive) as client:
        assert len(await client.rerank("q", ["a"])) == 1


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ca.pem, a server certificate for localhost and a client certificate, and their keys."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command, which makes the certificates, is not installed")
    folder = tmp_path_factory.mktemp("certificates")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    run("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority")
    for name in ("server", "client"):
        run("req", "-new", *key[:-2], "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        run("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)
    return folder


def server_credentials(authority: Path, *, mutual: bool) -> grpc.ServerCredentials:
    pair = ((authority / "server.key").read_bytes(), (authority / "server.pem").read_bytes())
    roots = (authority / "ca.pem").read_bytes() if mutual else None
    return grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=mutual)


async def test_tls_with_our_own_authority(kind: str, authority: Path) -> None:
    script = ScriptedTriton()
    with serve(script, credentials=server_credentials(authority, mutual=False)):
        tls = Tls(root_certificates=authority / "ca.pem")
        async with connect(kind, script.url, tls=tls, bearer_token=SECRET) as client:
            assert len(await client.rerank("q", ["a", "b"])) == 2
        async with connect(kind, script.url, tls=Tls(), max_retries=0, timeout_s=5) as stranger:
            with pytest.raises(ServerUnavailable):
                await stranger.rerank("q", ["a"])
    assert script.received[0].metadata["authorization"] == f"Bearer {SECRET}"


async def test_mutual_tls(kind: str, authority: Path) -> None:
    script = ScriptedTriton()
    with serve(script, credentials=server_credentials(authority, mutual=True)):
        known = Tls(authority / "ca.pem", authority / "client.key", authority / "client.pem")
        async with connect(kind, script.url, tls=known) as client:
            assert len(await client.rerank("q", ["a", "b"])) == 2
        async with connect(kind, script.url, tls=Tls(authority / "ca.pem"), max_retries=0, timeout_s=5) as stranger:
            with pytest.raises(ServerUnavailable):
                await stranger.rerank("q", ["a"])


def test_tls_files_must_exist_and_come_in_pairs(tmp_path: Path) -> None:
    pem = tmp_path / "a.pem"
    pem.write_text("")
    with pytest.raises(InvalidRequest, match="root_certificates must be a PEM file, and there is no file"):
        Tls(root_certificates=tmp_path / "missing.pem")
    with pytest.raises(InvalidRequest, match="certificate_chain is missing"):
        Tls(private_key=pem)
    with pytest.raises(InvalidRequest, match="private_key is missing"):
        Tls(certificate_chain=pem)
