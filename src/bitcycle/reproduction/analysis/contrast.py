"""Contrasts between settings: from the cells of arms a and b to an estimate of a minus b.

`contrast` pairs each cell of arm a with its partners in arm b: such a comparison is a `Unit`. A `Contrast` averages its units
seed by seed, then over seeds; the `Pool` of all recorded runs gives the deviation if seeds are too few. `predicates.py` tests it.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, Optional

import pandas as pd

from bitcycle.reproduction.analysis import labels
from bitcycle.reproduction.analysis.cells import Cell, Group, Run
from bitcycle.reproduction.analysis.facts import agreeing
from bitcycle.reproduction.analysis.metrics import COSTS, reading, readings
from bitcycle.reproduction.analysis.statistics import OWN_SEEDS, Estimate, over_seeds, residual_deviation

# All recorded runs

REACTIVE = ("pfq", *labels.GATED)
"""Schedules whose precision depends on the course of training."""


@dataclass(frozen=True)
class Pool:
    """All recorded runs: they provide pooled deviations, and show which runs shared a machine.

    `busy` are times at which other programs computed beside all runs: beginning and end, as in results/summary/busy.csv.
    """

    runs: Sequence[Run]
    busy: Sequence[tuple[str, str]] = ()
    last: str = ""  # moment after which runs that finish provide no deviation; empty: none
    known: dict[tuple[Any, ...], tuple[Optional[float], int]] = field(default_factory=dict)

    def deviation(self, run: Run, metric: str) -> tuple[float | None, int]:
        """The residual deviation in the group of a run, and its degrees of freedom; runs that diverged have no deviation,
        and one of zero is not known, except of a cost."""
        if metric in COSTS and run.row.get("schedule") in REACTIVE:
            return None, 0  # for most other runs in its group, the cost does not depend on the seed
        key = run.group, metric
        if key not in self.known:
            values = {one.training: reading(one, metric) for one in self._groups.get(run.group, ())}
            finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
            deviation, freedom = residual_deviation(finite)
            # few values of a coarse metric agree by chance; a cost does not depend on the seed
            self.known[key] = (deviation, freedom) if deviation or metric in COSTS else (None, 0)
        return self.known[key]

    def until(self, last: str) -> "Pool":
        """The same runs, of which those that finish after a moment provide no deviation."""
        return replace(self, last=last, known={})

    @cached_property
    def _groups(self) -> dict[Group, list[Run]]:
        found = defaultdict(list)
        for run in self.runs:
            if not self.last or run.row.get("finished", "") <= self.last:
                found[run.group].append(run)
        return found

    @cached_property
    def _spans(self) -> set[tuple[float, float, str]]:
        return {span for run in self.runs if (span := _span(run))}

    def shared_machine(self, run: Run) -> bool:
        """Whether a run shared its machine with another recorded run or in a busy time, or it is not known when it ran."""
        own = _span(run)
        if own is None:
            return True
        (begin, end, processor), others = own, self._spans - {own}
        busy = {(_seconds(start), _seconds(stop), processor) for start, stop in self.busy}
        return any(start < end and begin < stop and where == processor for start, stop, where in others | busy)


def _span(run: Run) -> tuple[float, float, str] | None:
    seconds, finished = run.number("seconds"), run.row.get("finished")
    if seconds is None or not finished:
        return None
    end = _seconds(finished)
    begin = end - seconds
    if started := run.row.get("started"):  # before that if the run was interrupted, as `seconds` is without the pause
        begin = min(begin, _seconds(started))
    return begin, end, run.row.get("processor", "")


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


# Contrasts

Term = tuple[float, Cell, str]
"""Coefficient, cell, metric."""


@dataclass(frozen=True)
class Unit:
    """One comparison: the terms of a cell in arm a, and those of its partners in arm b."""

    a: tuple[Term, ...]
    b: tuple[Term, ...] = ()

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of both arms."""
        return self.a + self.b

    @property
    def cells(self) -> list[Cell]:
        """The cells of both arms."""
        return [cell for _, cell, _ in self.terms]

    @cached_property
    def name(self) -> frozenset[tuple[str, float]]:
        """The runs with their coefficients. Units of equal name are the same comparison and count once; the name is empty if
        runs are compared with themselves."""
        found: dict[str, float] = defaultdict(float)
        for coefficient, cell, metric in self.terms:
            found[f"{cell.runs[0].row['hash']} {metric}"] += coefficient
        return frozenset((name, round(value, 9)) for name, value in found.items() if abs(value) > 1e-9)

    @cached_property
    def by_seed(self) -> dict[str, float]:
        """Seed -> value of the comparison, for seeds that every cell has."""
        numbers = [(coefficient, readings(cell, metric)) for coefficient, cell, metric in self.terms]
        common = set.intersection(*(set(values) for _, values in numbers)) if numbers else set()
        return {seed: sum(c * values[seed] for c, values in numbers) for seed in sorted(common)}


