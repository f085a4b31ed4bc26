"""Scalar summaries of the analyses of a run: rise of the loss around the network, sharpness, robustness."""

import math
import statistics
from collections.abc import Iterable

from bitcycle.analysis.aggregation import Run
from bitcycle.measurement.artifacts import CLEAN, Result

RADIUS = 0.5
"""Distance, in units of the filter norms, at which the rise of a loss surface is measured (our choice; surfaces extend to 1)."""
SURROUNDINGS = 0.3
"""Size of the neighbourhood of a network in a plane, as a fraction of dx and dy (our choice; the margin of a plane is 0.2)."""


def results_of(runs: Iterable[Run], kind: str, phase: int | None = None) -> list[Result]:
    """The complete results of a kind for some runs, measured at the end of a phase, or of the run (None)."""
    found = [result for run in runs for result in run.analyses if result.complete and result.header["kind"] == kind]
    return [result for result in found if result.header["runs"][-1]["phase"] == phase]


def rise(surface: Result, radius: float = RADIUS) -> float:
    """The rise of the loss at a distance from the network: the mean over a ring one grid step wide, minus the loss at the centre.
    NaN counts as infinite."""
    places = list(zip(surface.numbers("x"), surface.numbers("y")))
    losses = [math.inf if math.isnan(loss) else loss for loss in surface.numbers("loss")]
    step = 2 * surface.options["extent"] / (surface.options["points"] - 1)
    ring = [loss for (x, y), loss in zip(places, losses) if abs(math.hypot(x, y) - radius) <= step / 2]
    return statistics.fmean(ring) - losses[places.index((0.0, 0.0))]


def rise_around(plane: Result, network: int) -> float | None:
    """The rise of the error around one of the three networks of a plane, in points: the mean over the grid points in its
    neighbourhood (SURROUNDINGS), minus its own error. None if no grid point is that close."""
    rows = [(row["network"], *(float(row[name]) for name in ("x", "y", "error_percent"))) for row in plane.rows]
    corners = {name: (x, y, error) for name, x, y, error in rows if name}
    (x, y, own), dx, dy = corners[str(network)], corners["2"][0], corners["3"][1]
    reach = SURROUNDINGS * dx, SURROUNDINGS * dy
    near = [error for name, i, j, error in rows if not name and abs(i - x) <= reach[0] and abs(j - y) <= reach[1]]
    return statistics.fmean(near) - own if near else None


def plane_rise(run: Run) -> float | None:
    """The rise of the test error around the third network of a plane minus that around the second, in points."""
    planes = [plane for plane in results_of([run], "plane") if plane.options["split"] == "test"]
    around = [(rise_around(plane, 3), rise_around(plane, 2)) for plane in planes]
    return _mean([third - second for third, second in around if third is not None and second is not None])


def mean_rise(run: Run) -> float | None:
    """The rise of the loss around a network, averaged over pairs of directions."""
    return _mean([rise(surface) for surface in results_of([run], "surface")])


def sharpness(run: Run) -> float | None:
    """Epsilon-sharpness in percent, averaged over box sizes."""
    return _mean([value for result in results_of([run], "sharpness") for value in result.numbers("sharpness_percent")])


def changed_error(run: Run, kind: str, column: str, phase: int | None = None) -> float | None:
    """The mean of an error column over all corruptions or noises."""
    results = results_of([run], kind, phase)
    errors = [[float(row[column]) for row in result.rows if row[kind] != CLEAN] for result in results]
    return _mean([statistics.fmean(one) for one in errors if one])


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None
