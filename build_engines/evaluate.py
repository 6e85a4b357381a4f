# SPDX-License-Identifier: Apache-2.0
"""`python -m build_engines evaluate`: a reranker's order of graded pairs beside the order that the file gives."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from build_engines.configs import MAX_TEXT_BYTES
from build_engines.errors import BuildError, PairsError
from build_engines.pairs import Candidates, read_pairs
from build_engines.quality import CONFIDENCE, RESAMPLES, bootstrap_interval, ndcg_at_10, reciprocal_rank
from build_engines.score_pairs import score_installed, score_served
from build_engines.table import find_reranker

_ABOUT = """\
Does this reranker rank your data better than the order you have now?

    python -m build_engines evaluate light_reranker --pairs LOG.jsonl
    python -m build_engines evaluate bge_reranker --pairs LOG.jsonl --url localhost:8001 --json figures.json

LOG.jsonl holds one query a line, its documents in the order of your first stage (BM25, a vector search, ...), which
is what the reranker has to beat, and a grade for each document, above 0 where it is relevant:

    {"query": "what is a panda?", "documents": ["a small Fiat", "a bear"], "relevance": [0, 1]}

Queries without a relevant document are not counted. Draw queries at random from your traffic, none that the reranker
was trained on: those that the first stage gets wrong flatter any reranker, clicks as grades flatter the order that
people saw. The verdict is better or worse where the 95 % interval of the difference in nDCG@10 leaves out 0 (paired
bootstrap over queries), else that the two cannot be told apart; the exit status is 0 whatever the verdict."""

# With fewer, even a change of one sign for every query happens by chance in 1 of 16 cases (sign test); the bootstrap's
# interval would not show it.
FEWEST_QUERIES = 6
# Beyond it nDCG's gain, 2^grade - 1, is not a number any more.
HIGHEST_GRADE = 1000

_SHARE = f"{100 * CONFIDENCE:.0f} %"
# By key in the figures: what people call it, and what computes it from scores and relevance.
_MEASURES: dict[str, tuple[str, Callable[[ArrayLike, Sequence[float]], float]]] = {
    "ndcg_at_10": ("nDCG@10", ndcg_at_10),
    "mrr_at_10": ("MRR@10", reciprocal_rank),
}


@dataclass(frozen=True, slots=True)
class Counted:
    """The queries of a file that can be judged, and how many of the others there are."""

    queries: tuple[Candidates, ...]
    without_grades: int
    without_relevant: int


def add_evaluate_arguments(command: argparse.ArgumentParser) -> None:
    """Declare what `evaluate` takes, besides the repository and the table."""
    command.description = _ABOUT
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument("name", help="a row of the table of rerankers; with --url any reranker that is served there")
    command.add_argument("--pairs", type=Path, required=True, help="JSONL of query, documents in your order, relevance")
    command.add_argument(
        "--version", type=int, help="an installed (with --url: served) version; default: the served one"
    )
    command.add_argument(
        "--url",
        metavar="HOST:PORT",
        help="gRPC address of a running server of either target that scores; default: this process does, on the CPU",
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")


def evaluate(arguments: argparse.Namespace, console: Console) -> int:
    """Print a reranker's figures beside those of the given order; raise a BuildError where there can be none."""
    target: Path | None = arguments.json
    if target is not None and (target.is_dir() or not target.parent.is_dir()):
        raise BuildError(f"--json {target}: name a file in a folder that exists.")
    counted = count(read_pairs(arguments.pairs), arguments.pairs)
    if arguments.url is not None:
        scored = score_served(arguments.name, arguments.url, arguments.version, counted.queries, console)
    else:
        reranker = find_reranker(arguments.name, arguments.table)
        scored = score_installed(reranker, arguments.repository, arguments.version, counted.queries, console)
    pairs = sum(len(query.documents) for query in counted.queries)
    facts: dict[str, Any] = {
        "reranker": arguments.name,
        "version": scored.version,
        "precision": scored.precision,
        "url": arguments.url,
        "file": str(arguments.pairs),
        "queries": len(counted.queries),
        "queries_without_relevance": counted.without_grades,
        "queries_without_relevant_documents": counted.without_relevant,
        "pairs": pairs,
        "pairs_cut": scored.cut,
        "pairs_per_second": pairs / scored.seconds,
    } | compare(counted.queries, scored.scores)
    facts["verdict"], facts["sentence"] = judge(arguments.name, facts)
    _print(facts, console)
    if target is not None:
        try:
            target.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise BuildError(f"--json {target}: {error}") from error
    return 0


