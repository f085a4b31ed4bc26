"""Contrasts of settings: which cells a claim selects and pairs, their numbers seed by seed, and the estimate over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Optional

from bitcycle.analysis import labels, landscape
from bitcycle.analysis.aggregation import Cell, Run, Value, value_of
from bitcycle.analysis.claim_functions import cost_of, depth
from bitcycle.analysis.deviation import pooled
from bitcycle.analysis.statistics import OWN_SEEDS, Estimate, over_seeds

Selector = Mapping[str, Any]
"""Fact or setting -> its value, or a list of them."""


def _cpt_method_with_bits(cell: Cell) -> str:
    method = labels.cpt_method(cell)
    return f"{method} {'3 to 8' if method == 'progressive precision' else labels.forward_bits(cell)} bits"


def _phase_ends(cell: Cell) -> str:
    values = [value(cell, f"{PHASE}{phase}") for phase, _ in enumerate(labels.phase_bits(cell), 1)]
    return ", ".join(f"{value.mean:.4g}" for value in values if value)


FACTS: dict[str, Callable[[Cell], Any]] = {
    "model": labels.model_of,
    "data": labels.dataset_of,
    "aggregation": labels.aggregation_of,
    "schedule": labels.schedule_of,
    "method": labels.method_of,
    "fw": labels.forward_bits,
    "bw": labels.backward_bits,
    "high": lambda cell: labels.highest(labels.forward_bits(cell)),
    "bounds": lambda cell: "/".join(
        str(labels.highest(bits(cell))) for bits in (labels.forward_bits, labels.backward_bits)
    ),
    "phases": labels.phase_method,
    "phase_bits": lambda cell: ",".join(map(str, labels.phase_bits(cell))),
    "levels": labels.levels_of,
    "precision": labels.precision_of,
    "split": lambda cell: f"{labels.split_of(cell):.3g}",
    "steps": lambda cell: int(cell.runs[0].row["total_steps"]) if cell.runs else cell.setting("training.steps"),
    "start": labels.start_of,
    "window": lambda cell: "{:g}-{:g}".format(*labels.window_of(cell)),
    "window_start": lambda cell: f"{labels.window_of(cell)[0]:g}",
    "window_end": lambda cell: labels.window_of(cell)[1],
    "after_window": lambda cell: f"{float(cell.setting('training.epochs') or 0) - labels.window_of(cell)[1]:g}",
    "first_stage": lambda cell: (cell.setting("schedule.stages") or [0])[0],
    "formula_cost": lambda cell: round(cost_of(labels.schedule_of(cell)), 2),
    "rate": lambda cell: cell.setting("training.learning_rate.initial", 0.1),
    "cpt_method": labels.cpt_method,
    "stages_method": labels.stages_method,
    "partial_method": labels.partial_method,
    "cpt_method_bits": _cpt_method_with_bits,
    "mode": lambda cell: "Q-Agg" if cell.setting("model.aggregation") == "quantized" else "FP-Agg",
    "window_kind": lambda cell: labels.window_edge(cell)[0],
    "window_edge": lambda cell: labels.window_edge(cell)[1],
    "up_to": lambda cell: f"up to {labels.highest(labels.forward_bits(cell))} bits",
    "cycles": lambda cell: float(cell.setting("schedule.cycles") or 1),
    "epsilon": lambda cell: (
        float(cell.setting("schedule.epsilon", 0.05)) if labels.schedule_of(cell) == "pfq" else None
    ),
    "alpha": lambda cell: float(cell.setting("schedule.alpha", 0.3)),
    "seconds": lambda cell: statistics.median([run.number("seconds") or 0.0 for run in cell.runs]),
    "steps per second": lambda cell: f"{value_.mean:.1f}" if (value_ := value(cell, "steps_per_second")) else "",
    "q_min found": lambda cell: ", ".join(sorted({str(run.row["q_min"]) for run in cell.runs})),
    "at the ends of phases": _phase_ends,
}
"""What claims and pictures ask of a cell; any other word is a setting."""


def fact(cell: Cell, name: str) -> Any:
    """A fact or setting of a cell."""
    return FACTS[name](cell) if name in FACTS else cell.setting(name)


def has(cell: Cell, selector: Selector) -> bool:
    """Whether a cell has all facts of a selector."""
    wanted = {name: value if isinstance(value, list) else [value] for name, value in selector.items()}
    return all(str(fact(cell, name)) in map(str, values) for name, values in wanted.items())


def select(cells: Iterable[Cell], *selectors: Selector) -> list[Cell]:
    """The cells, with runs or without, that have all facts of some selectors."""
    return [cell for cell in cells if all(has(cell, selector) for selector in selectors)]


def described(selector: Selector) -> str:
    """A selector in words.

    >>> described({"schedule": ["RR", "RTH"], "high": 8})
    'schedule RR or RTH, high 8'
    """
    several = {name: value if isinstance(value, list) else [value] for name, value in selector.items()}
    return ", ".join(f"{name.replace('_', ' ')} {' or '.join(map(str, value))}" for name, value in several.items())


# Numbers of a run


def _log(column: str, sign: int) -> Callable[[Run], Optional[float]]:
    def read(run: Run) -> float | None:
        number = run.number(column)
        return sign * math.log(number) if number else None

    return read


METRICS: dict[str, Callable[[Run], Optional[float]]] = {
    "cost": _log("gbitops", -1),
    "cost to the best": _log("gbitops_to_best", -1),
    "energy": _log("energy_j", -1),
    "latency": _log("latency_s", -1),
    "speed": _log("steps_per_second", 1),
    "depth early": lambda run: depth(run, 5 / 160),
    "depth late": lambda run: depth(run, 85 / 160),
    "rise": landscape.mean_rise,
    "rise around it less that around fine-tuning": landscape.plane_rise,
    "sharpness": landscape.sharpness,
    "corruption error": lambda run: landscape.changed_error(run, "corruption", "error_percent"),
    "corruption error after two steps": lambda run: landscape.changed_error(run, "corruption", "error_percent", 1),
    "error in noise": lambda run: landscape.changed_error(run, "noise", "cer_percent"),
}
"""Numbers of a run beyond the columns of runs.csv; costs and speeds are logarithms, whose differences are ratios."""
DISPLAYS: dict[str, Callable[[float], float]] = {
    "saving": lambda x: 100 * (1 - math.exp(-x)),
    "ratio": math.exp,
}
"""How differences of logarithms are shown: percent saved, or a quotient."""
COSTS = ("cost", "cost to the best", "energy", "latency", "gbitops")
REACTIVE = ("pfq", "dfq", "fractrain")
"""Schedules whose bits depend on the training."""
EVALUATED, PHASE = "evaluation: ", "phase: "
"""What precedes the name of a number of the last evaluation, and the number of a phase, from 1 on, whose last metric is meant."""


def reading(run: Run, metric: str) -> float | None:
    """A number of a run: of METRICS, of its last evaluation, of the end of a phase, or a column of runs.csv."""
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
    """Seed -> number."""
    return {run.row["seed"]: value for run in cell.runs if (value := reading(run, metric)) is not None}


def value(cell: Cell, metric: str, factor: float = 1.0) -> Value | None:
    """A number over the seeds of a cell, in another unit; None without any."""
    return value_of([factor * number for number in readings(cell, metric).values()])


# All recorded runs, for what a single contrast cannot tell


@dataclass(frozen=True)
class Pool:
    """All recorded runs.

    Attributes:
        runs: of every item.
    """

    runs: Sequence[Run]
    known: dict[tuple[Any, ...], tuple[Optional[float], int]] = field(default_factory=dict)

    def deviation(self, run: Run, metric: str) -> tuple[float | None, int]:
        """The deviation of runs like this one, beside the effects of settings and seeds, and its degrees of freedom."""
        if metric in COSTS and run.row.get("schedule") in REACTIVE:
            return None, 0  # most runs of its length cost the same whatever the seed, this one does not
        key = run.group, metric
        if key not in self.known:
            alike = self._groups.get(run.group, [])
            values = {one.training: reading(one, metric) for one in alike}
            self.known[key] = pooled({name: value for name, value in values.items() if value is not None})
        return self.known[key]

    @cached_property
    def _groups(self) -> dict[tuple[str, ...], list[Run]]:
        found: dict[tuple[str, ...], list[Run]] = {}
        for run in self.runs:
            found.setdefault(run.group, []).append(run)
        return found

    @cached_property
    def _spans(self) -> list[tuple[float, float, str]]:
        return sorted((*span, run.row.get("processor", "")) for run in self.runs if (span := _span(run)))

    def shared_machine(self, run: Run) -> bool:
        """Whether a run is not known to have had its machine for itself: another one on record ran at the same time."""
        span = _span(run)
        if span is None:
            return True
        others = [s for s in self._spans if s[2] == run.row.get("processor", "") and s[:2] != span]
        return any(start < span[1] and span[0] < end for start, end, _ in others)


def _span(run: Run) -> tuple[float, float] | None:
    seconds, finished = run.number("seconds"), run.row.get("finished")
    if seconds is None or not finished:
        return None
    end = datetime.fromisoformat(finished).timestamp()
    return end - seconds, end


# Contrasts


Term = tuple[float, Cell, str]
"""Coefficient, cell, metric."""


@dataclass(frozen=True)
class Unit:
    """One comparison: a cell of one arm against its partners of the other.

    Attributes:
        terms: of the first arm, then of the second.
        first: how many belong to the first arm.
    """

    terms: tuple[Term, ...]
    first: int

    @property
    def arms(self) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
        """Terms of the first and of the second arm."""
        return self.terms[: self.first], self.terms[self.first :]

    @property
    def cells(self) -> list[Cell]:
        """Of both arms."""
        return [cell for _, cell, _ in self.terms]

    @cached_property
    def name(self) -> frozenset[tuple[str, float]]:
        """The trainings and their coefficients: equal comparisons count once, and one of a training with itself is empty."""
        found: dict[str, float] = {}
        for coefficient, cell, metric in self.terms:
            name = f"{cell.runs[0].row['hash']} {metric}"
            found[name] = found.get(name, 0.0) + coefficient
        return frozenset((name, round(value, 9)) for name, value in found.items() if abs(value) > 1e-9)

    @cached_property
    def by_seed(self) -> dict[str, float]:
        """Seed -> value, for the seeds that all cells have."""
        numbers = [(coefficient, readings(cell, metric)) for coefficient, cell, metric in self.terms]
        common = set.intersection(*(set(values) for _, values in numbers)) if numbers else set()
        return {seed: sum(c * values[seed] for c, values in numbers) for seed in sorted(common)}


@dataclass(frozen=True)
class Contrast:
    """The comparisons of a claim.

    Attributes:
        units: that have trainings, each once.
        wanted: how many cells of the first arm have a planned partner.
        filled: how many of these have trainings.
    """

    units: tuple[Unit, ...]
    wanted: int
    filled: int

    @property
    def runs(self) -> list[Run]:
        """The distinct trainings that count."""
        every = (
            run for unit in self.units for cell in unit.cells for run in cell.runs if run.row["seed"] in unit.by_seed
        )
        return list({run.training: run for run in every}.values())

    def estimate(self, pool: Pool) -> Estimate | None:
        """The mean over cells of the mean over seeds, with its error: from three own seeds on, else from the pool."""
        values = [unit.by_seed for unit in self.units if unit.by_seed]
        if not values:
            return None
        complete = sorted(set.intersection(*map(set, values)))
        if len(complete) >= OWN_SEEDS:
            return over_seeds([statistics.fmean(one[seed] for one in values) for seed in complete])
        mean = statistics.fmean(statistics.fmean(one.values()) for one in values)
        return Estimate(mean, *self._pooled_error(pool), len({seed for one in values for seed in one}))

    def _pooled_error(self, pool: Pool) -> tuple[float | None, float]:
        """Standard error of a weighted sum of runs, and its degrees of freedom after Welch and Satterthwaite."""
        weights: dict[tuple[tuple[str, str], str], float] = {}
        runs: dict[tuple[tuple[str, str], str], Run] = {}
        for unit in self.units:
            for coefficient, cell, metric in unit.terms:
                for run in (run for run in cell.runs if run.row["seed"] in unit.by_seed):
                    key = run.training, metric
                    weights[key] = weights.get(key, 0.0) + coefficient / len(unit.by_seed) / len(self.units)
                    runs[key] = run
        parts: dict[tuple[tuple[str, ...], str], list[float]] = {}
        for key, weight in weights.items():
            deviation, df = pool.deviation(runs[key], key[1])
            if deviation is None:
                return None, 0
            parts.setdefault((runs[key].group, key[1]), [0.0, df])[0] += (weight * deviation) ** 2
        total = sum(variance for variance, _ in parts.values())
        if total == 0:
            return 0.0, max((df for _, df in parts.values()), default=1)
        return math.sqrt(total), total**2 / sum(variance**2 / df for variance, df in parts.values())


def agreeing(cell: Cell, others: Sequence[Cell], match: Sequence[str]) -> list[Cell]:
    """The cells that agree with one in some facts."""
    return [other for other in others if all(fact(other, name) == fact(cell, name) for name in match)]


def partners(cell: Cell, others: Sequence[Cell], match: Sequence[str]) -> list[Cell]:
    """The cells that agree with one in some facts; those with trainings, if any has."""
    alike = agreeing(cell, others, match)
    return [other for other in alike if other.runs] or alike


def contrast(
    ours: Sequence[Cell],
    theirs: Sequence[Cell],
    match: Sequence[str],
    metrics: tuple[str, str],
    minus: tuple[Sequence[Cell], Sequence[str]] | None = None,
) -> Contrast:
    """Pair the cells of two arms.

    Args:
        ours: the first arm.
        theirs: the second.
        match: facts in which partners agree; all of the second arm without any.
        metrics: of the two arms.
        minus: cells whose values are first taken off those of both arms, and the facts in which they agree with these.
    """
    units: dict[frozenset[tuple[str, float]], Unit] = {}
    wanted = filled = 0
    for cell in ours:
        others = partners(cell, theirs, match)
        if not others:
            continue
        wanted += 1
        first = _terms(cell, 1.0, metrics[0], minus)
        second = [term for other in others for term in _terms(other, -1 / len(others), metrics[1], minus)]
        unit = Unit((*first, *second), len(first))
        if first and second and all(part.runs for part in unit.cells) and unit.by_seed:
            filled += 1
            if unit.name:
                units.setdefault(unit.name, unit)
    return Contrast(tuple(units.values()), wanted, filled)


def _terms(
    cell: Cell, coefficient: float, metric: str, minus: tuple[Sequence[Cell], Sequence[str]] | None
) -> list[Term]:
    if minus is None:
        return [(coefficient, cell, metric)]
    base = partners(cell, *minus)
    return [(coefficient, cell, metric), *((-coefficient / len(base), one, metric) for one in base)] if base else []