@dataclass(frozen=True)
class Contrast:
    """The comparisons that a claim averages over."""

    units: tuple[Unit, ...]  # distinct comparisons that have runs
    wanted: int  # number of cells in arm a with a partner
    filled: int  # number of these for which both sides have runs
    paired: bool = True  # whether the comparisons are averaged seed by seed

    @cached_property
    def seeds(self) -> set[str]:
        """The seeds that count: those that every comparison has, if there are at least OWN_SEEDS, otherwise all."""
        several = [set(unit.by_seed) for unit in self.units if unit.by_seed]
        common = set.intersection(*several) if several and self.paired else set()
        return common if len(common) >= OWN_SEEDS else set().union(*several)

    def seeds_of(self, unit: Unit) -> set[str]:
        """The seeds of a comparison that count."""
        return self.seeds.intersection(unit.by_seed)

    @property
    def weights(self) -> list[tuple[Run, str, float]]:
        """Run, metric and coefficient in the mean over units and seeds, for every run that counts."""
        runs: dict[Any, Run] = {}
        found: dict[Any, float] = defaultdict(float)
        for unit in self.units:
            seeds = self.seeds_of(unit)
            for coefficient, cell, metric in unit.terms:
                for run in (run for run in cell.runs if run.row["seed"] in seeds):
                    key = run.group, run.training, metric
                    runs[key] = run
                    found[key] += coefficient / len(seeds) / len(self.units)
        return [(run, key[-1], found[key]) for key, run in runs.items()]

    @property
    def runs(self) -> list[Run]:
        """The distinct runs that count."""
        return list({run.training: run for run, _, _ in self.weights}.values())

    def estimate(self, pool: Pool) -> Estimate | None:
        """The mean over units and seeds. Its standard error comes from the seeds if there are at least OWN_SEEDS, otherwise
        from the pool."""
        several = [unit.by_seed for unit in self.units if unit.by_seed]
        # nan counts as infinite, as a table takes it for a seed that is missing
        values = pd.DataFrame([{k: math.inf if math.isnan(x) else x for k, x in one.items()} for one in several])
        if values.empty:
            return None
        complete = values.dropna(axis=1)
        if complete.shape[1] >= OWN_SEEDS:
            return over_seeds(complete.mean())
        mean = float(values.mean(axis=1).mean())
        error, df = self._pooled_error(pool) if math.isfinite(mean) else (None, 0.0)
        return Estimate(mean, error, df, values.shape[1])

    def _pooled_error(self, pool: Pool) -> tuple[float | None, float]:
        """Standard error of the weighted sum of runs, with Welch-Satterthwaite degrees of freedom; unknown without an arm b, as
        the pooled deviation is without what a seed does to all settings, which only a difference cancels."""
        if not all(unit.b for unit in self.units):
            return None, 0
        variances: dict[tuple[Group, str], float] = defaultdict(float)
        freedom: dict[tuple[Group, str], int] = {}
        for run, metric, weight in self.weights:
            deviation, freedom[run.group, metric] = pool.deviation(run, metric)
            if deviation is None:
                return None, 0
            variances[run.group, metric] += (weight * deviation) ** 2
        total = sum(variances.values())
        if total == 0:
            return 0.0, float(max(freedom.values()))
        return math.sqrt(total), total**2 / sum(part**2 / freedom[key] for key, part in variances.items())


def partners(cell: Cell, others: Sequence[Cell], match: Sequence[str]) -> list[Cell]:
    """The cells that agree with a given one on the facts `match`; only those that have runs, if any do, each training once."""
    alike = agreeing(cell, others, match)
    return list({other.runs[0].row["hash"]: other for other in alike if other.runs}.values()) or alike


def contrast(
    arm_a: Sequence[Cell],
    arm_b: Sequence[Cell],
    match: Sequence[str],
    metrics: Sequence[str],
    minus: tuple[Sequence[Cell], Sequence[str]] | None = None,
) -> Contrast:
    """Pair the cells of two arms.

    Args:
        match: facts on which partners agree; if empty, the partners are all cells of arm b.
        metrics: the metric of each arm.
        minus: cells whose values are first subtracted from both arms, and the facts on which they match the cells there.
    """

    def terms(cell: Cell, coefficient: float, metric: str) -> list[Term]:
        base = partners(cell, *minus) if minus else []
        less = [(-coefficient / len(base), one, metric) for one in base]
        return [] if minus and not base else [(coefficient, cell, metric), *less]

    units: dict[frozenset[tuple[str, float]], Unit] = {}
    wanted = filled = 0
    for cell in arm_a:
        others = partners(cell, arm_b, match)
        if not others:
            continue
        wanted += 1
        based = [other for other in others if terms(other, 1.0, metrics[1])]
        terms_b = [term for other in based for term in terms(other, -1 / len(based), metrics[1])]
        unit = Unit(tuple(terms(cell, 1.0, metrics[0])), tuple(terms_b))
        if unit.a and unit.b and all(part.runs for part in unit.cells) and unit.by_seed:
            filled += 1
            if unit.name:
                units.setdefault(unit.name, unit)
    return Contrast(tuple(units.values()), wanted, filled)
