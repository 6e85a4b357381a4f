# SPDX-License-Identifier: Apache-2.0
"""Rerankers served by Triton Inference Server, from Python.

    from triton_rerank import RerankClient

    with RerankClient("localhost:8001", model="bge_reranker") as client:
        for hit in client.rerank("what is a panda?", documents, top_n=3):
            print(hit.index, hit.score, hit.document)

`AsyncRerankClient` has the same methods, awaited. Every error is a `RerankError`.
"""

from __future__ import annotations

from ._client import AsyncRerankClient, RerankClient
from ._errors import (
    AuthenticationError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RerankError,
    ServerError,
    ServerUnavailable,
)
from ._types import Keepalive, RankedDocument, Tls
from ._version import __version__

__all__ = [
    "AsyncRerankClient",
    "AuthenticationError",
    "DeadlineExceeded",
    "InvalidRequest",
    "Keepalive",
    "ModelNotFound",
    "Overloaded",
    "RankedDocument",
    "RerankClient",
    "RerankError",
    "ServerError",
    "ServerUnavailable",
    "Tls",
    "__version__",
]
