"""The forest plot: the intervals of decided and leaning claims, ours beside what is published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bitcycle.analysis.verdict import ClaimResult
from bitcycle.figure.drawn import Drawn
from bitcycle.figure.page import Picture
from bitcycle.figure.style import Drawing, legend, panels

RATIO = "x"
"""The unit of effects that are ratios."""
VERDICT_LOOKS = {"supported": "#0072b2", "contradicted": "#d55e00", "undecided": "0.45"}
CAPTION = (
    "Filled: decided, hollow: leaning; lines: confidence intervals; diamonds: the published effect, in another setting."
)


def draw_forest(claims: Sequence[ClaimResult], path: Path, drawn: Drawn) -> Picture | None:
    """The intervals of decided and leaning claims."""
    rows = [row for row in claims if row.estimate is not None and (row.decided or row.leaning)]
    inputs = [vars(row) for row in rows]
    return drawn.picture("claims", inputs, path, lambda: Drawing(forest(rows), CAPTION) if rows else None)


def forest(rows: Sequence[ClaimResult]) -> Figure:
    """The intervals of claims with an estimate, ours beside what is published, one panel for each unit."""
    units: dict[str, list[ClaimResult]] = {}
    for row in rows:
        units.setdefault(row.unit, []).append(row)
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


def _forest_panel(axes: Axes, rows: Sequence[ClaimResult]) -> None:
    for place, row in enumerate(rows):
        found = row.leaning or row.verdict
        colour = VERDICT_LOOKS.get(found, "0.45")
        middle = float(row.estimate or 0.0)
        ends = [middle if end is None else end for end in (row.low, row.high)]
        axes.plot(ends, [place] * 2, color=colour, linewidth=1.4)
        look: dict[str, Any] = {"color": colour, "markerfacecolor": colour if row.decided else "white", "markersize": 5}
        words = f"ours: {row.verdict}" if row.decided else f"ours: leaning, {found}"
        axes.plot([middle], [place], "o", label=words, **look)
        if row.published_value is not None:
            axes.plot([row.published_value], [place], "D", color="black", markerfacecolor="none", label="published")
    axes.set_yticks(range(len(rows)), [row.claim_id for row in rows], fontsize=7.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
