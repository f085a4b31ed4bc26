"""What a schedule gains over static precision of equal cost, which is static precision trained for fewer steps.

With a(L) the accuracy of static precision after L steps, s(L) that of the schedule, and E the number of steps of static precision
that cost as much as the schedule's L,

    gain = s(L) - a(E),    price = a(L) - a(E).

The price is what training for fewer steps costs. A schedule whose gain is the price loses nothing against static precision of
full length; one without a gain could be replaced by training for fewer steps. Both depend on how well static precision fits its
training data, measured as its accuracy on its last training batches.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple, Optional

from bitcycle.reproduction.analysis.cells import Cell
from bitcycle.reproduction.analysis.metrics import estimate_of, readings

EQUAL_COST = 0.01
"""Largest relative difference of two costs that count as equal."""


class Comparison(NamedTuple):
    """A schedule, and static precision of the same network and data."""

    schedule: Cell
    full: Cell  # of equal length
    equal: Cell  # of equal cost

    def gain(self, seed: str) -> float | None:
        """The gain of a seed in points; None if a run of it is missing."""
        own, short = (readings(cell, "final").get(seed) for cell in (self.schedule, self.equal))
        return None if own is None or short is None else own - short


def comparisons(schedules: Sequence[Cell], static: Sequence[Cell]) -> list[Comparison]:
    """The schedules with their static counterparts, shortest first; those that lack one are left out. All cells are of one
    network and dataset."""
    base = [cell for cell in static if cell.runs]
    found = [_compared(cell, base) for cell in schedules if cell.runs]
    return sorted((one for one in found if one is not None), key=lambda one: _length(one.full))


def _compared(cell: Cell, base: Sequence[Cell]) -> Comparison | None:
    full = next((one for one in base if _length(one) == _length(cell)), None)
    equal = min(base, key=lambda one: _distance(one, cell), default=None)
    return Comparison(cell, full, equal) if full and equal and _distance(equal, cell) <= EQUAL_COST else None


def _length(cell: Cell) -> int:
    return int(cell.runs[0].row["total_steps"])


def _distance(one: Cell, other: Cell) -> float:
    """Relative difference of the costs of two cells."""
    costs = [found.mean if (found := estimate_of(cell, "gbitops")) else 0.0 for cell in (one, other)]
    return abs(costs[0] / costs[1] - 1) if costs[1] else 1.0


# Statistics of a seed


def mean_gain(schedules: Sequence[Cell], static: Sequence[Cell], seed: str) -> Optional[float]:
    """The mean gain over lengths in points; None if a length lacks a run of this seed."""
    gains = [one.gain(seed) for one in comparisons(schedules, static)]
    known = [gain for gain in gains if gain is not None]
    return statistics.fmean(known) if known and len(known) == len(gains) else None


def slope_of_gain(schedules: Sequence[Cell], static: Sequence[Cell], seed: str) -> Optional[float]:
    """By how many points the gain changes if static precision fits its training data 10 points better: the slope of a least
    squares line over lengths. None if a length lacks a run of this seed, or with fewer than three lengths."""
    places = [(readings(one.full, "fit").get(seed), one.gain(seed)) for one in comparisons(schedules, static)]
    known = [(fit, gain) for fit, gain in places if fit is not None and gain is not None]
    if len(known) < 3 or len(known) < len(places):
        return None
    return 10 * statistics.linear_regression(*zip(*known)).slope
