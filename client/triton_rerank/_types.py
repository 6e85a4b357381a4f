# SPDX-License-Identifier: Apache-2.0
"""The values callers hand in and get back; none can be built wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ._errors import InvalidRequest

DocumentT = TypeVar("DocumentT", bound=str | Mapping[str, Any])


@dataclass(frozen=True, slots=True)
class RankedDocument(Generic[DocumentT]):
    """One document of a call, with its place in the caller's list and its score.

    Attributes:
        index: Position in the `documents` of the call.
        score: The raw logit, or its sigmoid where `normalize=True` was asked for.
        document: The caller's own object.
        tokens: Tokens of the (query, document) pair before any truncation.
        truncated: Whether the reranker read less than the whole pair; None when the server does not
            say how much it reads.
        model_version: The version that scored it.
    """

    index: int
    score: float
    document: DocumentT
    tokens: int
    truncated: bool | None
    model_version: str


@dataclass(frozen=True, slots=True)
class Tls:
    """Encrypt the connection; the files are PEM.

    | use | give |
    |---|---|
    | a server with a public certificate | nothing |
    | a server whose certificate your own authority signed | `root_certificates` |
    | mutual TLS | also `private_key` and `certificate_chain` |

    Raises:
        InvalidRequest: A file does not exist, or one half of the mutual TLS pair is missing.
    """

    root_certificates: Path | None = None
    private_key: Path | None = None
    certificate_chain: Path | None = None

    def __post_init__(self) -> None:
        for name in ("root_certificates", "private_key", "certificate_chain"):
            path: Path | None = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise InvalidRequest(f"tls: {name} must be a PEM file, and there is no file {str(path)!r}.")
        if (self.private_key is None) != (self.certificate_chain is None):
            missing = "private_key" if self.private_key is None else "certificate_chain"
            raise InvalidRequest(f"tls: mutual TLS needs private_key and certificate_chain; {missing} is missing.")


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Ping an idle connection, so that a load balancer neither drops it nor hides that it is dead.

    Attributes:
        time_s: A ping after this long without traffic. Servers refuse fast pings: keep it at 10 or more.
        timeout_s: The connection counts as dead when a ping stays unanswered this long.
        without_calls: Ping also when no call is under way.

    Raises:
        InvalidRequest: A time is not a finite number above 0.
    """

    time_s: float = 60.0
    timeout_s: float = 20.0
    without_calls: bool = False

    def __post_init__(self) -> None:
        for name in ("time_s", "timeout_s"):
            value_s: float = getattr(self, name)
            if not (math.isfinite(value_s) and value_s > 0):
                raise InvalidRequest(f"keepalive: {name} must be a finite number of seconds above 0, got {value_s!r}.")
