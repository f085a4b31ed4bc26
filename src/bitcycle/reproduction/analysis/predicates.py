"""The test of each predicate on the cells of a claim's items: estimate, interval and p-values."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import pandas as pd

from bitcycle.reproduction.analysis import statistics as rule
from bitcycle.reproduction.analysis.aggregation import Cell
from bitcycle.reproduction.analysis.claim_functions import PER_SEED
from bitcycle.reproduction.analysis.claims import Claim, tested_reference
from bitcycle.reproduction.analysis.contrast import Contrast, Pool, Unit, contrast
from bitcycle.reproduction.analysis.facts import agreeing, as_list, fact, select
from bitcycle.reproduction.analysis.metrics import COSTS, DISPLAYS, readings
from bitcycle.reproduction.analysis.statistics import Estimate, PValues


class Outcome(NamedTuple):
    """Result of a test."""

    values: PValues
    tested: Estimate  # on the scale of the test
    shown: float | None  # the estimate in the displayed unit
    interval: tuple[float, float] | None  # its confidence interval, in the displayed unit
    margin: float | None
    contrasts: list[Contrast]  # the tested contrasts, for preconditions
    against: Mapping[str, Any] | None = None  # the arm b of the estimate, if there are several


def evaluate(claim: Claim, cells: Sequence[Cell], pool: Pool) -> Outcome | None:
    """Test one part of a claim on the cells of its items at one scale; None if no runs bear on it."""
    ours, arms = select(cells, claim.where, claim.a), [select(cells, claim.where, arm) for arm in claim.arms]
    if claim.predicate == "smaller_spread":
        return _spread(claim, ours, arms[0])
    if claim.predicate in ("rising", "falling"):
        tests = [_trend(claim, name, ours, arms[0] if arms else []) for name in as_list(claim.by)]
    elif claim.function:
        tests = [_per_seed(claim, ours, theirs) for theirs in arms or [[]]]
    else:
        contrasts = _contrasts(claim, cells, ours, arms)
        tests = [_tested(claim, one, pool) for one in contrasts]
        return _joined(claim, tests, contrasts)
    return _joined(claim, tests, tests[0].contrasts if tests[0] else [])


def _joined(claim: Claim, found: Sequence[Outcome | None], contrasts: list[Contrast]) -> Outcome | None:
    """Join several tests, all of which must hold. The estimate is that of the strongest contradiction if there is one, otherwise
    that of the weakest support."""
    tests = [test for test in found if test is not None]
    if not tests or len(tests) < len(found):
        return None
    joint = rule.all_of([test.values for test in tests])
    sign = -1 if claim.predicate in ("higher", "at_least", "rising") else 1
    contradicted = joint.p is not None and joint.contradicts == joint.p

    def weakness(index: int) -> tuple[float, float]:
        test = tests[index]
        p = test.values.contradicts if contradicted else test.values.supports
        return (-1 if contradicted else 1) * (1.0 if p is None else p), sign * (test.shown or 0.0)

    shown = max(range(len(tests)), key=weakness)
    several = 1 < len(claim.arms) == len(tests)
    return tests[shown]._replace(values=joint, contrasts=contrasts, against=claim.arms[shown] if several else None)


def _contrasts(claim: Claim, cells: Sequence[Cell], ours: Sequence[Cell], arms: list[list[Cell]]) -> list[Contrast]:
    """One contrast per arm b; per setting or pair of settings if each of these must satisfy the predicate."""
    if claim.predicate == "all_equivalent":
        filled = [cell for cell in ours if cell.runs]
        every = [contrast([one], [two], claim.match, claim.metrics) for two, one in combinations(filled, 2)]
        return _distinct(replace(one, wanted=len(ours), filled=len(filled)) for one in every if one.units)
    if not arms:
        return [_bare(ours, claim.metrics[0])]
    minus = None if claim.minus is None else (select(cells, claim.where, claim.minus), claim.minus_match)
    whole = [contrast(ours, theirs, claim.match, claim.metrics, minus) for theirs in arms]
    if claim.predicate == "none_better" or claim.each:
        return _distinct(replace(one, units=(unit,)) for one in whole for unit in one.units)
    return whole


def _bare(cells: Sequence[Cell], metric: str = "final") -> Contrast:
    """A contrast of unpaired cells, for comparisons with a published number and for preconditions."""
    units = [Unit(((1.0, cell, metric),)) for cell in cells if cell.runs]
    return Contrast(tuple({unit.name: unit for unit in units}.values()), len(cells), len(units))


def _distinct(contrasts: Iterable[Contrast]) -> list[Contrast]:
    return list({frozenset(unit.name for unit in one.units): one for one in contrasts}.values())


def _tested(claim: Claim, found: Contrast, pool: Pool) -> Outcome | None:
    estimate = found.estimate(pool)
    if estimate is None:
        return None
    if not claim.arms and claim.predicate != "all_equivalent":
        published = claim.reference
        if isinstance(published, Mapping):
            models = {str(fact(cell, "model")) for unit in found.units for cell in unit.cells}
            published = statistics.fmean(published[model] for model in models)
        estimate = replace(estimate, mean=estimate.mean - float(published))
        claim = replace(claim, reference=0.0)
    return _decide(claim, estimate, _margin(claim, found), [found])


def _margin(claim: Claim, found: Contrast) -> float | None:
    if not claim.has_margin:
        return None
    if claim.fixed_margin is not None:
        return claim.fixed_margin
    theirs = [readings(cell, metric) for unit in found.units for _, cell, metric in unit.theirs]
    return claim.percent / 100 * statistics.fmean(value for one in theirs for value in one.values())


def _decide(claim: Claim, estimate: Estimate, margin: float | None, contrasts: list[Contrast]) -> Outcome:
    shown = DISPLAYS.get(claim.display, float)
    computed = margin is not None or claim.metrics[0] in COSTS
    values = rule.bounds_test(estimate, claim.bounds(margin, tested_reference(claim)), computed)
    ends = estimate.interval()
    interval = None if ends is None else (shown(ends[0]), shown(ends[1]))
    return Outcome(values, estimate, shown(estimate.mean), interval, margin, contrasts)


def _panels(cells: Sequence[Cell], match: Sequence[str]) -> Iterator[tuple[list[Cell], list[str]]]:
    """Groups of cells that agree on the facts `match`, with their seeds; groups of the same runs count once."""
    groups: dict[tuple[Any, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[tuple(fact(cell, name) for name in match)].append(cell)
    distinct = {frozenset(cell.runs[0].row["hash"] for cell in group if cell.runs): group for group in groups.values()}
    for panel in distinct.values():
        yield panel, sorted({run.row["seed"] for cell in panel for run in cell.runs})


def _per_seed(claim: Claim, ours: Sequence[Cell], theirs: Sequence[Cell]) -> Outcome | None:
    """Test a statistic that is computed from several runs of one seed, averaged over panels."""
    compute = PER_SEED[claim.function]
    rows = [
        (seed, compute(panel, agreeing(panel[0], theirs, claim.match), seed))
        for panel, seeds in _panels(ours, claim.match)
        for seed in seeds
    ]
    by_seed = pd.DataFrame(rows, columns=["seed", "value"]).dropna().groupby("seed")["value"].agg(["mean", "count"])
    if by_seed.empty:
        return None
    values = by_seed["mean"][by_seed["count"] == by_seed["count"].max()]  # omits seeds that lack a panel
    estimate = rule.over_seeds(values, (None, len(values) - 1))
    return _decide(claim, estimate, None, [_bare([*ours, *theirs])])


def _trend(claim: Claim, by: str, ours: Sequence[Cell], theirs: Sequence[Cell]) -> Outcome | None:
    """Page's trend test along a fact, with one block per seed: the means over panels. Omits seeds that lack a place or panel."""
    rows = []
    for number, (panel, seeds) in enumerate(_panels([c for c in ours if c.runs], [m for m in claim.match if m != by])):
        places: dict[float, list[Cell]] = defaultdict(list)
        for cell in panel:
            if (place := fact(cell, by)) is not None:
                places[round(float(place), 6)].append(cell)
        rows += [(number, seed, x, _at(claim, places[x], theirs, seed)) for x in places for seed in seeds]
    table = pd.DataFrame(rows, columns=["panel", "seed", "place", "value"]).dropna()
    blocks = table.pivot(index=["panel", "seed"], columns="place", values="value")
    counts = blocks.count(axis=1)
    blocks = blocks[counts == counts.max()].dropna(axis=1)
    if blocks.shape[1] < 3:
        return None
    panels = blocks.groupby("seed")
    blocks = panels.mean()[panels.size() == panels.size().max()]
    value, interval, values = rule.trend_test(blocks.to_numpy(), 1 if claim.predicate == "rising" else -1)
    tested = Estimate(value, None, 0, len(blocks))
    return Outcome(values, tested, value, interval, None, [_bare([*ours, *theirs])])


