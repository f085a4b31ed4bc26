"""Kinds of plots shared by all papers: accuracy against cost, points by setting, curves, heat maps, forest plots."""

import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Optional

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from bitcycle.picture.layout import legend, panels
from bitcycle.reproduction.analysis.cells import Cell, numbers_of_seeds
from bitcycle.reproduction.analysis.claims import margin_bounds
from bitcycle.reproduction.analysis.facts import Selector, fact, select
from bitcycle.reproduction.analysis.items import Published
from bitcycle.reproduction.analysis.labels import backward_bits, forward_bits, split_of
from bitcycle.reproduction.analysis.metrics import estimate_of
from bitcycle.reproduction.analysis.statistics import Estimate
from bitcycle.reproduction.analysis.verdict import ClaimResult
from bitcycle.reproduction.figure.data import (
    ItemData,
    Panel,
    by_length,
    comparable,
    cost_against,
    differences,
    metric_name,
    panels_of,
    timed_panels,
)
from bitcycle.reproduction.figure.schematic import suite_legend, suite_style
from bitcycle.reproduction.figure.style import ORDERED, Drawing, Style, style_of

StyleOf = Callable[[Cell], Style]
Point = tuple[Any, float, Optional[tuple[float, float]]]
"""Position, value, and the bounds of its interval."""
INTERVALS = "bars: 95 % intervals over seeds, below three seeds with the deviation pooled over all settings"
"""Of differences."""
OF_MEANS = "bars: 95 % intervals over seeds; hollow points have fewer than three seeds and no interval"
LEAST_EVALUATIONS = 5
"""Minimum number of points of a curve."""


def label_axes(axes: Axes, title: str, x: str = "", y: str = "", columns: int = 44, pad: float = 6.0) -> None:
    """Set the title of a panel, wrapped at a number of columns and `pad` points above it, and the labels of its axes."""
    axes.set_title("\n".join(textwrap.wrap(title, columns)), fontsize=8.5, pad=pad)
    axes.set(xlabel=x, ylabel=y)


def point(x: Any, value: Estimate) -> Point:
    """The point of an estimate, with its 95 % interval."""
    return x, value.mean, value.interval()


def draw_points(axes: Axes, style: Style, points: Iterable[Point], hollow: bool = False) -> None:
    """Draw points with their intervals; points without an interval are hollow, or all."""
    for x, mean, ends in points:
        axes.errorbar(
            *([x], [mean], None if ends is None else [[max(0.0, mean - ends[0])], [max(0.0, ends[1] - mean)]]),
            fmt=style.marker,
            markersize=7 if style.marker == "*" else style.size,
            color=style.colour,
            markerfacecolor="white" if ends is None or hollow else style.colour,
            markeredgecolor=style.edge or style.colour,
            elinewidth=1,
            capsize=2,
            label=style.label,
        )


# Cost against accuracy


def styles(data: ItemData, name: str) -> StyleOf:
    """The style of a cell by a fact: that of a method, or a shade and marker for a number; `suite` stands for the encoding
    of Better Schedules."""
    if name == "suite":
        return suite_style
    numbers = sorted({value for cell in data.results.done if isinstance(value := fact(cell, name), float)})

    def style(cell: Cell) -> Style:
        value = fact(cell, name)
        if not isinstance(value, float):
            return style_of(str(value))
        place = numbers.index(value)
        colour = to_hex(colormaps[ORDERED](place / max(1, len(numbers) - 1)))
        return Style(f"{name} = {value:g}", colour, "os^Dv"[place % 5])

    return style


