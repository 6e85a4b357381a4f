# SPDX-License-Identifier: Apache-2.0
"""Refused requests leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from build_engines.triton_server import TritonServer
from tests.server.raw_requests import arrays, pairs, refusal, scores
from tests.server.served import BERT
from tests.server.texts import QUERY

# An allocator may round up; a leak of a page a request would be 2 MB.
_SLACK_BYTES = 1 << 20


def test_500_refused_requests_leave_memory_as_it_was(grpc: Any, server: TritonServer) -> None:
    _send_refused(grpc, 25)  # first uses of everything
    memory, shared = _resident_bytes(server), _shared_bytes(server)
    assert memory
    assert shared > 0
    _send_refused(grpc, 125)
    for pid, after in _resident_bytes(server).items():
        assert after <= memory[pid] * 1.05 + _SLACK_BYTES
    assert _shared_bytes(server) <= shared * 1.05 + 64 * 1024
    for _ in range(10):
        assert len(scores(grpc, BERT, pairs([QUERY], ["one", "two", "three"]))) == 3


def _send_refused(grpc: Any, rounds: int) -> None:
    """Four requests a round, each refused by another check."""
    for _ in range(rounds):
        for model, inputs in (
            (BERT, pairs([QUERY], ["fine"] * 31 + [b"\xff"])),
            (BERT, pairs([" "], ["fine"] * 32)),
            (f"{BERT}_scorer", arrays([[0] * 256] * 32, [[0] * 256] * 32, [[0] * 256] * 32)),
            (f"{BERT}_scorer", arrays([[10**9] * 256] * 32, [[1] * 256] * 32, [[0] * 256] * 32)),
        ):
            status, _ = refusal(grpc, model, inputs)
            assert status == "INVALID_ARGUMENT"


def _resident_bytes(server: TritonServer) -> dict[int, int]:
    stubs = psutil.Process(server.pid).children(recursive=True)
    return {stub.pid: stub.memory_info().rss for stub in stubs}


def _shared_bytes(server: TritonServer) -> int:
    """Pages in use, which also shows a leak that still fits into a region's first size."""
    regions = Path("/dev/shm").glob(f"{server.shared_memory_prefix}*")  # noqa: S108
    return sum(region.stat().st_blocks * 512 for region in regions)
