"""The statistical rule of every verdict: estimates over seeds, tests of directions, margins, trends and spreads, and Holm.

Seeds are the independent units. An estimate has its deviation from its own seeds where there are three or more, else from all
settings of the same network, data and length (`deviation.pooled`); with neither there is no interval and no test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.optimize import brentq
from statsmodels.stats.multitest import multipletests

SIGNIFICANCE, POWER = 0.05, 0.8
OWN_SEEDS = 3
"""From so many seeds on a contrast has its deviation from them."""
MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Estimate:
    """A contrast over seeds.

    Attributes:
        value: its mean.
        error: standard error; None where no deviation is known.
        df: degrees of freedom of the error.
        n: number of seeds.
    """

    value: float
    error: float | None
    df: float
    n: int

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the contrast from seed to seed."""
        return None if self.error is None else self.error * math.sqrt(self.n)

    def interval(self, level: float) -> tuple[float, float] | None:
        """Confidence interval, from Student's t distribution."""
        if self.error is None:
            return None
        half = self.error * float(stats.t.ppf((1 + level) / 2, self.df)) if self.error else 0.0
        return self.value - half, self.value + half

    def above(self, bound: float) -> float | None:
        """One-sided p-value of the contrast being above a bound."""
        if self.error is None:
            return None
        if self.error == 0:
            return 0.0 if self.value > bound else 1.0
        return float(stats.t.sf((self.value - bound) / self.error, self.df))

    def below(self, bound: float) -> float | None:
        """One-sided p-value of the contrast being below a bound."""
        return Estimate(-self.value, self.error, self.df, self.n).above(-bound)


class PValues(NamedTuple):
    """p-values of a claim and of its contrary; None where nothing can be tested."""

    supports: float | None
    contradicts: float | None

    @property
    def p(self) -> float | None:
        """The smaller one."""
        return None if self.supports is None or self.contradicts is None else min(self.supports, self.contradicts)


UNTESTED = PValues(None, None)


def over_seeds(values: Sequence[float]) -> Estimate:
    """The estimate of a contrast from its values in three seeds or more."""
    error = float(stats.sem(values)) if len(values) > 1 else None
    scale = max(map(abs, values))
    if error is not None and error <= 1e-12 * scale:
        error = 0.0  # equal numbers: a count, not a measurement
    return Estimate(float(np.mean(values)), error, len(values) - 1, len(values))


def direction_test(estimate: Estimate, sign: int, reference: float = 0.0) -> PValues:
    """Two-sided t test of a contrast lying above (sign 1) or below (-1) a reference."""
    above, below = estimate.above(reference), estimate.below(reference)
    if above is None or below is None:
        return UNTESTED
    two = (min(1.0, 2 * above), min(1.0, 2 * below))
    return PValues(*two) if sign > 0 else PValues(two[1], two[0])


def margin_test(estimate: Estimate, low: float | None, high: float | None) -> PValues:
    """Two one-sided t tests of a contrast lying between two margins; with one margin, one."""
    inside, outside = [], []
    for bound, beyond, within in ((low, estimate.below, estimate.above), (high, estimate.above, estimate.below)):
        if bound is not None and (one := within(bound)) is not None and (other := beyond(bound)) is not None:
            inside.append(one)
            outside.append(other)
    return PValues(max(inside), min(outside)) if inside else UNTESTED


def all_of(tests: Sequence[PValues]) -> PValues:
    """All of several: supported by the weakest, contradicted by the strongest contrary, which Bonferroni corrects.

    One that nothing is known of keeps the others from supporting, not from contradicting.
    """
    known = [(1.0, 1.0) if test.supports is None or test.contradicts is None else test for test in tests]
    if all(test.p is None for test in tests):
        return UNTESTED
    return PValues(
        max(float(supports or 0.0) for supports, _ in known),
        min(1.0, len(tests) * min(float(contradicts or 0.0) for _, contradicts in known)),
    )


