"""Formulas of the verdicts, on numbers alone: estimates over seeds; tests of directions, margins, trends and spreads; joint
p-values and Holm's correction; power.

Seeds are the independent units. The standard deviation of an estimate comes from its own seeds if there are at least three,
otherwise from all settings with the same network, data and length (`residual_deviation`); without either there is no interval and
no test.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special, stats
from statsmodels.stats.multitest import multipletests

SIGNIFICANCE, POWER = 0.05, 0.8
OWN_SEEDS = 3
"""Minimum number of seeds for estimating the deviation of a contrast from these seeds."""
MOST_SEEDS = 10_000
ROUNDING = 1e-12
"""Values whose deviation is at most this share of the largest one are equal up to rounding."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, for example of a contrast."""

    mean: float
    error: float | None  # standard error; None if the deviation is unknown
    df: float  # degrees of freedom of the standard error
    n: int  # number of seeds

    @property
    def deviation(self) -> float | None:
        """Standard deviation between seeds."""
        return None if self.error is None else self.error * math.sqrt(self.n)

    def interval(self) -> tuple[float, float] | None:
        """95 % interval from Student's t distribution; None if the deviation is unknown."""
        if self.error is None:
            return None
        half = self.error * float(stats.t.ppf(0.975, self.df)) if self.error else 0.0
        return self.mean - half, self.mean + half

    def one_sided_p(self, bound: float, side: int) -> float:
        """One-sided p-value for the mean being above (side 1) or below (-1) a bound. Raises ValueError if the deviation is
        unknown."""
        if self.error is None:
            raise ValueError("error=None: cannot test without a known deviation; check `error` first")
        distance = side * (self.mean - bound)
        if self.error == 0:
            return 0.0 if distance > 0 else 1.0
        return float(stats.t.sf(distance / self.error, self.df))


class PValues(NamedTuple):
    """p-values of a claim and of its opposite; None if they cannot be tested."""

    supports: float | None
    contradicts: float | None

    @property
    def p(self) -> float | None:
        """The smaller of the two p-values; None if the claim cannot be tested."""
        return None if self.supports is None or self.contradicts is None else min(self.supports, self.contradicts)


UNTESTED = PValues(None, None)


def two_sided(supports: float, contradicts: float) -> PValues:
    """Two-sided p-values of a claim and its opposite, from one-sided p-values."""
    return PValues(min(1.0, 2 * supports), min(1.0, 2 * contradicts))


def over_seeds(
    values: Sequence[float], pooled: tuple[float | None, float] = (None, 0), own: int = OWN_SEEDS
) -> Estimate:
    """The mean over seeds. Its standard error comes from the values if there are at least `own`, otherwise from `pooled`: a
    deviation (None if unknown) and its degrees of freedom. It is unknown if a value is infinite or not a number.

    >>> over_seeds([1.0, 2.0, 3.0]).df, over_seeds([1.0])
    (2, Estimate(mean=1.0, error=None, df=0, n=1))
    """
    n, mean = len(values), statistics.fmean(values)
    if not math.isfinite(mean):
        return Estimate(mean, None, 0, n)
    if n < own:
        deviation, df = pooled
        return Estimate(mean, None if deviation is None else deviation / math.sqrt(n), df, n)
    error = float(stats.sem(values))
    equal = error <= ROUNDING * max(map(abs, values))  # a count, not a measurement
    return Estimate(mean, 0.0 if equal else error, n - 1, n)


def residual_deviation(values: Mapping[tuple[str, str], float]) -> tuple[float | None, int]:
    """The deviation s of values by (setting, seed), and its degrees of freedom, from a least-squares fit of the model

        value(setting, seed) = effect of the setting + effect of the seed + noise of variance s^2.

    Runs of the same seed share initial weights and batches, and settings are compared seed by seed: a difference between two
    settings for one seed has the deviation s sqrt(2).
    """
    table = pd.DataFrame([(*key, value) for key, value in values.items()], columns=["setting", "seed", "value"])
    table = table[table.duplicated("setting", keep=False)]  # a single seed has no residual
    if table.empty:
        return None, 0
    design, numbers = pd.get_dummies(table[["setting", "seed"]], dtype=float).to_numpy(), table["value"].to_numpy()
    effects, _, rank, _ = np.linalg.lstsq(design, numbers, rcond=None)
    freedom = len(table) - int(rank)
    if not freedom:
        return None, 0
    deviation = math.sqrt(float(np.square(numbers - design @ effects).sum()) / freedom)
    return (0.0 if deviation <= ROUNDING * float(np.abs(numbers).max()) else deviation), freedom


def bounds_test(estimate: Estimate, bounds: Sequence[tuple[float, int]], computed: bool = False) -> PValues:
    """Two-sided t test of whether a contrast lies beyond every bound, (value, 1: above, or -1: below): a single one for a
    direction, both ends for equivalence. The p-value is below 0.05 if the 95 % interval lies there. If all seeds have the same
    value, such as a number of bits, the sign test is used, unless the value is `computed` and cannot depend on the seed.

    >>> equal = Estimate(1.0, 0.0, 4, 5)
    >>> bounds_test(equal, [(0.0, 1)]), bounds_test(equal, [(0.0, 1)], computed=True)
    (PValues(supports=0.0625, contradicts=1.0), PValues(supports=0.0, contradicts=1.0))
    """
    if estimate.error is None:
        return UNTESTED
    least = 0.0 if estimate.error or computed else 0.5**estimate.n  # the p-value of the sign test
    beyond = [estimate.one_sided_p(value, side) for value, side in bounds]
    short = [estimate.one_sided_p(value, -side) for value, side in bounds]
    return two_sided(max(least, *beyond), max(least, min(short)))


