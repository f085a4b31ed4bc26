"""Tests of claims on the cells of their items: the estimate, its interval and p-values, by predicate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bitcycle.analysis import statistics as rule
from bitcycle.analysis.aggregation import Cell
from bitcycle.analysis.claim_functions import PER_SEED
from bitcycle.analysis.claims import PERCENT_OF_PERPLEXITY, POINTS, Claim, several, tested_reference
from bitcycle.analysis.contrast import DISPLAYS, Contrast, Pool, Unit, agreeing, contrast, fact, readings, select
from bitcycle.analysis.statistics import Estimate, PValues


class Found(NamedTuple):
    """What a test found.

    Attributes:
        values: p-values of the claim and of its contrary.
        estimate: the contrast, as it is shown.
        interval: of the estimate.
        deviation: of the contrast from seed to seed, as it was tested.
        n, df: seeds and degrees of freedom.
        margin: that was tested.
        contrasts: behind it, for preconditions.
    """

    values: PValues
    estimate: float | None
    interval: tuple[float, float] | None
    deviation: float | None
    n: int
    df: float
    margin: float | None
    contrasts: list[Contrast]


def evaluate(claim: Claim, cells: Sequence[Cell], pool: Pool) -> Found | None:
    """Test one part of a claim on the cells of its items at one scale; None where no training says anything."""
    if claim.predicate in ("rising", "falling"):
        return _trend(claim, cells, pool)
    if claim.predicate == "smaller_spread":
        return _spread(claim, cells)
    if claim.function:
        return _per_seed(claim, cells)
    contrasts = _contrasts(claim, cells)
    found = [_tested(claim, one, pool) for one in contrasts]
    tests = [one for one in found if one is not None]
    if not tests or len(tests) < len(found):
        return None
    return _joined(claim, tests, contrasts)


def _joined(claim: Claim, tests: Sequence[Found], contrasts: list[Contrast]) -> Found:
    """Several tests as one: the estimate is that of the strongest contrary, or of the weakest support."""
    joint = rule.all_of([test.values for test in tests])
    sign = -1 if claim.predicate in ("higher", "at_least", "rising") else 1
    worst = {id(test): sign * (test.estimate or 0.0) for test in tests}
    if joint.p is not None and joint.contradicts == joint.p:
        shown = min(tests, key=lambda test: (_or_one(test.values.contradicts), -worst[id(test)]))
    else:
        shown = max(tests, key=lambda test: (_or_one(test.values.supports), worst[id(test)]))
    return shown._replace(values=joint, contrasts=contrasts)


def _or_one(p: float | None) -> float:
    return 1.0 if p is None else p


def _arms(claim: Claim, cells: Sequence[Cell]) -> tuple[list[Cell], list[list[Cell]]]:
    return select(cells, claim.where, claim.a), [select(cells, claim.where, arm) for arm in claim.arms]


def _contrasts(claim: Claim, cells: Sequence[Cell]) -> list[Contrast]:
    """One contrast for each arm b; for each setting or pair where all have to fulfil the predicate alone."""
    ours, others = _arms(claim, cells)
    minus = None if claim.minus is None else (select(cells, claim.where, claim.minus), claim.minus_match)
    if claim.predicate == "all_equivalent":
        filled = [cell for cell in ours if cell.runs]
        pairs = [(one, two) for index, one in enumerate(filled) for two in filled[:index]]
        every = [contrast([one], [two], claim.match, claim.metrics) for one, two in pairs]
        return _distinct([replace(one, wanted=len(ours), filled=len(filled)) for one in every if one.units])
    if not others:
        return [_bare(ours, claim.metrics)]
    whole = [contrast(ours, theirs, claim.match, claim.metrics, minus) for theirs in others]
    if claim.predicate == "none_better":
        return _distinct([replace(one, units=(unit,)) for one in whole for unit in one.units])
    return whole


def _bare(cells: Sequence[Cell], metrics: tuple[str, str] = ("final", "final")) -> Contrast:
    """Cells that no contrast pairs: what is compared with a published number, and what preconditions need to know of others."""
    units = [Unit(((1.0, cell, metrics[0]),), 1) for cell in cells if cell.runs]
    return Contrast(tuple({unit.name: unit for unit in units}.values()), len(cells), len(units))


def _distinct(contrasts: Sequence[Contrast]) -> list[Contrast]:
    return list({frozenset(unit.name for unit in one.units): one for one in contrasts}.values())


def _tested(claim: Claim, found: Contrast, pool: Pool) -> Found | None:
    estimate = found.estimate(pool)
    if estimate is None:
        return None
    if not claim.arms and claim.predicate != "all_equivalent":
        numbers = claim.reference if isinstance(claim.reference, Mapping) else {}
        models = {str(fact(cell, "model")) for unit in found.units for cell in unit.cells}
        published = statistics.fmean(numbers[model] for model in models) if numbers else float(claim.reference)
        estimate = replace(estimate, mean=estimate.mean - published)
        claim = replace(claim, reference=0.0)
    return _decide(claim, estimate, _margin(claim, found), [found])


def _margin(claim: Claim, found: Contrast) -> float | None:
    if claim.level == 0.95:
        return None
    if claim.margin is not None:
        return claim.margin
    percent = claim.margin_percent
    if percent is None and "perplexity" in claim.unit:
        percent = PERCENT_OF_PERPLEXITY
    if percent is None:
        return POINTS
    theirs = [readings(cell, metric) for unit in found.units for _, cell, metric in unit.arms[1]]
    return percent / 100 * statistics.fmean(value for one in theirs for value in one.values())


def _decide(claim: Claim, estimate: Estimate, margin: float | None, contrasts: list[Contrast]) -> Found:
    shown = DISPLAYS.get(claim.display, lambda x: x)
    if margin is None:
        sign = 1 if claim.predicate == "higher" else -1
        values = rule.direction_test(estimate, sign, tested_reference(claim))
    else:
        low = None if claim.predicate in ("at_most", "none_better") else -margin
        high = None if claim.predicate == "at_least" else margin
        values = rule.margin_test(estimate, low, high)
    ends = estimate.interval(claim.level)
    interval = None if ends is None else (shown(ends[0]), shown(ends[1]))
    deviation = estimate.deviation
    return Found(values, shown(estimate.mean), interval, deviation, estimate.n, estimate.df, margin, contrasts)


def _seeds(cells: Iterable[Cell]) -> list[str]:
    return sorted({run.row["seed"] for cell in cells for run in cell.runs})


def _panels(cells: Sequence[Cell], match: Sequence[str]) -> list[list[Cell]]:
    """Cells that agree in some facts; panels of the same trainings once."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(tuple(fact(cell, name) for name in match), []).append(cell)
    return list({tuple(sorted({c.runs[0].row["hash"] for c in g if c.runs})): g for g in groups.values()}.values())


