# SPDX-License-Identifier: Apache-2.0
"""The files that Triton runs, loaded into the build: what is verified here is the very code that serves."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from build_engines.places import SCORER_CODE, TOKENIZER_CODE


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"Cannot load {path}; run from a checkout of the project.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    import graph_scoring
    import pair_encoding
    import text_ids
else:
    text_ids = _load(TOKENIZER_CODE / "text_ids.py")  # first: pair_encoding imports it
    pair_encoding = _load(TOKENIZER_CODE / "pair_encoding.py")
    graph_scoring = _load(SCORER_CODE / "graph_scoring.py")

__all__ = ["graph_scoring", "pair_encoding", "text_ids"]
