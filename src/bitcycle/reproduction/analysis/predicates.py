"""The test of a claim's predicate: from the cells whose runs count to an estimate with its interval and p-values.

`evaluate` selects the cells of arms a and b and applies the test of the predicate; `verdict.py` calls it for each part of a
claim.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from bitcycle.reproduction.analysis import statistics as formulas
from bitcycle.reproduction.analysis.cells import Cell
from bitcycle.reproduction.analysis.claim_functions import PER_SEED
from bitcycle.reproduction.analysis.claims import Claim, tested_reference
from bitcycle.reproduction.analysis.contrast import Contrast, Pool, Unit, contrast
from bitcycle.reproduction.analysis.facts import agreeing, as_list, fact, select
from bitcycle.reproduction.analysis.metrics import COSTS, DISPLAYS, readings
from bitcycle.reproduction.analysis.statistics import Estimate, PValues


class Outcome(NamedTuple):
    """Result of a test."""

    p_values: PValues
    estimate: Estimate  # on the scale of the test, which may be logarithmic
    shown: float | None  # the estimate in the displayed unit
    interval: tuple[float, float] | None  # its confidence interval, in the displayed unit
    margin: float | None
    contrasts: list[Contrast]  # the tested contrasts, for preconditions
    against: Mapping[str, Any] | None = None  # the arm b of the estimate, if there are several
    weakest: Contrast | None = None  # the contrast of the estimate, if several were tested


def evaluate(claim: Claim, cells: Sequence[Cell], pool: Pool) -> Outcome | None:
    """Test one part of a claim on the cells of its items at one scale; None if no runs bear on it."""
    arm_a = select(cells, claim.where, claim.a)
    arms_b = [select(cells, claim.where, arm) for arm in claim.arms]
    if claim.predicate == "smaller_spread":
        return _spread(claim, arm_a, arms_b[0])
    if claim.predicate in ("rising", "falling"):
        tests = [_trend(claim, name, arm_a, arms_b[0] if arms_b else []) for name in as_list(claim.by)]
    elif claim.function:
        tests = [_per_seed(claim, arm_a, arm_b) for arm_b in arms_b or [[]]]
    else:
        tests = [_mean(claim, one, pool) for one in _contrasts(claim, cells, arm_a, arms_b)]
    return _all_hold(claim, tests)


def _all_hold(claim: Claim, several: Sequence[Outcome | None]) -> Outcome | None:
    """Join tests that must all hold; None if one of them has no runs. The estimate is that of the strongest contradiction if
    there is one, otherwise that of the weakest support."""
    tests = [test for test in several if test is not None]
    if not tests or len(tests) < len(several):
        return None
    joint = formulas.conjunction([test.p_values for test in tests])
    contradicted = joint.p is not None and joint.contradicts == joint.p
    sign = -1 if claim.predicate in ("higher", "at_least", "rising") else 1

    def weakness(index: int) -> tuple[float, float]:
        test = tests[index]
        p = test.p_values.contradicts if contradicted else test.p_values.supports
        return (-1 if contradicted else 1) * (1.0 if p is None else p), sign * (test.shown or 0.0)

    weakest = max(range(len(tests)), key=weakness)
    against = claim.arms[weakest] if 1 < len(claim.arms) == len(tests) else None
    contrasts = _distinct(one for test in tests for one in test.contrasts)
    of = next(iter(tests[weakest].contrasts), None) if len(tests) > 1 else None
    return tests[weakest]._replace(p_values=joint, contrasts=contrasts, against=against, weakest=of)


def _contrasts(
    claim: Claim, cells: Sequence[Cell], arm_a: Sequence[Cell], arms_b: Sequence[Sequence[Cell]]
) -> list[Contrast]:
    """One contrast per arm b; per setting or pair of settings if each of these must satisfy the predicate and every arm has
    runs."""
    if claim.predicate == "all_equivalent":
        filled = [cell for cell in arm_a if cell.runs]
        pairs = [contrast([one], [two], claim.match, claim.metrics) for two, one in combinations(filled, 2)]
        return _distinct(replace(one, wanted=len(arm_a), filled=len(filled)) for one in pairs if one.units)
    if not arms_b:
        return [_unpaired(arm_a, claim.metrics[0])]
    minus = None if claim.minus is None else (select(cells, claim.where, claim.minus), claim.minus_match)
    whole = [contrast(arm_a, arm_b, claim.match, claim.metrics, minus) for arm_b in arms_b]
    if (claim.predicate == "none_better" or claim.each) and all(one.units for one in whole):
        return _distinct(replace(one, units=(unit,)) for one in whole for unit in one.units)
    return whole


def _unpaired(cells: Sequence[Cell], metric: str = "final") -> Contrast:
    """A contrast of cells without partners: for comparisons with a published number, and to tell the preconditions the runs of
    a test that has no contrast."""
    units = [Unit(((1.0, cell, metric),)) for cell in cells if cell.runs]
    return Contrast(tuple({unit.name: unit for unit in units}.values()), len(cells), len(units))


def _distinct(contrasts: Iterable[Contrast]) -> list[Contrast]:
    return list({frozenset(unit.name for unit in one.units): one for one in contrasts}.values())


def _mean(claim: Claim, tested: Contrast, pool: Pool) -> Outcome | None:
    """t test of the mean of a contrast, or of a alone, from which the published number is subtracted."""
    estimate = tested.estimate(pool)
    if estimate is None:
        return None
    if not claim.arms and claim.predicate != "all_equivalent":
        estimate = replace(estimate, mean=estimate.mean - _published_number(claim, tested))
        claim = replace(claim, reference=0.0)
    return _t_test(claim, estimate, _margin(claim, tested), [tested])


def _published_number(claim: Claim, tested: Contrast) -> float:
    """The reference of a claim; the mean of those of its networks if each has its own."""
    if not isinstance(claim.reference, Mapping):
        return float(claim.reference)
    models = {str(fact(cell, "model")) for unit in tested.units for cell in unit.cells}
    return fmean(claim.reference[model] for model in models)


def _margin(claim: Claim, tested: Contrast) -> float | None:
    """The margin of a claim, as a number; None if its predicate has none."""
    if not claim.has_margin:
        return None
    if claim.fixed_margin is not None:
        return claim.fixed_margin
    baseline = [(unit, readings(cell, metric)) for unit in tested.units for _, cell, metric in unit.b]
    return claim.percent / 100 * fmean(values[seed] for unit, values in baseline for seed in tested.seeds_of(unit))


def _t_test(claim: Claim, estimate: Estimate, margin: float | None, contrasts: list[Contrast]) -> Outcome:
    shown = DISPLAYS.get(claim.display, float)
    bounds = claim.bounds(margin, tested_reference(claim))
    p_values = formulas.bounds_test(estimate, bounds, computed=claim.metrics[0] in COSTS)
    ends = estimate.interval()
    interval = None if ends is None else (shown(ends[0]), shown(ends[1]))
    return Outcome(p_values, estimate, shown(estimate.mean), interval, margin, contrasts)


def _panels(cells: Sequence[Cell], match: Sequence[str]) -> Iterator[tuple[list[Cell], list[str]]]:
    """Groups of cells that agree on the facts `match`, with their seeds; groups of the same runs count once."""
    groups: dict[tuple[Any, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[tuple(fact(cell, name) for name in match)].append(cell)
    distinct = {frozenset(cell.runs[0].row["hash"] for cell in group if cell.runs): group for group in groups.values()}
    for panel in distinct.values():
        yield panel, sorted({run.row["seed"] for cell in panel for run in cell.runs})


def _per_seed(claim: Claim, arm_a: Sequence[Cell], arm_b: Sequence[Cell]) -> Outcome | None:
    """t test of the claim's function of the runs of one seed, averaged over panels. Omits seeds that lack a panel, or a cell that
    has runs."""
    compute, rows = PER_SEED[claim.function], []
    for panel, seeds in _panels(arm_a, claim.match):
        others = agreeing(panel[0], arm_b, claim.match)
        recorded = [{run.row["seed"] for run in cell.runs} for cell in (*panel, *others) if cell.runs]
        rows += [(seed, compute(panel, others, seed)) for seed in seeds if all(seed in some for some in recorded)]
    by_seed = pd.DataFrame(rows, columns=["seed", "value"]).dropna().groupby("seed")["value"].agg(["mean", "count"])
    if by_seed.empty:
        return None
    values = by_seed["mean"][by_seed["count"] == by_seed["count"].max()]
    estimate = formulas.over_seeds(values, (None, len(values) - 1))
    return _t_test(claim, estimate, None, [_unpaired([*arm_a, *arm_b])])


def _trend(claim: Claim, by: str, arm_a: Sequence[Cell], arm_b: Sequence[Cell]) -> Outcome | None:
    """Page's trend test along a fact, with one block per seed: the means over panels. Omits places that a panel lacks, and seeds
    that lack a place or panel."""
    rows = []
    filled, match = [cell for cell in arm_a if cell.runs], [name for name in claim.match if name != by]
    for number, (panel, seeds) in enumerate(_panels(filled, match)):
        places: dict[float, list[Cell]] = defaultdict(list)
        for cell in panel:
            if (place := fact(cell, by)) is not None:
                places[round(float(place), 6)].append(cell)
        rows += [(number, seed, x, _at(claim, places[x], arm_b, seed)) for x in places for seed in seeds]
    table = pd.DataFrame(rows, columns=["panel", "seed", "place", "value"]).dropna()
    blocks = table.pivot(index=["panel", "seed"], columns="place", values="value")
    blocks = blocks.loc[:, blocks.notna().groupby("panel").any().all()]  # places that every panel has
    counts = blocks.count(axis=1)
    blocks = blocks[counts == counts.max()].dropna(axis=1)
    if blocks.shape[1] < 3:
        return None
    panels = blocks.groupby("seed")
    blocks = panels.mean()[panels.size() == panels.size().max()]
    correlation, interval, p_values = formulas.trend_test(blocks.to_numpy(), 1 if claim.predicate == "rising" else -1)
    estimate = Estimate(correlation, None, 0, len(blocks))
    return Outcome(p_values, estimate, correlation, interval, None, [_unpaired([*arm_a, *arm_b])])


def _at(claim: Claim, cells: Sequence[Cell], arm_b: Sequence[Cell], seed: str) -> float | None:
    """The value of a seed at one place of a trend: of the claim's function, or the mean of its metric, minus that of arm b. None
    (nan) if a cell with runs lacks this seed."""
    if claim.function:
        return PER_SEED[claim.function](cells, [], seed)

    def mean(several: Sequence[Cell], metric: str) -> float:
        distinct = {cell.runs[0].row["hash"]: cell for cell in several if cell.runs}.values()
        return float(pd.Series([readings(cell, metric).get(seed) for cell in distinct], dtype=float).mean(skipna=False))

    own = mean(cells, claim.metrics[0])
    return own - mean(agreeing(cells[0], arm_b, claim.match), claim.metrics[1]) if arm_b else own


def _spread(claim: Claim, arm_a: Sequence[Cell], arm_b: Sequence[Cell]) -> Outcome:
    """F test of whether the deviation between seeds is smaller in arm a than in arm b."""
    distinct = [{cell.runs[0].row["hash"]: cell for cell in arm if cell.runs}.values() for arm in (arm_a, arm_b)]
    groups = [[list(readings(cell, claim.metrics[0]).values()) for cell in cells] for cells in distinct]
    ratio, interval, df, p_values = formulas.spread_test(*groups)
    both = [*arm_a, *arm_b]
    seeds = {run.row["seed"] for cell in both for run in cell.runs}
    shown = None if math.isnan(ratio) else ratio
    tested = replace(_unpaired(both), paired=False)
    return Outcome(p_values, Estimate(ratio, None, df, len(seeds)), shown, interval, None, [tested])