def _per_seed(claim: Claim, cells: Sequence[Cell]) -> Found | None:
    """Test the mean over panels of a number that several trainings of one seed have."""
    ours, others = _arms(claim, cells)
    function = PER_SEED[claim.function]
    tests = []
    for theirs in others or [[]]:
        by_seed: dict[str, list[float]] = {}
        for panel in _panels(ours, claim.match):
            for seed in _seeds(panel):
                if (value := function(panel, agreeing(panel[0], theirs, claim.match), seed)) is not None:
                    by_seed.setdefault(seed, []).append(value)
        if not by_seed:
            return None
        most = max(map(len, by_seed.values()))
        values = [statistics.fmean(numbers) for numbers in by_seed.values() if len(numbers) == most]
        tests.append(_decide(claim, rule.over_seeds(values, (None, len(values) - 1)), None, [_bare([*ours, *theirs])]))
    return _joined(claim, tests, tests[0].contrasts)


def _trend(claim: Claim, cells: Sequence[Cell], pool: Pool) -> Found | None:
    """Page's test along each of the facts."""
    ours, others = _arms(claim, cells)
    tests = [_trend_along(claim, name, ours, others[0] if others else []) for name in several(claim.by)]
    known = [test for test in tests if test is not None]
    return _joined(claim, known, known[0].contrasts) if known and len(known) == len(tests) else None


def _trend_along(claim: Claim, by: str, ours: Sequence[Cell], theirs: Sequence[Cell]) -> Found | None:
    blocks, seeds = [], set()
    for panel in _panels([cell for cell in ours if cell.runs], [name for name in claim.match if name != by]):
        for seed in _seeds(panel):
            row = _row(claim, by, panel, theirs, seed)
            if row is not None:
                blocks.append(row)
                seeds.add(seed)
    places = {tuple(sorted(row)) for row in blocks}
    widest = max(places, key=len, default=())
    chosen = [[row[place] for place in widest] for row in blocks if tuple(sorted(row)) == widest]
    if len(widest) < 3 or not chosen:
        return None
    value, interval, values = rule.trend_test(chosen, 1 if claim.predicate == "rising" else -1)
    return Found(values, value, interval, None, len(seeds), 0, None, [_bare(ours)])


def _row(claim: Claim, by: str, panel: Sequence[Cell], theirs: Sequence[Cell], seed: str) -> dict[float, float] | None:
    """Place along the trend -> value of a seed, the mean over settings of the same place."""
    places: dict[float, list[Cell]] = {}
    for cell in panel:
        if (place := fact(cell, by)) is not None:
            places.setdefault(round(float(place), 6), []).append(cell)
    found: dict[float, float] = {}
    for place, cells in places.items():
        if claim.function:
            value = PER_SEED[claim.function](cells, [], seed)
        else:
            value = _mean_of(cells, claim.metrics[0], seed)
            if theirs and value is not None:
                base = _mean_of(agreeing(cells[0], theirs, claim.match), claim.metrics[1], seed)
                value = None if base is None else value - base
        if value is not None:
            found[place] = value
    return found or None


def _mean_of(cells: Sequence[Cell], metric: str, seed: str) -> float | None:
    values = [value for cell in cells if (value := readings(cell, metric).get(seed)) is not None]
    return statistics.fmean(values) if values else None


def _spread(claim: Claim, cells: Sequence[Cell]) -> Found | None:
    ours, others = _arms(claim, cells)
    groups = []
    for arm in (ours, others[0]):
        distinct = {cell.runs[0].row["hash"]: cell for cell in arm if cell.runs}
        groups.append([list(readings(cell, claim.metrics[0]).values()) for cell in distinct.values()])
    value, interval, df, values = rule.spread_test(*groups)
    both = [*ours, *others[0]]
    estimate = None if math.isnan(value) else value
    return Found(values, estimate, interval, None, len(_seeds(both)), df, None, [_bare(both)])