def tradeoff(
    data: ItemData, style: str, split: str = "", cost: str = "", published_base: Mapping[str, str] | None = None
) -> Drawing | None:
    """Differences to static precision, paired by seed, against cost; one panel per network and data (and value of the fact
    `split`).

    With `cost`, accuracies read from the paper's picture are drawn in another panel against this published metric;
    `published_base` selects the rows of the paper's baseline.
    """
    shown, read = comparable(data, split, same_length=True), bool(cost and data.digitized)
    if not shown and not read:
        return None
    figure, axes = panels(len(shown) + read)
    counts = [
        count for panel, part in zip(shown, axes) for count in draw_tradeoff(part, panel, styles(data, style), data)
    ]
    if read:
        draw_published(axes[-1], data.digitized, cost, published_base or {})
    if style == "suite":
        suite_legend(figure)
    else:
        legend(figure, axes)
    names = " or ".join(dict.fromkeys(baseline_name(panel.first(data.spec.base)) for panel in shown))
    ours = f"Ours: differences to {names} of equal seeds; {INTERVALS}; {numbers_of_seeds(counts)}."
    ours += " Points of nearly equal cost stand side by side."
    theirs = "Published: read from the paper's picture, one run each, against the paper's own baseline."
    return Drawing(figure, " ".join([ours] * bool(shown) + [theirs] * read))


def baseline_name(base: Cell | None) -> str:
    """Static precision in words, with the bits of gradients if they are others than those of weights and activations."""
    assert base is not None  # panels without a baseline are left out
    forward, gradient = forward_bits(base), backward_bits(base)
    return f"static {forward} bits" if gradient == forward else f"static {forward}/{gradient} bits"


def draw_tradeoff(axes: Axes, panel: Panel, style: StyleOf, data: ItemData) -> list[int]:
    """Draw one panel of `tradeoff`; returns the number of seeds of each difference."""
    first = panel.first(data.spec.base)
    name = baseline_name(first)
    found = differences(panel, first, data.spec.column)
    costs = {index: cost for index in found if (cost := cost_against(panel.cells[index], first)) is not None}
    axes.axhline(0, color="0.5", linewidth=0.8)
    for index, place in side_by_side({**costs, -1: 1.0}).items():
        if index < 0:
            axes.plot([place], [0], "s", color="0.35", markersize=5.5, label=name)
        else:
            draw_points(axes, style(panel.cells[index]), [point(place, found[index])])
    metric = metric_name(panel.cells, data.spec.column)
    label_axes(axes, panel.title, f"bit operations relative to {name}", f"{metric}, difference")
    return [found[index].n for index in costs]


def side_by_side(places: Mapping[int, float], share: float = 0.018) -> dict[int, float]:
    """Move points apart that are closer than a fraction of the range: they are spread around their mean.

    >>> side_by_side({0: 0.0, 1: 0.0, 2: 1.0}, 0.1)
    {0: -0.05, 1: 0.05, 2: 1.0}
    """
    least = share * (max(places.values()) - min(places.values()))
    groups: list[list[tuple[float, int]]] = []
    for place, key in sorted((place, key) for key, place in places.items()):
        groups.append([(place, key)])
        while len(groups) > 1:
            before, last = groups[-2:]
            if _middle(last) - _middle(before) >= least * (len(last) + len(before)) / 2:
                break
            before.extend(groups.pop())
    return {
        key: _middle(group) + least * (number - (len(group) - 1) / 2)
        for group in groups
        for number, (_, key) in enumerate(group)
    }


def _middle(group: Sequence[tuple[float, int]]) -> float:
    return statistics.fmean(place for place, _ in group)


