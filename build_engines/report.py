# SPDX-License-Identifier: Apache-2.0
"""What a gpu build found about its precisions: `report.json` for programs, `report.md` for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLUMNS = {
    "ndcg_at_10": "nDCG@10",
    "kendall_tau": "Kendall tau",
    "top1_agreement": "same top 1",
    "mean_shift": "mean shift",
    "max_shift": "largest shift",
    "layout_effect": "layout effect",
    "not_finite": "not finite",
}


def write_reports(name: str, facts: Mapping[str, Any], out: Path) -> None:
    """Write both forms into the folder `out`."""
    (out / "report.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
    (out / "report.md").write_text(as_markdown(name, facts), encoding="utf-8")


def as_markdown(name: str, facts: Mapping[str, Any]) -> str:
    """Return the report as Markdown: a row for each precision tried, then the layers that stayed."""
    lines = [
        f"# {name}: {facts['precision'].upper()} ships",
        "",
        f"{facts['reason']}.",
        "",
        f"{facts['queries']} queries, {facts['pairs']} pairs, each beside FP32 on the same pairs. Shifts are in "
        "units of the score; the layout effect is the largest change of a score by its batch, its order or its "
        "padding.",
        "",
        f"| precision | {' | '.join(_COLUMNS.values())} | outside its gates |",
        "|---" * (len(_COLUMNS) + 2) + "|",
        _row("fp32", {"ndcg_at_10": facts["fp32_ndcg_at_10"]}, ""),
    ]
    for candidate in facts["candidates"]:
        failed = [gate["name"] for gate in candidate["gates"] if not gate["passed"]]
        title = f"**{candidate['name']}** (ships)" if candidate["ships"] else candidate["name"]
        lines.append(_row(title, candidate, ", ".join(failed) or "no"))
    if facts["sensitivity"]:
        stayed = set(facts["high_precision_layers"])
        lines += [
            "",
            "Mean change of a score when this layer alone is INT8; layers in bold stayed in base precision.",
            "",
        ]
        lines += ["| layer | change |", "|---|---|"]
        lines += [
            f"| {f'**{layer}**' if layer in stayed else layer} | {change:.4g} |"
            for layer, change in facts["sensitivity"].items()
        ]
    return "\n".join(lines) + "\n"


def _row(title: str, figures: Mapping[str, Any], failed: str) -> str:
    cells = ["" if figures.get(key) is None else f"{figures[key]:.4g}" for key in _COLUMNS]
    return f"| {title} | {' | '.join(cells)} | {failed} |"
