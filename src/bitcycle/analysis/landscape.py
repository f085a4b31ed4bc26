"""What analyses of finished networks say in a number: how far the loss rises around them, how sharp they are, how robust."""

from __future__ import annotations

import json
import math
import statistics

from bitcycle.analysis.results import Cell, Value, value_of
from bitcycle.measurement.artifacts import Result

RADIUS = 0.5
"""Distance, in lengths of the filters, at which the rise of a loss surface is taken (our own; the pictures go to 1)."""
SURROUNDINGS = 0.3
"""What counts as around a network in a plane (our own; the plane goes on for 0.2)."""
CLEAN = "none"
"""What rows of a test of robustness call the data as they are."""


def results_of(cell: Cell, kind: str, phase: int | None = None) -> list[Result]:
    """The complete results of a kind that belong to the runs of a cell, at the end of a phase or of the run."""
    found = [result for run in cell.runs for result in run.analyses if result.complete]
    return [r for r in found if r.header["kind"] == kind and r.header["runs"][-1]["phase"] == phase]


def rise(surface: Result, radius: float = RADIUS) -> float:
    """How far the loss rises from the network to a distance: its mean over a ring one grid step wide, minus its middle.

    Not a number counts as infinite.
    """
    places = list(zip(surface.numbers("x"), surface.numbers("y")))
    losses = [math.inf if math.isnan(loss) else loss for loss in surface.numbers("loss")]
    step = 2 * surface.options["extent"] / (surface.options["points"] - 1)
    ring = [loss for (x, y), loss in zip(places, losses) if abs(math.hypot(x, y) - radius) <= step / 2]
    return statistics.fmean(ring) - losses[places.index((0.0, 0.0))]


def rises(cell: Cell) -> dict[str, float]:
    """Options of a surface, the seed of its directions among them -> rise of the loss, the mean over training seeds."""
    found: dict[str, list[float]] = {}
    for surface in results_of(cell, "surface"):
        found.setdefault(json.dumps(surface.options, sort_keys=True), []).append(rise(surface))
    return {key: statistics.fmean(values) for key, values in found.items()}


def rise_around(plane: Result, network: int) -> float | None:
    """How far the error rises around one of the three networks of a plane, in points.

    The mean over the grid points that differ from it by at most a share SURROUNDINGS of dx and of dy (`plane.py`), minus its own
    error; None if there are none.
    """
    rows = [(row["network"], *(float(row[name]) for name in ("x", "y", "error_percent"))) for row in plane.rows]
    corners = {name: (x, y, error) for name, x, y, error in rows if name}
    (x, y, own), dx, dy = corners[str(network)], corners["2"][0], corners["3"][1]
    reach = SURROUNDINGS * dx, SURROUNDINGS * dy
    near = [error for name, i, j, error in rows if not name and abs(i - x) <= reach[0] and abs(j - y) <= reach[1]]
    return statistics.fmean(near) - own if near else None


def sharpness(cell: Cell, phase: int | None = None) -> dict[str, Value]:
    """Size of the box -> epsilon-sharpness in percent over the training seeds."""
    found: dict[str, list[float]] = {}
    for result in results_of(cell, "sharpness", phase):
        for row in result.rows:
            found.setdefault(row["epsilon"], []).append(float(row["sharpness_percent"]))
    return {epsilon: value for epsilon, values in found.items() if (value := value_of(values))}


def robustness(cell: Cell, kind: str, column: str, phase: int | None = None) -> tuple[Value, Value] | None:
    """An error on the data as they are, and its mean over all corruptions or noises, over the training seeds.

    Args:
        cell: with the runs.
        kind: corruption or noise, whose first column says which.
        column: of the error.
        phase: of the networks.
    """
    clean, changed = [], []
    for result in results_of(cell, kind, phase):
        errors = [(row[kind], float(row[column])) for row in result.rows]
        clean += [error for name, error in errors if name == CLEAN]
        if others := [error for name, error in errors if name != CLEAN]:
            changed.append(statistics.fmean(others))
    first, second = value_of(clean), value_of(changed)
    return (first, second) if first and second else None