def draw_published(axes: Axes, rows: Sequence[Published], cost: str, base: Mapping[str, str]) -> None:
    """Draw values read from the paper's picture, as differences to its costliest baseline on each network and data."""
    pairs: dict[tuple[str, ...], tuple[Published, dict[str, float]]] = {}
    for row in rows:
        key = tuple(row[word] for word in ("model", "dataset", "method", "fw_bits", "bw_bits", "setting"))
        pairs.setdefault(key, (row, {}))[1][row["metric"]] = float(row["value"])
    whole = [(row, values) for row, values in pairs.values() if {cost, "test_accuracy"} <= values.keys()]
    bases: dict[tuple[str, str], dict[str, float]] = {}
    for row, values in whole:
        where = (row["model"], row["dataset"])
        if base.items() <= row.items() and values[cost] > bases.get(where, {}).get(cost, 0):
            bases[where] = values
    axes.axhline(0, color="0.5", linewidth=0.8)
    for row, values in whole:
        if (first := bases.get((row["model"], row["dataset"]))) and first is not values:
            style = style_of(row["method"])._replace(label=f"{row['method']}, published")
            place, gain = values[cost] / first[cost], values["test_accuracy"] - first["test_accuracy"]
            draw_points(axes, style, [(place, gain, None)])
    words = f"published: {len(bases)} networks and datasets, each against its own baseline"
    label_axes(axes, words, "cost relative to the paper's baseline", "test accuracy (%), difference")


# Points for each setting


def points_by_setting(
    data: ItemData,
    place: str,
    style: str,
    x: str = "",
    differences_to_base: bool = True,
    log: bool = False,
    note: str = "",
    time: bool = False,
) -> Drawing | None:
    """Results of our cells, or their differences to a baseline paired by seed, against the fact `place`: a number, a category, or
    None to omit a cell. Lines connect differences of the same style; `note` is appended to the caption. `time`: the place is a
    time, which is compared among runs of one processor only, and only of machines that they had to themselves if there are such.
    """
    base, column = data.spec.base if differences_to_base else None, data.spec.column
    shown, omitted = comparable(data) if base else panels_of(data), ""
    if time:
        shown, omitted = timed_panels(shown)
    if not shown:
        return None
    figure, axes = panels(len(shown))
    counts = []
    for panel, part in zip(shown, axes):
        series: dict[Style, list[Point]] = {}
        for alike in by_length(panel) if base else [panel]:
            first = alike.first(base)
            for index, gap in differences(alike, first, column).items() if first or not base else ():
                if (where := fact(alike.cells[index], place)) is not None:
                    series.setdefault(styles(data, style)(alike.cells[index]), []).append(point(where, gap))
                    counts.append(gap.n)
        draw_series(part, series, differences_to_base, log)
        metric = metric_name(panel.cells, column)
        if base is not None:
            part.axhline(0, color="0.5", linewidth=0.8)
            metric += ", difference to static"
        label_axes(part, panel.title, x, metric)
    legend(figure, axes)
    words = f"Differences to static precision of equal seeds; {INTERVALS}" if base else f"Means over seeds; {OF_MEANS}"
    return Drawing(figure, f"{words}; {numbers_of_seeds(counts)}.{note}{omitted}")


def draw_series(axes: Axes, series: Mapping[Style, Sequence[Point]], line: bool = False, log: bool = False) -> None:
    """Draw series of points; within a category, the series are side by side."""
    every = list(dict.fromkeys(x for points in series.values() for x, *_ in points))
    words = [x for x in every if isinstance(x, str)]
    for number, (style, points) in enumerate(series.items()):
        shift = 0.5 * ((number + 0.5) / len(series) - 0.5) if words else 0.0
        placed = sorted((words.index(x) + shift if words else x, y, ends) for x, y, ends in points)
        draw_points(axes, style, placed)
        if line:
            axes.plot([x for x, *_ in placed], [y for _, y, _ in placed], color=style.colour, linewidth=1, alpha=0.6)
    if words:
        axes.set_xticks(range(len(words)), [textwrap.fill(word.replace("_", " "), 12) for word in words], fontsize=7.5)
        axes.set_xlim(-0.5, len(words) - 0.5)
    if log:
        log_axis(axes, every)


