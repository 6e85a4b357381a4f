# SPDX-License-Identifier: Apache-2.0
"""Where things lie in a checkout of the project."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent / "model_repository"
# The serving code that every reranker shares; the other rerankers' first versions hold links to it.
TOKENIZER_CODE = REPOSITORY / "light_reranker_tokenizer" / "1"
SCORER_CODE = REPOSITORY / "light_reranker_scorer" / "1"
