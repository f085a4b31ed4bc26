"""Metrics of a run: columns of runs.csv, values of its curve, and summaries of its analyses."""

import math
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Optional

from bitcycle.reproduction.analysis.cells import Cell, Run
from bitcycle.reproduction.analysis.statistics import Estimate, over_seeds
from bitcycle.reproduction.measurement.artifacts import CLEAN, Result

EVALUATED, PHASE = "evaluation: ", "phase: "
"""Prefixes of metrics: a value recorded at the last evaluation, by its name; the metric at the end of a phase, by its number
from 1."""
DISPLAYS: dict[str, Callable[[float], float]] = {"saving": lambda x: 100 * (1 - math.exp(-x)), "ratio": math.exp}
"""How log ratios are displayed: as percent saved, or as a ratio."""
COSTS = ("cost", "cost to the best", "energy", "latency", "gbitops")
FIT_SHARE = 0.05
"""Last part of a run in which its training accuracy tells how well it fits its training data."""
RADIUS = 0.5
"""Distance, in units of the filter norms, at which the rise of a loss surface is measured (our choice; surfaces extend to 1)."""
SURROUNDINGS = 0.3
"""Size of the neighbourhood of a network in a plane, as a fraction of dx and dy (our choice; the margin of a plane is 0.2)."""


def _log(column: str, sign: int, run: Run) -> float | None:
    number = run.number(column)
    return sign * math.log(number) if number else None


# Bits chosen by gates


def allocation_at(run: Run, share: float) -> dict[str, Any] | None:
    """Block -> option -> share of samples, at the recorded evaluation nearest to a fraction of the run; None if its step differs
    from the wanted one by more than a tenth."""
    moments = {int(step): blocks for step, blocks in run.curve.get("allocation", {}).items()}
    wanted = share * float(run.row["total_steps"])
    if not moments:
        return None
    nearest = min(moments, key=lambda step: abs(step - wanted))
    return dict(moments[nearest]) if abs(nearest - wanted) <= 0.1 * wanted else None


def depth(run: Run, share: float) -> float | None:
    """Mean forward bits of the first third of the blocks minus that of the last third, at a fraction of the run."""
    blocks = allocation_at(run, share)
    if blocks is None:
        return None
    bits = [sum(part * int(name.split("/")[0]) for name, part in one.items()) for one in blocks.values()]
    third = max(1, len(bits) // 3)
    return statistics.fmean(bits[:third]) - statistics.fmean(bits[-third:])


# Analyses of the trained network


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


def changed_error(run: Run, kind: str, column: str, phase: int | None = None) -> float | None:
    """The mean of an error column over all corruptions or noises."""
    results = results_of([run], kind, phase)
    errors = [[float(row[column]) for row in result.rows if row[kind] != CLEAN] for result in results]
    return _mean([statistics.fmean(one) for one in errors if one])


def training_accuracy(run: Run) -> float | None:
    """The accuracy on the training batches of the last FIT_SHARE of a run in percent; None if its curve has none."""
    curve, since = run.curve.get("training", {}), (1 - FIT_SHARE) * float(run.row["total_steps"])
    return _mean([value for step, value in zip(curve.get("step", []), curve.get("accuracy", [])) if step > since])


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


# Values by name

METRICS: dict[str, Callable[[Run], Optional[float]]] = {
    "cost": partial(_log, "gbitops", -1),
    "cost to the best": partial(_log, "gbitops_to_best", -1),
    "energy": partial(_log, "energy_j", -1),
    "latency": partial(_log, "latency_s", -1),
    "speed": partial(_log, "steps_per_second", 1),
    "depth early": lambda run: depth(run, 5 / 160),
    "depth late": lambda run: depth(run, 85 / 160),
    "rise": lambda run: _mean([rise(surface) for surface in results_of([run], "surface")]),
    "rise around it less that around fine-tuning": plane_rise,
    "sharpness": lambda run: _mean(
        [value for result in results_of([run], "sharpness") for value in result.numbers("sharpness_percent")]
    ),
    "corruption error": lambda run: changed_error(run, "corruption", "error_percent"),
    "corruption error after two steps": lambda run: changed_error(run, "corruption", "error_percent", 1),
    "fit": training_accuracy,
    "initial weights": lambda run: run.curve.get("initial_weights"),
    "error in noise": lambda run: changed_error(run, "noise", "cer_percent"),
}
"""Metrics that are not columns of runs.csv. Costs (negated) and speeds are logarithms, so that their differences are log
ratios."""


def reading(run: Run, metric: str) -> float | None:
    """The value of a metric of a run; None if it has none. A metric is a name in METRICS, a value recorded at the last
    evaluation, the metric at the end of a phase, or a column of runs.csv."""
    if metric in METRICS:
        return METRICS[metric](run)
    if metric.startswith(EVALUATED):
        number = run.curve.get("final", {}).get(metric.removeprefix(EVALUATED))
        return None if number is None else float(number)
    if metric.startswith(PHASE):
        phases, number = run.curve.get("phases", []), int(metric.removeprefix(PHASE))
        return float(phases[number - 1]["final"]) if len(phases) >= number else None
    return run.number(metric)


def readings(cell: Cell, metric: str) -> dict[str, float]:
    """Seed -> value of a metric."""
    return {run.row["seed"]: value for run in cell.runs if (value := reading(run, metric)) is not None}


def estimate_of(cell: Cell, metric: str, factor: float = 1.0) -> Estimate | None:
    """The mean of a metric over the seeds of a cell, multiplied by `factor`; None if no run has a value."""
    numbers = [factor * number for number in readings(cell, metric).values()]
    return over_seeds(numbers, own=2) if numbers else None