def log_axis(axes: Axes, places: Iterable[float]) -> None:
    """Make the x-axis logarithmic, with labels at the positions of points."""
    axes.set_xscale("log")
    ticks = fitting_ticks(sorted(set(places)))
    axes.set_xticks(ticks, [f"{x:.2g}" if x < 1 else f"{x:.3g}" if x < 1000 else f"{x / 1000:.3g}k" for x in ticks])
    axes.minorticks_off()


def fitting_ticks(places: Sequence[float]) -> list[float]:
    """Those of the ascending positions whose labels do not overlap on a logarithmic axis.

    >>> fitting_ticks([1, 2, 2.1, 4, 100])
    [1, 2, 4, 100]
    """
    kept: list[float] = []
    least = (places[-1] / places[0]) ** 0.14 if places and places[0] > 0 else 1.0
    for here in places:
        if not kept or here >= kept[-1] * least:
            kept.append(here)
    return kept


# Curves


def curves(data: ItemData, style: str, x: str = "step", keep: Selector | None = None) -> Drawing | None:
    """Evaluations over steps or GBitOps, mean and standard deviation over seeds; None if no cell has enough for a curve."""
    every = [(panel, select(panel.cells, keep or {})) for panel in panels_of(data)]
    shown = [(panel, drawn) for panel, cells in every if (drawn := [cell for cell in cells if evaluations(cell)])]
    if not shown:
        return None
    figure, axes = panels(len(shown))
    for (panel, cells), part in zip(shown, axes):
        for cell in cells:
            draw_curve(part, cell, styles(data, style)(cell), x)
        counts = sorted({len(evaluations(cell)) for cell in cells})
        seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        words = "optimizer step" if x == "step" else "accumulated GBitOps"
        label_axes(part, f"{panel.title}, n\u00a0=\u00a0{seeds}", words, metric_name(cells))
    legend(figure, axes)
    return Drawing(figure, "Means over seeds; band: one standard deviation.")


def evaluations(cell: Cell) -> list[dict[str, list[Any]]]:
    """The evaluations of a cell's runs, without runs that have too few for a curve."""
    found = [run.curve["evaluations"] for run in cell.runs if run.curve]
    return [curve for curve in found if len(curve["step"]) >= LEAST_EVALUATIONS]


def draw_curve(axes: Axes, cell: Cell, style: Style, x: str) -> None:
    """Draw the mean curve of a cell, against the mean cost if its precision depends on the seed, with a band of one standard
    deviation."""
    found = evaluations(cell)
    length = min(len(curve["step"]) for curve in found)
    values, places = (np.array([curve[name][:length] for curve in found]) for name in ("value", x))
    means, places = values.mean(0), places.mean(0)
    axes.plot(places, means, color=style.colour, linewidth=1.4, label=style.label)
    if len(found) > 1:
        spread = values.std(0, ddof=1)
        axes.fill_between(places, means - spread, means + spread, color=style.colour, alpha=0.18, linewidth=0)


# Heat maps


def draw_heat_map(axes: Axes, values: pd.Series, label: str, difference: bool = False) -> None:
    """Draw a heat map of values with an index (row, column); colours of differences are centred at 0."""
    grid = values.unstack()
    largest = float(values.abs().max())
    ends = {"vmin": -largest, "vmax": largest, "cmap": "RdBu"} if difference else {"cmap": ORDERED}
    shown = axes.imshow(grid, origin="lower", aspect="auto", interpolation="nearest", **ends)
    axes.grid(False)
    turned = 90 if len(grid.columns) > 9 else 0
    axes.set_xticks(range(len(grid.columns)), [f"{value:g}" for value in grid.columns], fontsize=7, rotation=turned)
    axes.set_yticks(range(len(grid.index)), [f"{value:g}" for value in grid.index], fontsize=7)
    axes.figure.colorbar(shown, ax=axes, label=label)


