"""Standard deviation between seeds in groups of recorded runs, and the differences that can be detected with it.

The deviation of a group is pooled over its settings: the root mean variance between seeds, weighted by degrees of freedom. The
residual deviation is what remains of it in comparisons seed by seed, see `residual_deviation`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd

from bitcycle.files import markdown_table
from bitcycle.reproduction.analysis.cells import Group, Run
from bitcycle.reproduction.analysis.statistics import detectable, residual_deviation

TITLES = (
    *("data, network", "scale", "steps, batch", "settings", "runs"),
    *("standard deviation", "residual", "detectable, n = 3", "n = 10", "hours"),
)
LEAST_FREEDOM = 4
"""Minimum degrees of freedom for showing a residual deviation; two settings with two seeds each have only one."""


def spreads(recorded: Iterable[Run]) -> pd.DataFrame:
    """Deviations of groups of runs.

    Returns:
        one row per group, in the order of the runs: the fields of Group; settings, runs and hours; the deviation between
        seeds, NaN if no setting has two; the residual deviation and its degrees of freedom.
    """
    numbers = [(*run.group, *run.training, run.number("final"), run.number("seconds") / 3600) for run in recorded]
    runs = pd.DataFrame(numbers, columns=[*Group._fields, "hash", "seed", "final", "hours"])
    found = []
    for key, group in runs.groupby(list(Group._fields), sort=False):
        finals = group.groupby("hash")["final"]
        between = finals.count() - 1
        deviation = math.sqrt((finals.var() * between).sum() / between.sum()) if between.sum() else math.nan
        remaining, freedom = residual_deviation(dict(zip(zip(group["hash"], group["seed"]), group["final"])))
        found.append((*key, len(between), len(group), group["hours"].sum(), deviation, remaining, freedom))
    columns = [*Group._fields, "settings", "runs", "hours", "deviation", "remaining", "freedom"]
    return pd.DataFrame(found, columns=columns)


def spread_table(recorded: Iterable[Run]) -> str:
    """A Markdown table of the groups with repeated seeds, followed by totals."""
    found = spreads(recorded)
    lines = []
    for one in found[found.deviation.notna()].itertuples():
        numbers = [""] * 3
        if one.freedom >= LEAST_FREEDOM:
            shown = [detectable(math.sqrt(2) * one.remaining, seeds, one.freedom) for seeds in (3, 10)]
            numbers = [f"{x:.2f}" for x in (one.remaining, *shown)]
        where = (f"{one.data}, {one.model}", one.scale, f"{one.steps} of {one.batch}", one.settings, one.runs)
        lines.append((*where, f"{one.deviation:.2f} ({one.metric})", *numbers, f"{one.hours:.2f}"))
    single, runs, hours = found.runs[found.deviation.isna()].sum(), found.runs.sum(), found.hours.sum()
    below = f"{single} further runs have one seed each. All {runs} recorded runs took {hours:.1f} hours of training."
    return f"{markdown_table(TITLES, lines)}\n\n{below}"
