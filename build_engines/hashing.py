# SPDX-License-Identifier: Apache-2.0
"""Hashes of files and of values, for manifests and for skipping what is already built."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_value(value: Any) -> str:
    """Return the sha256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
