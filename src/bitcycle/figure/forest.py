"""The forest plot: the intervals of decided and leaning claims, ours beside what is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bitcycle.analysis.verdict import ClaimResult
from bitcycle.figure.drawn import Drawn
from bitcycle.figure.page import Picture
from bitcycle.figure.style import Drawing, legend, panels


def draw_forest(claims: Sequence[ClaimResult], path: Path, drawn: Drawn) -> Picture | None:
    """The intervals of decided and leaning claims."""
    rows = [row for row in claims if row.estimate is not None and (row.decided or row.leaning)]
    caption = "Filled: decided, hollow: leaning; lines: confidence intervals; diamonds: the published effect, in another setting."

    def draw() -> Drawing | None:
        return Drawing(forest([vars(row) for row in rows]), caption) if rows else None

    return drawn.picture("claims", [vars(row) for row in rows], path, draw)


RATIO = "x"
"""The unit of effects that are ratios."""


def forest(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The intervals of claims, ours beside what is published, one panel for each unit.

    Args:
        rows: claims with an estimate: claim_id, unit, scope, verdict, decided, estimate, low, high, published_value.
    """
    units: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        units.setdefault(str(row["unit"]), []).append(row)
    figure, axes = panels(len(units), columns=1, width=8.5, height=1.0)
    heights = [0.24 * len(found) + 0.75 for found in units.values()]
    figure.set_size_inches(8.5, sum(heights) + 0.5)
    place: Any = axes[0].get_subplotspec()
    place.get_gridspec().set_height_ratios(heights)
    for (unit, found), part in zip(units.items(), axes):
        part.axvline(1 if unit == RATIO else 0, color="0.5", linewidth=0.8)  # no effect
        _forest_panel(part, found)
        part.set_xlabel("ratio" if unit == RATIO else unit or "effect")
    legend(figure, axes)
    return figure


VERDICT_LOOKS = {"supported": "#0072b2", "contradicted": "#d55e00", "undecided": "0.45"}


def _forest_panel(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for place, row in enumerate(rows):
        colour = VERDICT_LOOKS.get(row["leaning"] or row["verdict"], "0.45")
        words = f"ours: {row['verdict']}" if row["decided"] else f"ours: leaning, {row['leaning'] or row['verdict']}"
        middle = row["estimate"]
        low, high = (middle if row[end] is None else row[end] for end in ("low", "high"))
        axes.plot([low, high], [place] * 2, color=colour, linewidth=1.4)
        face = colour if row["decided"] else "white"
        axes.plot([middle], [place], "o", color=colour, markerfacecolor=face, markersize=5, label=words)
        if row.get("published_value") is not None:
            axes.plot([row["published_value"]], [place], "D", color="black", markerfacecolor="none", label="published")
    axes.set_yticks(range(len(rows)), [row["claim_id"] for row in rows], fontsize=7.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