def count(candidates: Sequence[Candidates], path: Path) -> Counted:
    """Keep the queries with a relevant document; raise PairsError where none is left or one cannot be evaluated."""
    graded = [query for query in candidates if query.relevance is not None]
    queries = tuple(query for query in graded if any(query.relevance or ()))
    if not queries:
        raise PairsError(
            f"{path} has no query with a relevant document ({len(candidates) - len(graded)} queries without relevance, "
            f'{len(graded)} where every grade is 0). Give each document a grade: "relevance": [0, 1, ...].'
        )
    _check_texts(queries)
    highest = max(max(query.relevance or ()) for query in queries)
    if highest > HIGHEST_GRADE:
        raise PairsError(
            f"{path} has a grade of {highest:g}; nDCG gives a document 2^grade - 1 points, so at most {HIGHEST_GRADE} "
            "is allowed. Use a few grades, such as 0 to 3."
        )
    return Counted(queries, len(candidates) - len(graded), len(graded) - len(queries))


def _check_texts(queries: Sequence[Candidates]) -> None:
    # Found out before the first pair is scored, not hours later.
    for query in queries:
        longest = max(len(text.encode()) for text in (query.query, *query.documents))
        if longest > MAX_TEXT_BYTES:
            raise PairsError(
                f"A text of query {query.query[:60]!r} has {longest} bytes; at most {MAX_TEXT_BYTES} are allowed. "
                "Only the first max_length tokens count, so keep the beginning of the text."
            )


def compare(queries: Sequence[Candidates], scores: Sequence[NDArray[np.float64]]) -> dict[str, Any]:
    """Return each measure of the given order and of the scores, the mean difference and its interval."""
    facts: dict[str, Any] = {"confidence": CONFIDENCE, "resamples": RESAMPLES}
    for key, (_, measure) in _MEASURES.items():
        given = np.array([measure(-np.arange(len(q.documents)), q.relevance or ()) for q in queries])
        reranked = np.array([measure(s, q.relevance or ()) for s, q in zip(scores, queries, strict=True)])
        difference = reranked - given
        facts[key] = {
            "given": float(given.mean()),
            "reranked": float(reranked.mean()),
            "difference": float(difference.mean()),
            "interval": list(bootstrap_interval(difference)),
            "improved": int((difference > 0).sum()),
            "worse": int((difference < 0).sum()),
            "equal": int((difference == 0).sum()),
        }
    return facts


def judge(name: str, facts: dict[str, Any]) -> tuple[str, str]:
    """Return "better", "worse" or "undecided", and one sentence that says so."""
    ndcg, queries = facts["ndcg_at_10"], facts["queries"]
    low, high = ndcg["interval"]
    found = f"nDCG@10 {ndcg['difference']:+.4f}, {_SHARE} interval {low:+.4f} to {high:+.4f}"
    if queries < FEWEST_QUERIES or low <= 0 <= high:
        few = f"; fewer than {FEWEST_QUERIES} queries tell nothing" if queries < FEWEST_QUERIES else ""
        return (
            "undecided",
            f"{name} cannot be told apart from the given order on these {queries} queries ({found}{few}).",
        )
    verdict = "better" if low > 0 else "worse"
    return verdict, f"{name} ranks {verdict} than the given order on these {queries} queries ({found})."


def _print(facts: dict[str, Any], console: Console) -> None:
    how = f"at {facts['url']}" if facts["url"] is not None else f"{facts['precision'].upper()}, scored here"
    left_out = {
        "without relevance": facts["queries_without_relevance"],
        "without a relevant document": facts["queries_without_relevant_documents"],
    }
    not_counted = ", ".join(f"{number} {why}" for why, number in left_out.items() if number)
    cut = "how many are cut is not known" if facts["pairs_cut"] is None else f"{facts['pairs_cut']} cut"
    lines = [
        f"{facts['reranker']} version {facts['version']} ({how}) on {facts['file']}",
        f"queries   {facts['queries']}" + (f" (not counted: {not_counted})" if not_counted else ""),
        f"pairs     {facts['pairs']} ({cut}), {facts['pairs_per_second']:.1f} a second",
    ]
    console.print("\n".join(lines), markup=False)
    table = Table("measure", box=box.SIMPLE_HEAD)
    for title in ("given order", "reranked", "difference", f"{_SHARE} interval"):
        table.add_column(title, justify="right")
    for key, (title, _) in _MEASURES.items():
        f = facts[key]
        low, high = f["interval"]
        table.add_row(
            title,
            f"{f['given']:.4f}",
            f"{f['reranked']:.4f}",
            f"{f['difference']:+.4f}",
            f"{low:+.4f} to {high:+.4f}",
        )
    console.print(table)
    ndcg = facts["ndcg_at_10"]
    console.print(
        f"nDCG@10 is higher for {ndcg['improved']} queries, lower for {ndcg['worse']}, equal for {ndcg['equal']}."
    )
    console.print(facts["sentence"], markup=False, style="bold")
    if ndcg["given"] == 1.0:
        console.print("The given order is perfect, so nothing can rank better: is it your first stage's own order?")
