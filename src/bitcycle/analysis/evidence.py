"""What the checks of claims share: panels, differences to a baseline, correlations, and what a check finds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Optional

from bitcycle.analysis.labels import method_of, panel_of, schedule_of
from bitcycle.analysis.results import Cell, Results, Value

Test = Callable[[Cell], bool]


@dataclass(frozen=True)
class Outcome:
    """What a check finds.

    Attributes:
        paper: whether it holds with the tolerance for the paper's scale.
        reduced: whether it holds as it is checked at smaller scales.
        measured: what was found, in words, with the number of seeds.
        computed: whether it needs no training, so that scales do not matter.
    """

    paper: bool
    reduced: bool
    measured: str
    computed: bool = False


Check = Callable[[Results], Optional[Outcome]]
"""The check of a claim on the results of an item at one scale; None where runs are missing."""


def exact(holds: bool, measured: str) -> Outcome:
    """An outcome that needs no training."""
    return Outcome(holds, holds, measured, computed=True)


def panels(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells by network and data; panels with the same runs, as one network stands in for several, count once."""
    single: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.runs:
            single.setdefault(panel_of(cell), []).append(cell)
    distinct: dict[frozenset[tuple[str, str]], list[Cell]] = {}
    for group in single.values():
        key = frozenset((run.row["hash"], run.row["seed"]) for cell in group for run in cell.runs)
        distinct.setdefault(key, group)
    return list(distinct.values())


def pick(cells: Iterable[Cell], *tests: Test) -> list[Cell]:
    """Cells with runs that pass all tests."""
    return [cell for cell in cells if cell.runs and all(test(cell) for test in tests)]


def with_schedule(*names: str) -> Test:
    """Whether a cell has one of the schedules."""
    return lambda cell: schedule_of(cell) in names


def with_method(*names: str) -> Test:
    """Whether a cell has one of the methods."""
    return lambda cell: method_of(cell) in names


def having(key: str, value: object) -> Test:
    """Whether a cell has a setting."""
    return lambda cell: cell.setting(key) == value


def average(cells: Sequence[Cell], column: str) -> float | None:
    """The mean over cells of their means over seeds; None if any has none, or there are no cells."""
    values = [cell.value(column) for cell in cells]
    known = [value.mean for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def differences(ours: Sequence[Cell], base: Sequence[Cell], column: str) -> list[Value]:
    """Value of each cell minus that of the only baseline, of equal seeds; empty if there is none."""
    return [value for cell in ours if base and (value := cell.less(base[0], column)) is not None]


def saving(cell: Cell, base: Cell, column: str = "gbitops") -> float | None:
    """Share of the cost of a baseline that a cell saves."""
    cost, reference = cell.value(column), base.value(column)
    return 1 - cost.mean / reference.mean if cost and reference and reference.mean else None


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Rank correlation; None for fewer than three pairs or constant values.

    >>> spearman([1, 2, 3], [2, 4, 9]), spearman([1, 2, 3, 4], [4, 3, 2, 1]), spearman([1, 2], [1, 2])
    (1.0, -1.0, None)
    """
    if len(one) < 3:
        return None
    ranks = [_ranks(values) for values in (one, other)]
    try:
        return round(statistics.correlation(*ranks), 12)
    except statistics.StatisticsError:
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def mean(values: Sequence[Value]) -> float:
    """Mean of means."""
    return statistics.fmean(value.mean for value in values)


def described(values: Sequence[Value], unit: str = "") -> str:
    """Differences in words: their mean, extremes, the number of cells and of seeds, and whether noise could explain them."""
    unit = f" {unit}" if unit else ""
    numbers = [value.mean for value in values]
    trials = min(value.n for value in values)
    text = f"mean difference {statistics.fmean(numbers):+.2f}{unit}"
    if len(values) > 1:
        text += f" ({min(numbers):+.2f} to {max(numbers):+.2f}) over {len(values)} cells"
    spreads = [value.std for value in values if value.std is not None]
    if spreads:
        text += f", standard deviation of one difference {statistics.fmean(spreads):.2f}"
    return f"{text}, n = {trials}"
