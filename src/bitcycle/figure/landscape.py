"""What is around trained networks: contours as Li et al. draw them, its rise, planes through three networks in 3-D."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from bitcycle.analysis.landscape import rise
from bitcycle.measurement.artifacts import Result

LEVELS = np.arange(0.1, 10, 0.5)
"""Contour levels of CPT, figure 6, and the default of Li et al.'s code."""
CONTOURS = HEIGHTS = "viridis"
MARKS = ("s", "^", "o")


def grid_of(result: Result, column: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """x [P], y [P] and a column [P, P], rows being of equal y, of the grid of a surface or a plane."""
    rows = [row for row in result.rows if not row.get("network")]
    x, y = (np.array(sorted({float(row[axis]) for row in rows})) for axis in ("x", "y"))
    return x, y, np.array([float(row[column]) for row in rows]).reshape(len(y), len(x))


def draw_contours(axes: Axes, surface: Result) -> None:
    """The contours of a loss surface with their values, and a cross where the network is."""
    x, y, loss = grid_of(surface, "loss")
    finite = np.nan_to_num(loss, nan=1e9, posinf=1e9)
    levels = LEVELS[(finite.min() < LEVELS) & (finite.max() > LEVELS)]
    if len(levels):
        look = {"cmap": CONTOURS, "vmin": LEVELS[0], "vmax": LEVELS[-1], "linewidths": 1.1}
        lines = axes.contour(x, y, finite, levels=levels, **look)
        axes.clabel(lines, levels[::2], fontsize=6.5, fmt="%.1f")
    middle = float(loss[len(y) // 2, len(x) // 2])
    axes.plot([0], [0], "+", color="black", markersize=7)
    axes.annotate(f"{middle:.2f}", (0, 0), (5, 5), textcoords="offset points", fontsize=7)
    axes.set_box_aspect(1)
    axes.grid(False)
    axes.set_xticks(np.linspace(x[0], x[-1], 5))
    axes.set_yticks(np.linspace(y[0], y[-1], 5))


def draw_plane(
    figure: Figure | SubFigure, axes: Any, plane: Result, names: Sequence[str], column: str, label: str
) -> None:
    """The plane through three networks as a 3-D surface, the networks on it.

    Args:
        figure: for the colour bar.
        axes: of the projection 3d.
        plane: its result.
        names: of the networks.
        column: what is drawn upwards, and its label.
        label: of that axis.
    """
    x, y, heights = grid_of(plane, column)
    heights = np.nan_to_num(heights, nan=np.nanmax(heights))
    mesh = np.meshgrid(x, y)
    shown = axes.plot_surface(
        *mesh, heights, cmap=HEIGHTS, alpha=0.75, linewidth=0.2, edgecolor="0.4", antialiased=True
    )
    low, high = float(heights.min()), float(heights.max())
    base = low - 0.35 * (high - low or 1.0)
    if high > low:
        axes.contour(*mesh, heights, levels=12, cmap=HEIGHTS, offset=base, linewidths=0.8)
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
    figure.colorbar(shown, ax=axes, shrink=0.55, pad=0.02, label=label)


def radial_rise(surface: Result, rings: int = 5) -> dict[float, float]:
    """Distance from the network -> mean rise of the loss over a ring at that distance."""
    radii = [round(surface.options["extent"] * (ring + 1) / rings, 6) for ring in range(rings)]
    return {radius: rise(surface, radius) for radius in radii}


def described_surface(result: Result) -> str:
    """Grid, images and bits of a surface or a plane, in words."""
    options, facts = result.options, result.header["facts"]
    split = {"train": "training", "test": "test"}[options["split"]]
    words = f"{options['points']} x {options['points']} points on {facts['samples']} {split} images"
    bits = {"run": "bits of the last evaluation", "float": "quantized weights as plain numbers"}
    return f"{words}, {bits[options['precision']]}" if "seed" in options else words