def trend_test(blocks: Sequence[Sequence[float]], sign: int) -> tuple[float, tuple[float, float], PValues]:
    """Page's test (for one seed a permutation test) of an order: mean rank correlation, its interval (Fisher's z), p-values.

    Args:
        blocks: for each seed and panel the values of the settings, in the order that is asked about.
        sign: 1 where values are to rise, -1 where they are to fall.
    """
    ranks = np.array([stats.rankdata(block) for block in blocks])
    count = ranks.shape[1]
    places = np.arange(1, count + 1)
    correlations = [float(stats.pearsonr(places, row)[0]) if len(set(row)) > 1 else 0.0 for row in ranks]
    value = float(np.mean(correlations))
    up, down = _order(ranks), _order(count + 1 - ranks)
    half = float(stats.norm.ppf(0.975)) / math.sqrt(len(ranks) * (count - 1))
    centre = math.atanh(max(-0.9999, min(0.9999, value)))
    interval = math.tanh(centre - half), math.tanh(centre + half)
    two = (min(1.0, 2 * up), min(1.0, 2 * down))
    return value, interval, PValues(*two) if sign > 0 else PValues(two[1], two[0])


def _order(ranks: np.ndarray) -> float:
    """p-value of rising ranks: Page's test, exact where that takes no time; for a single row all orders, or 9,999 of them."""
    if len(ranks) > 1:
        method = "exact" if ranks.shape[1] <= 8 and ranks.shape[0] <= 6 else "asymptotic"
        return float(stats.page_trend_test(ranks, ranked=True, method=method).pvalue)
    places = np.arange(1, ranks.shape[1] + 1)
    found = stats.permutation_test(
        (ranks[0],),
        lambda row, axis: (row * places).sum(axis),
        permutation_type="pairings",
        alternative="greater",
        vectorized=True,
        random_state=0,
    )
    return float(found.pvalue)


def spread_test(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]
) -> tuple[float, tuple[float, float] | None, float, PValues]:
    """F test of the variance over seeds, pooled over settings, being smaller than that of others.

    Returns:
        ratio of the standard deviations, its interval, degrees of freedom, p-values.
    """
    pooled = []
    for groups in (ours, theirs):
        df = sum(len(group) - 1 for group in groups)
        squares = sum(float(np.var(group)) * len(group) for group in groups)
        pooled.append((squares / df if df else math.nan, df))
    (one, n), (other, m) = pooled
    if not n or not m or not other:
        return math.nan, None, 0, UNTESTED
    ratio = one / other
    p = float(stats.f.cdf(ratio, n, m))
    ends = [math.sqrt(ratio / float(stats.f.ppf(q, n, m))) for q in (0.975, 0.025)]
    return math.sqrt(ratio), (ends[0], ends[1]), min(n, m), PValues(min(1.0, 2 * p), min(1.0, 2 * (1 - p)))


def corrected(values: Sequence[float]) -> list[float]:
    """Holm's correction of the p-values of one scale."""
    return [float(p) for p in multipletests(values, method="holm")[1]] if values else []


def detectable(deviation: float, seeds: int, df: float, tests: int = 1) -> float:
    """The smallest contrast that a two-sided t test decides in 80 of 100 repetitions, as the first of so many tests.

    delta = c s / sqrt(n), where a noncentral t of noncentrality c exceeds t_(1 - a / 2), a = 0.05 / tests, with probability 0.8.
    """
    return _noncentrality(df, tests) * deviation / math.sqrt(seeds)


@lru_cache
def _noncentrality(df: float, tests: int) -> float:
    critical = float(stats.t.ppf(1 - SIGNIFICANCE / tests / 2, df))
    close = critical + float(stats.t.ppf(POWER, df))
    if df > 200:
        return close
    return float(brentq(lambda c: stats.nct.sf(critical, df, c) - POWER, close / 4, 3 * close))


def provable_margin(deviation: float, seeds: int, df: float, tests: int = 1) -> float:
    """The smallest margin within which two one-sided tests find a contrast of zero in 80 of 100 repetitions."""
    quantiles = stats.t.ppf([1 - SIGNIFICANCE / tests, (1 + POWER) / 2], df)
    return float(quantiles.sum()) * deviation / math.sqrt(seeds)


def seeds_needed(deviation: float | None, effect: float | None, tests: int, margin: bool = False) -> int | None:
    """How many seeds would decide an effect, or a margin; None where that is unknown or more than MOST_SEEDS."""
    if not deviation or not effect:
        return None
    reach = provable_margin if margin else detectable
    low, high = 2, MOST_SEEDS
    if reach(deviation, high, high - 1, tests) > abs(effect):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reach(deviation, middle, middle - 1, tests) <= abs(effect) else (middle + 1, high)
    return low
