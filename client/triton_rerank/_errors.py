# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, as one tree.

RerankError                 catch this to catch everything below
├─ InvalidRequest           the caller must change the call (also a ValueError)
├─ ModelNotFound            no such model or version on this server
├─ AuthenticationError      the server, or a proxy before it, refused the credentials
├─ ServerUnavailable        refused, gone or not ready: retried, then raised
│  └─ Overloaded            the model's queue is full: retried, then raised
├─ DeadlineExceeded         the call's `timeout_s` has passed (also a TimeoutError)
└─ ServerError              the server failed, or its answer breaks the contract

Where the server or the connection failed, `__cause__` is what tritonclient raised.
"""

# ruff: noqa: N818  the names say what happened, and the tree above shows that all are errors
from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from grpc import StatusCode


class RerankError(Exception):
    """Root of every error this package raises on purpose."""

    advice: ClassVar[str] = ""


class InvalidRequest(RerankError, ValueError):
    """The call cannot be carried out as it stands; sending it again changes nothing."""

    advice = "Change the request as the text says; sending it again as it is cannot help."


class ModelNotFound(RerankError):
    """The server does not know the model, or not this version of it."""

    advice = "Check `model` and `model_version` against the models the server lists in its start-up log."


class AuthenticationError(RerankError):
    """The credentials are missing, wrong, or not good enough."""

    advice = "Check `bearer_token`, `headers` and `tls`."


class ServerUnavailable(RerankError):
    """Nobody answers at the url, the connection broke, or the model is not ready."""

    advice = (
        "Check that tritonserver is up, that the model is ready (`client.is_ready()`), "
        "and that the url names the gRPC port (usually 8001; 8000 is HTTP)."
    )


class Overloaded(ServerUnavailable):
    """The server works but its queue is full."""

    advice = "Send less at once (`max_concurrent_requests`), or add model instances."


class DeadlineExceeded(RerankError, TimeoutError):
    """The whole call, with its splits and retries, did not finish within `timeout_s`."""

    advice = "Raise `timeout_s`, send fewer documents, or look for a queue on the server."


class ServerError(RerankError):
    """The server failed, or what it answered is not what a reranker answers."""

    advice = "Look in the server's log; check that `model` is the reranker itself, not one of its parts."


BY_STATUS: Mapping[StatusCode, type[RerankError]] = MappingProxyType(
    {
        # An answer of "no error" that was raised all the same breaks the protocol.
        StatusCode.OK: ServerError,
        StatusCode.CANCELLED: ServerUnavailable,
        StatusCode.UNKNOWN: ServerError,
        StatusCode.INVALID_ARGUMENT: InvalidRequest,
        StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        StatusCode.NOT_FOUND: ModelNotFound,
        StatusCode.ALREADY_EXISTS: ServerError,
        StatusCode.PERMISSION_DENIED: AuthenticationError,
        StatusCode.RESOURCE_EXHAUSTED: Overloaded,
        StatusCode.FAILED_PRECONDITION: ServerError,
        StatusCode.ABORTED: ServerError,
        StatusCode.OUT_OF_RANGE: ServerError,
        StatusCode.UNIMPLEMENTED: ServerError,
        StatusCode.INTERNAL: ServerError,
        StatusCode.UNAVAILABLE: ServerUnavailable,
        StatusCode.DATA_LOSS: ServerError,
        StatusCode.UNAUTHENTICATED: AuthenticationError,
    }
)

# Triton has no status of its own for a full queue: it says UNAVAILABLE, and only the text tells.
_OVERLOAD_TEXTS = ("Exceeds maximum queue size", "Request timeout expired")


def error_from_status(status: str | None, text: str, where: str) -> RerankError:
    """Build the exception for a gRPC status.

    Args:
        status: As tritonclient spells it, `StatusCode.UNAVAILABLE`; None for its own, local errors.
        text: What the server or the gRPC library said.
        where: What was being done, and on which url and model.
    """
    code = StatusCode.__members__.get((status or "").removeprefix("StatusCode."))
    kind = ServerError if code is None else BY_STATUS[code]
    if kind is ServerUnavailable and any(overload in text for overload in _OVERLOAD_TEXTS):
        kind = Overloaded
    return error(kind, text.strip() or str(status), where)


def error(kind: type[RerankError], text: str, where: str) -> RerankError:
    """Put one message together: what happened, where, and what to do about it."""
    return kind(f"{text.rstrip('.')} ({where}). {kind.advice}")