def splits(data: ItemData) -> Drawing | None:
    """The final metric by budget and its split between two phases, and the difference to the even split of the same budget."""
    shown = panels_of(data)[:1]
    if not shown:
        return None
    found = [(fact(cell, "steps"), split_of(cell), estimate_of(cell, "final")) for cell in shown[0].cells]
    rows = [(total, round(split * total), number.mean) for total, split, number in found if number is not None]
    values = pd.DataFrame(rows, columns=["total", "full", "value"]).groupby(["total", "full"])["value"].last()
    even = values[[2 * full == total for total, full in values.index]].droplevel("full")
    gains = values.sub(even, level="total").dropna()
    figure, axes = panels(2, columns=2, width=5.2, height=3.8)
    draw_heat_map(axes[0], values, metric_name(shown[0].cells))
    draw_heat_map(axes[1], gains, "difference to the even split", difference=True)
    words = "iterations in full precision", "iterations in all"
    label_axes(axes[0], shown[0].name, *words)
    label_axes(axes[1], f"{shown[0].name}: budgets with an even split", *words)
    caption = (
        f"Each square is the mean of its trainings ({data.results.trials}); the leftmost column is 1 bit throughout."
    )
    return Drawing(figure, caption)


# Claims

RATIO = "x"
"""Unit of effects that are ratios."""
VERDICT_COLOURS = {"supported": "#0072b2", "supported in part": "#56b4e9", "contradicted": "#d55e00"}


LOWER_IS_BETTER = {"perplexity", "points of CER", "loss"}
"""Units of effects whose positive values are losses."""


def forest(rows: Sequence[ClaimResult]) -> Drawing | None:
    """Confidence intervals of claims and their published effects, one panel per unit; None if there are no claims."""
    if not rows:
        return None
    units = {unit: [row for row in rows if row.unit == unit] for unit in dict.fromkeys(row.unit for row in rows)}
    figure, axes = panels(len(units), columns=1, width=8.5, height=1.0)
    heights = [0.24 * len(found) + 0.75 for found in units.values()]
    figure.set_size_inches(8.5, sum(heights) + 0.5)
    place: Any = axes[0].get_subplotspec()
    place.get_gridspec().set_height_ratios(heights)
    for (unit, found), part in zip(units.items(), axes):
        part.axvline(1 if unit == RATIO else 0, color="0.5", linewidth=0.8)  # no effect
        _forest_panel(part, found)
        better = " (lower is better)" if unit in LOWER_IS_BETTER else ""
        part.set_xlabel("ratio" if unit == RATIO else f"{unit or 'effect'}{better}")
    legend(figure, axes)
    return Drawing(
        figure,
        "Filled: decided, hollow: leaning; lines: 95 % confidence intervals, not corrected for the number of claims; grey"
        " strokes: the margin that a claim allows, within which an interval supports it; diamonds: the published effect, in"
        " another setting.",
    )


def _forest_panel(axes: Axes, rows: Sequence[ClaimResult]) -> None:
    for place, row in enumerate(rows):
        found = row.verdict if row.decided else row.leaning
        colour = VERDICT_COLOURS.get(found, "0.45")
        middle = float(row.estimate or 0.0)
        ends = [middle if end is None else end for end in (row.low, row.high)]
        for end, _ in margin_bounds(row.predicate, row.margin) if row.margin else ():
            axes.plot([end], [place], "|", color="0.45", markersize=11, label="margin")
        axes.plot(ends, [place] * 2, color=colour, linewidth=1.4)
        whose = "ours, proxy" if row.scope.startswith("proxy") else "ours"
        words, filling = (f"{whose}: {found}", colour) if row.decided else (f"{whose}: leaning, {found}", "white")
        axes.plot([middle], [place], "o", label=words, color=colour, markerfacecolor=filling, markersize=5)
        if row.published_value is not None and row.published_inside is not None:  # of one arm, as the estimate
            axes.plot([row.published_value], [place], "D", color="black", markerfacecolor="none", label="published")
    axes.set_yticks(range(len(rows)), [row.claim_id for row in rows], fontsize=7.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
