# SPDX-License-Identifier: Apache-2.0
"""`python -m build_engines readme`: the README's table of rerankers, from the table that the build reads."""

from __future__ import annotations

from pathlib import Path

from build_engines.errors import TableError
from build_engines.table import Reranker

README = Path(__file__).resolve().parent.parent / "README.md"
_BEGIN, _END = "<!-- rerankers:", "<!-- /rerankers -->"


def with_rerankers(readme: str, table: dict[str, Reranker]) -> str:
    """Return the text with its table of rerankers made anew; raise TableError where its markers are missing."""
    head, begin, rest = readme.partition(_BEGIN)
    note, _, old = rest.partition("\n")
    _, end, tail = old.partition(_END)
    if not begin or not end:
        raise TableError(f"The README has no {_BEGIN} ... {_END} markers; put them around the table of rerankers.")
    rows = ["| reranker | checkpoint | longest pair | pairs a request |", "|---|---|---|---|"]
    rows += [f"| `{r.name}` | {r.about} | {r.max_length} tokens | {r.max_batch_size} |" for r in table.values()]
    return "\n".join([f"{head}{begin}{note}", *rows, f"{end}{tail}"])
