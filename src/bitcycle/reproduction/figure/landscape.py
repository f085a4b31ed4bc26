"""Plots of loss landscapes and other analyses: contours as in Li et al., planes through three networks in 3-D."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from bitcycle.picture.layout import legend, panels
from bitcycle.precision import FLOAT
from bitcycle.reproduction.analysis.cells import Cell, Results, numbers_of_seeds
from bitcycle.reproduction.analysis.labels import forward_bits, highest_bits, phase_bits, phase_method
from bitcycle.reproduction.analysis.metrics import results_of, rise
from bitcycle.reproduction.analysis.statistics import over_seeds
from bitcycle.reproduction.figure.data import ItemData, panels_of
from bitcycle.reproduction.figure.plots import Point, draw_series, label_axes, point, styles
from bitcycle.reproduction.figure.style import ORDERED, Drawing, Style
from bitcycle.reproduction.measurement.artifacts import Result

CONTOURS = np.arange(0.1, 10, 0.5)
"""Contour levels in CPT, figure 6, and the default in Li et al.'s code."""
MARKS = ("s", "^", "o")


def grid_of(result: Result, column: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The grid of a surface or plane: x [P], y [P], and a column [P, P] with one row per y."""
    rows = [row for row in result.rows if not row.get("network")]
    x, y = (np.array(sorted({float(row[axis]) for row in rows})) for axis in ("x", "y"))
    return x, y, np.array([float(row[column]) for row in rows]).reshape(len(y), len(x))


def draw_contours(axes: Axes, surface: Result) -> None:
    """Draw the contours of a loss surface, with a cross and the loss at the network."""
    x, y, loss = grid_of(surface, "loss")
    finite = np.nan_to_num(loss, nan=1e9, posinf=1e9)
    levels = CONTOURS[(finite.min() < CONTOURS) & (finite.max() > CONTOURS)]
    if len(levels):
        style = {"cmap": ORDERED, "vmin": CONTOURS[0], "vmax": CONTOURS[-1], "linewidths": 1.1}
        axes.contour(x, y, finite, levels=levels, **style)
    middle = float(loss[len(y) // 2, len(x) // 2])
    axes.plot([0], [0], "+", color="black", markersize=7)
    axes.annotate(f"{middle:.2f}", (0, 0), (5, 5), textcoords="offset points", fontsize=7)
    axes.set_box_aspect(1)
    axes.grid(False)
    axes.set_xticks(np.linspace(x[0], x[-1], 5))
    axes.set_yticks(np.linspace(y[0], y[-1], 5))


def draw_plane(axes: Any, plane: Result, names: Sequence[str], column: str, label: str) -> None:
    """Draw a column of the plane through three networks as a 3-D surface with the networks on it, on axes of projection 3d."""
    x, y, heights = grid_of(plane, column)
    heights = np.nan_to_num(heights, nan=np.nanmax(heights))
    mesh = np.meshgrid(x, y)
    style: dict[str, Any] = {"cmap": ORDERED, "alpha": 0.75, "linewidth": 0.2, "edgecolor": "0.4"}
    shown = axes.plot_surface(*mesh, heights, antialiased=True, **style)
    low, high = float(heights.min()), float(heights.max())
    base = low - 0.35 * (high - low or 1.0)
    if high > low:
        axes.contour(*mesh, heights, levels=12, cmap=ORDERED, offset=base, linewidths=0.8)
    corners = [row for row in plane.rows if row["network"]]
    for row, name, mark in zip(corners, names, MARKS, strict=True):
        place, height = (float(row["x"]), float(row["y"])), float(row[column])
        axes.plot([place[0]] * 2, [place[1]] * 2, [base, height], color="black", linewidth=1, zorder=10)
        axes.plot(*[[value] for value in place], [height], mark, color="black", markersize=5, zorder=11)
        axes.text(*place, height + 0.06 * (high - low), f"{name} {height:.3g}", fontsize=8, weight="bold", zorder=12)
    axes.set_zlim(base, high)
    axes.view_init(elev=32, azim=-62)
    axes.tick_params(labelsize=6.5, pad=-1)
    axes.set_xlabel("weights, along u", fontsize=7.5, labelpad=-4)
    axes.set_ylabel("weights, along v", fontsize=7.5, labelpad=-4)
    axes.figure.colorbar(shown, ax=axes, shrink=0.55, pad=0.02, label=label)


def radial_rise(surface: Result) -> dict[float, float]:
    """Distance from the network -> rise of the loss at that distance, for five distances."""
    radii = [round(surface.options["extent"] * ring / 5, 6) for ring in range(1, 6)]
    return {radius: rise(surface, radius) for radius in radii}


def described_surface(result: Result) -> str:
    """Grid, images and bits of a surface or plane, in words."""
    options, facts = result.options, result.header["facts"]
    split = {"train": "training", "test": "test"}[options["split"]]
    words = f"{options['points']} x {options['points']} points on {facts['samples']} {split} images"
    bits = {"run": "bits of the last evaluation", "float": "quantized weights as plain numbers"}
    return f"{words}, {bits[options['precision']]}" if "seed" in options else words


# Pictures of papers


def contours(data: ItemData, style: str) -> Drawing | None:
    """Contours of the loss around each network, and the rise of the loss over all pairs of directions."""
    cells = [(cell, found) for p in panels_of(data) for cell in p.cells if (found := results_of(cell.runs, "surface"))]
    if not cells or len(cells) < len(data.results.done):  # a comparison needs its baseline
        return None
    figure, axes = panels(len(cells) + 1, width=3.0, height=3.0, columns=len(cells) + 1)
    series: dict[Style, list[Point]] = {}
    for (cell, found), part in zip(cells, axes):
        shade = styles(data, style)(cell)
        draw_contours(part, min(found, key=lambda result: result.options.get("seed", 0)))
        label_axes(part, shade.label, "first direction (lengths of the filters)", "second direction")
        rises = [radial_rise(surface) for surface in found]
        shade = shade._replace(marker="^" if highest_bits(forward_bits(cell)) < 8 else shade.marker)
        values = {radius: [rise[radius] for rise in rises] for radius in rises[0]}
        series[shade] = [(radius, statistics.fmean(v), (min(v), max(v))) for radius, v in values.items()]
    draw_series(axes[-1], series, line=True)
    words = f"mean over {max(len(found) for _, found in cells)} pairs of random directions"
    label_axes(axes[-1], words, "distance in lengths of the filters", "rise of the loss", 30)
    shown = ScalarMappable(Normalize(CONTOURS[0], CONTOURS[-1]), ORDERED)
    figure.colorbar(shown, ax=axes[-2], label="loss (cross-entropy)", shrink=0.7)
    legend(figure, axes[-1:])
    words = " / ".join(dict.fromkeys(described_surface(found[0]) for _, found in cells))
    pairs = (
        "contours: the first pair of directions, with the loss at the network; bars: smallest and largest of all pairs"
    )
    counts = sorted({sum(bool(results_of((run,), "surface")) for run in cell.runs) for cell, _ in cells})
    trainings = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return Drawing(figure, f"{panels_of(data)[0].title}. {words}; {pairs}. Trainings of each network: {trainings}.")


def network_name(cell: Cell, phase: int | None) -> str:
    """HLHLp's name of a network at the end of a phase (None: the last): FLOAT, Hlp, HLp or HLHLp."""
    method = phase_method(cell)
    if method == "float" or (phase is not None and phase_bits(cell)[phase - 1] == FLOAT):
        return "FLOAT"
    return "Hlp" if method == "fine-tuning" else "HLHLp" if phase is None else "HLp"


def planes_of(results: Results, split: str) -> list[tuple[Result, list[str]]]:
    """The planes measured on the train or test split, with the names of their networks; only the first seed of each."""
    cells = {run.training: cell for cell in results.done for run in cell.runs}
    found: dict[tuple[str, ...], Result] = {}
    for plane in (plane for cell in results.done for plane in results_of(cell.runs, "plane")):
        parts = [(cells.get((part["hash"], str(part["seed"]))), part["phase"]) for part in plane.header["runs"]]
        if plane.options["split"] == split and all(cell is not None for cell, _ in parts):
            found.setdefault(tuple(network_name(cell, phase) for cell, phase in parts if cell), plane)
    return [(plane, list(names)) for names, plane in sorted(found.items(), reverse=True)]


def planes(data: ItemData, split: str, height: str, label: str) -> Drawing | None:
    """Planes through three networks, measured on the train or test split, with the column `height` as elevation."""
    found = planes_of(data.results, split)
    if not found:
        return None
    figure = plt.figure(figsize=(5.2 * len(found), 5.0), layout="constrained")
    for index, (plane, names) in enumerate(found):
        axes = figure.add_subplot(1, len(found), index + 1, projection="3d")
        draw_plane(axes, plane, names, height, label)
        axes.set_title(", ".join(names))
    words = f"{described_surface(found[0][0])}; quantized weights as plain numbers; the first seed"
    return Drawing(figure, f"{panels_of(data)[0].name}. {words}.")


def measured(data: ItemData, measurement: str, by: str, column: str, label: str) -> Drawing | None:
    """A column of a measurement of each network, by the categories in column `by` (corruption, noise, box size). Networks with
    fewer than half as many seeds as another are left out."""
    networks = list(itertools.product(data.results.done, (None, 1, 2)))
    if not networks:
        return None
    every = [
        (network_name(cell, phase), means_by_seed(cell, measurement, phase, by, column)) for cell, phase in networks
    ]
    most = max(_seeds(groups) for _, groups in every)
    series: dict[Style, list[Point]] = {}
    counts = []
    for name, groups in every:
        if groups and 2 * _seeds(groups) >= most:
            style = Style(name, f"C{len(series)}", "os^Dv"[len(series) % 5])
            series[style] = [point(word, over_seeds(values)) for word, values in groups.items()]
            counts.append(_seeds(groups))
    if not series:
        return None
    figure, axes = panels(1, width=8, height=3.0)
    draw_series(axes[0], series)
    axes[0].set_ylabel(label)
    legend(figure, axes)
    words = "Means over severities or ratios, then over seeds, with 95 % intervals over seeds"
    return Drawing(figure, f"{panels_of(data)[0].title}. {words}; {numbers_of_seeds(counts)}.")


def means_by_seed(cell: Cell, measurement: str, phase: int | None, by: str, column: str) -> dict[str, list[float]]:
    """Category -> the mean of a column of a measurement over its rows of that category, one for each run."""
    found: dict[str, list[float]] = {}
    for run in cell.runs:
        groups: dict[str, list[float]] = {}
        for row in (row for result in results_of([run], measurement, phase) for row in result.rows):
            groups.setdefault(row[by], []).append(float(row[column]))
        for word, values in groups.items():
            found.setdefault(word, []).append(statistics.fmean(values))
    return found


def _seeds(groups: Mapping[str, Sequence[float]]) -> int:
    return max(map(len, groups.values()), default=0)