def _at(claim: Claim, cells: Sequence[Cell], theirs: Sequence[Cell], seed: str) -> float | None:
    """The value of a seed at one place of a trend: of the claim's function, or the mean of its metric, minus that of arm b."""
    if claim.function:
        return PER_SEED[claim.function](cells, [], seed)

    def mean(several: Sequence[Cell], metric: str) -> float:
        return float(pd.Series([readings(cell, metric).get(seed) for cell in several], dtype=float).mean())

    own = mean(cells, claim.metrics[0])
    return own - mean(agreeing(cells[0], theirs, claim.match), claim.metrics[1]) if theirs else own


def _spread(claim: Claim, ours: Sequence[Cell], theirs: Sequence[Cell]) -> Outcome:
    """F test of whether the deviation between seeds is smaller than that of others."""
    distinct = [{cell.runs[0].row["hash"]: cell for cell in arm if cell.runs}.values() for arm in (ours, theirs)]
    groups = [[list(readings(cell, claim.metrics[0]).values()) for cell in cells] for cells in distinct]
    ratio, interval, df, values = rule.spread_test(*groups)
    both = [*ours, *theirs]
    seeds = {run.row["seed"] for cell in both for run in cell.runs}
    shown = None if math.isnan(ratio) else ratio
    bare = replace(_bare(both), paired=False)
    return Outcome(values, Estimate(ratio, None, df, len(seeds)), shown, interval, None, [bare])
