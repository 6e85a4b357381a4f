# SPDX-License-Identifier: Apache-2.0
"""Which server and model, with which credentials; and how failures there are told without telling secrets."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from tritonclient.utils import InferenceServerException

from ._errors import DeadlineExceeded, InvalidRequest, RerankError, error, error_from_status
from ._retry import Deadline
from ._types import Keepalive, Tls

# What gRPC allows as a metadata key; its own keys start with `grpc-`, binary ones end in `-bin`.
_HEADER_NAME = re.compile(r"(?!grpc-)[0-9a-z_.-]+(?<!-bin)")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")
_TOKEN = re.compile(r"[\x21-\x7e]+")
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|\[::1\]")
_URL = re.compile(r"(?P<host>\[[0-9a-fA-F:.%]+\]|[^\s:/@\[\]]+):(?P<port>\d{1,5})")

# A shorter header value could be any word of a message, and blotting it out would only garble the text.
_SECRET_CHARACTERS = 6


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One model at one url.

    Attributes:
        url: `host:port` of Triton's gRPC service.
        model: Name of the served reranker.
        headers: Metadata of every request, the bearer token included.
        tls: None for plaintext.
        keepalive: None for no pings.
    """

    url: str
    model: str
    headers: Mapping[str, str] = field(repr=False)
    tls: Tls | None
    keepalive: Keepalive | None

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Read the TLS files; None for plaintext. Raises InvalidRequest when one cannot be read."""
        if self.tls is None:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.tls.root_certificates),
            private_key=_read(self.tls.private_key),
            certificate_chain=_read(self.tls.certificate_chain),
        )

    def where(self, doing: str, version: str) -> str:
        """The part of a message that says what was being done, and to whom."""
        versioned = f" version {version}" if version else ""
        return f"{doing}; url {self.url}, model {self.model!r}{versioned}"

    def failure(self, cause: InferenceServerException, where: str) -> RerankError:
        """The exception to raise for what tritonclient raised, with its `__cause__`, free of secrets."""
        text = self._redacted(cause.message() or "")
        details = str(cause.debug_details() or "")
        if text != (cause.message() or "") or details != self._redacted(details):
            cause = InferenceServerException(text, cause.status())
        failure = error_from_status(cause.status(), text, where)
        failure.__cause__ = cause
        return failure

    def _redacted(self, text: str) -> str:
        # Proxies are known to repeat a refused token in their answer.
        for value in self.headers.values():
            for secret in (value, value.removeprefix("Bearer ")):
                if len(secret) >= _SECRET_CHARACTERS:
                    text = text.replace(secret, "***")
        return text


def remaining_s(deadline: Deadline, where: str) -> float:
    """Seconds left of a call; raises DeadlineExceeded when there are none."""
    left_s = deadline.remaining_s()
    if left_s <= 0:
        raise error(DeadlineExceeded, "no time is left", where)
    return left_s


def build_endpoint(
    url: str,
    *,
    model: str,
    headers: Mapping[str, str] | None,
    bearer_token: str | None,
    tls: Tls | None,
    keepalive: Keepalive | None,
) -> Endpoint:
    """Check the parts; raises InvalidRequest, whose text never holds a header's value or the token."""
    host = _check_url(url)
    if not isinstance(model, str) or not model.strip():
        raise InvalidRequest(f"model must be the name of a served reranker, got {model!r}.")
    metadata = _check_headers(headers or {})
    if bearer_token is not None:
        if "authorization" in metadata:
            raise InvalidRequest("give either bearer_token or an authorization header, not both.")
        if not isinstance(bearer_token, str) or not _TOKEN.fullmatch(bearer_token):
            raise InvalidRequest("bearer_token must be printable ASCII without spaces or line ends; it is not.")
        metadata["authorization"] = f"Bearer {bearer_token}"
    if "authorization" in metadata and tls is None and not _LOOPBACK.fullmatch(host):
        warnings.warn(
            f"credentials for {url} travel unencrypted; pass tls=Tls() to encrypt the connection.", stacklevel=3
        )
    return Endpoint(url, model, metadata, tls, keepalive)


def _check_url(url: object) -> str:
    """The host of `host:port`."""
    match = _URL.fullmatch(url) if isinstance(url, str) else None
    if match is None:
        # What stands before an @ may be a password.
        shown = "a text with an @" if isinstance(url, str) and "@" in url else repr(url)
        raise InvalidRequest(
            f"url must be host:port of Triton's gRPC service, as in localhost:8001, got {shown}; "
            "leave out any http:// and pass tls=Tls() for an encrypted connection."
        )
    return match["host"]


def _check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(headers, Mapping):
        raise InvalidRequest(f"headers must map names to values, got a {type(headers).__name__}.")
    checked: dict[str, str] = {}
    for name, value in headers.items():
        lowered = name.lower() if isinstance(name, str) else ""
        if not _HEADER_NAME.fullmatch(lowered):
            raise InvalidRequest(
                f"headers: the name {name!r} must be letters, digits, '_', '-' or '.', "
                "must not begin with grpc- and must not end in -bin."
            )
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise InvalidRequest(f"headers: the value of {name!r} must be a string of printable ASCII; it is not.")
        checked[lowered] = value
    return checked


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as cause:
        raise InvalidRequest(f"tls: cannot read {str(path)!r}: {cause.strerror}.") from cause
