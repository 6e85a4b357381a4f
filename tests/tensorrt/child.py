# SPDX-License-Identifier: Apache-2.0
"""One build in a process that can import TensorRT: a request as JSON in, facts or the refusal as JSON out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from build_engines.engine import Profile, build_plan
from build_engines.errors import EngineError
from build_engines.table import EngineOptions


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run `build_plan` as requested; any error but EngineError passes through and fails the test."""
    cache = request["timing_cache"]
    try:
        facts = build_plan(
            Path(request["graph"]),
            Path(request["out"]),
            [Profile(**profile) for profile in request["profiles"]],
            EngineOptions(**request["options"]),
            Path(cache) if cache else None,
        )
    except EngineError as error:
        return {"refusal": str(error)}
    return {"facts": facts}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answer(json.loads(sys.argv[1]))) + "\n")