def conjunction(tests: Sequence[PValues]) -> PValues:
    """p-values of a conjunction: the largest p-value supports it; the smallest one, Bonferroni-corrected, contradicts it.

    A part that could not be tested prevents support, but not contradiction.
    """
    if all(test.p is None for test in tests):
        return UNTESTED
    supports, contradicts = ([1.0 if p is None else p for p in several] for several in zip(*tests))
    return PValues(max(supports), min(1.0, len(tests) * min(contradicts)))


def trend_test(blocks: Sequence[Sequence[float]], sign: int) -> tuple[float, tuple[float, float], PValues]:
    """Page's trend test, or a permutation test for a single block; sign 1 if the claimed trend rises, -1 if it falls.

    A block has the values of all settings for one seed, in the order of the settings. Returns the mean rank
    correlation, its 95 % interval (Fisher's z), and the p-values.
    """
    ranks = np.array([stats.rankdata(block) for block in blocks])
    count = ranks.shape[1]
    places = np.arange(1, count + 1)
    correlations = [float(stats.pearsonr(places, row)[0]) if len(set(row)) > 1 else 0.0 for row in ranks]
    value = float(np.mean(correlations))
    half = float(stats.norm.ppf(0.975)) / math.sqrt(len(ranks) * (count - 1))
    centre = math.atanh(max(-0.9999, min(0.9999, value)))
    interval = math.tanh(centre - half), math.tanh(centre + half)
    rises, falls = _p_of_rise(ranks), _p_of_rise(count + 1 - ranks)
    return value, interval, two_sided(rises, falls) if sign > 0 else two_sided(falls, rises)


def _p_of_rise(ranks: np.ndarray) -> float:
    """p-value of rising ranks: Page's test, exact if that is fast; for a single row, a test of all or 9,999 permutations."""
    if len(ranks) > 1:
        method = "exact" if ranks.shape[1] <= 8 and ranks.shape[0] <= 6 else "asymptotic"
        return float(stats.page_trend_test(ranks, ranked=True, method=method).pvalue)
    places = np.arange(1, ranks.shape[1] + 1)
    options: dict[str, Any] = {"permutation_type": "pairings", "alternative": "greater", "vectorized": True}
    found = stats.permutation_test((ranks[0],), lambda row, axis: (row * places).sum(axis), random_state=0, **options)
    return float(found.pvalue)


def spread_test(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]
) -> tuple[float, tuple[float, float] | None, float, PValues]:
    """F test of whether the variance between seeds, pooled over the settings of an arm, is smaller in arm a than in b. Returns
    the ratio of the standard deviations, its 95 % interval, the degrees of freedom, and the p-values. Values that are all equal,
    as those of a coarse metric can be, have no variance that could be compared."""
    pooled = []
    for groups in (a, b):
        df = sum(max(0, len(group) - 1) for group in groups)
        squares = sum(float(np.var(group)) * len(group) for group in groups if len(set(group)) > 1)
        pooled.append((squares / df if df else math.nan, df))
    (one, n), (other, m) = pooled
    if not n or not m or not one or not other:
        return math.nan, None, 0, UNTESTED
    ratio = one / other
    p = float(stats.f.cdf(ratio, n, m))
    ends = [math.sqrt(ratio / float(stats.f.ppf(q, n, m))) for q in (0.975, 0.025)]
    return math.sqrt(ratio), (ends[0], ends[1]), min(n, m), two_sided(p, 1 - p)


def holm(values: Sequence[float]) -> list[float]:
    """Holm's correction of p-values, at least one."""
    return [float(p) for p in multipletests(values, method="holm")[1]]


def detectable(deviation: float, seeds: int, df: float, tests: int = 1) -> float:
    """The smallest contrast that a two-sided t test detects with a power of 80 %, Bonferroni-corrected for a number of tests.

    delta = c s / sqrt(n), where a noncentral t of noncentrality c exceeds t_(1 - a / 2), a = 0.05 / tests, with probability 0.8.
    """
    critical = stats.t.ppf(1 - SIGNIFICANCE / tests / 2, df)
    return float(special.nctdtrinc(df, 1 - POWER, critical)) * deviation / math.sqrt(seeds)


def provable_margin(deviation: float, seeds: int, df: float, tests: int = 1) -> float:
    """The smallest margin within which the 95 % interval of a contrast of zero lies with a power of 80 %."""
    quantiles = stats.t.ppf([1 - SIGNIFICANCE / tests / 2, (1 + POWER) / 2], df)
    return float(quantiles.sum()) * deviation / math.sqrt(seeds)


def power(estimate: Estimate, effect: float, bounds: Sequence[tuple[float, int]]) -> float | None:
    """The probability that the 95 % interval of a contrast with this standard error lies beyond every bound, if the true contrast
    is `effect`; None without a standard error. A bound is (value, side): above it (1) or below it (-1).

    With the noncentral t of noncentrality d = (effect - value) side / error:  1 - sum over bounds of P(t < t_0.975)
    """
    if not estimate.error:
        return None
    critical = float(stats.t.ppf(1 - SIGNIFICANCE / 2, estimate.df))
    misses = (
        1 - float(stats.nct.sf(critical, estimate.df, side * (effect - value) / estimate.error))
        for value, side in bounds
    )
    return max(0.0, 1 - sum(misses))


def seeds_needed(deviation: float | None, effect: float | None, tests: int, margin: bool = False) -> int | None:
    """The number of seeds needed to detect an effect, or to prove a margin; None if unknown or above MOST_SEEDS."""
    if not deviation or not effect:
        return None
    reach = provable_margin if margin else detectable
    several = range(2, MOST_SEEDS + 1)
    place = bisect_left(several, True, key=lambda n: reach(deviation, n, n - 1, tests) <= abs(effect))
    return several[place] if place < len(several) else None
