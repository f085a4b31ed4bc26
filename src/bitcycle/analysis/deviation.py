"""Standard deviation between seeds in groups of recorded runs, and the differences that can be detected with it.

The deviation of a group is pooled over its settings: the root mean variance between seeds, weighted by degrees of freedom. Runs
of the same seed share initial weights and batches, and settings are compared seed by seed. The noise of such a comparison is the
residual deviation s of the model

    result(setting, seed) = effect of the setting + effect of the seed + noise of variance s^2,

so that a difference between two settings for one seed has the deviation s sqrt(2), see `statistics.detectable`.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from bitcycle.analysis.statistics import detectable

Row = Mapping[str, str]
GROUP = ("scale", "model", "data", "metric", "steps", "batch")


def group_of(row: Row, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns GROUP of a run, from its row and its settings; runs of one group are assumed to have the same deviation."""
    dataset = settings.get("dataset", {})
    words = {"vocabulary": "vocabulary of {:,}", "train_samples": "{:,} samples"}
    parts = [text.format(number) for name, text in words.items() if (number := dataset.get(name))]
    data = row.get("dataset", "") + (f" ({', '.join(parts)})" if parts else "")
    batch_size = str(settings.get("training", {}).get("batch_size", ""))
    return row["scale"], row.get("model", ""), data, row["metric"], row["total_steps"], batch_size


def spreads(rows: Iterable[Row]) -> pd.DataFrame:
    """Deviations of the groups in rows of runs.csv.

    Returns:
        one row per group, in the order of the file: the columns GROUP; number of settings and runs, hours; the deviation between
        seeds, NaN if no setting has two; the residual deviation and its degrees of freedom.
    """
    numbers = [(row["hash"], row["seed"], float(row["final"]), float(row["seconds"]) / 3600) for row in rows]
    runs = pd.DataFrame(numbers, columns=["hash", "seed", "final", "hours"])
    runs[list(GROUP)] = [group_of(row, json.loads(row["settings"])) for row in rows]
    found = []
    for key, group in runs.groupby(list(GROUP), sort=False):
        finals = group.groupby("hash")["final"]
        between = finals.count() - 1
        deviation = math.sqrt((finals.var() * between).sum() / between.sum()) if between.sum() else math.nan
        remaining, freedom = pooled(dict(zip(zip(group["hash"], group["seed"]), group["final"])))
        found.append((*key, len(between), len(group), group["hours"].sum(), deviation, remaining, freedom))
    return pd.DataFrame(found, columns=[*GROUP, "settings", "runs", "hours", "deviation", "remaining", "freedom"])


def pooled(values: Mapping[tuple[str, str], float]) -> tuple[float | None, int]:
    """The residual deviation of values by (setting, seed) after a least-squares fit of the effects of both, and its degrees of
    freedom."""
    table = pd.DataFrame([(*key, value) for key, value in values.items()], columns=["setting", "seed", "value"])
    table = table[table.duplicated("setting", keep=False)]  # a single seed has no residual
    if table.empty:
        return None, 0
    design, numbers = pd.get_dummies(table[["setting", "seed"]], dtype=float).to_numpy(), table["value"].to_numpy()
    effects, _, rank, _ = np.linalg.lstsq(design, numbers, rcond=None)
    freedom = len(table) - int(rank)
    squares = float(np.square(numbers - design @ effects).sum())
    return (math.sqrt(squares / freedom), freedom) if freedom else (None, 0)


HEAD = """\
| data, network | scale | steps, batch | settings | runs | standard deviation | residual | detectable, n = 3 | n = 10 | hours |
|---|---|---|---|---|---|---|---|---|---|"""
LEAST_FREEDOM = 4
"""Minimum degrees of freedom for showing a residual deviation; two settings with two seeds each have only one."""


def spread_table(rows: Iterable[Row]) -> str:
    """A Markdown table of the groups with repeated seeds, followed by totals."""
    found = spreads(list(rows))
    lines = []
    for one in found[found.deviation.notna()].itertuples():
        numbers = [""] * 3
        if one.freedom >= LEAST_FREEDOM:
            shown = [detectable(math.sqrt(2) * one.remaining, seeds, one.freedom) for seeds in (3, 10)]
            numbers = [f"{x:.2f}" for x in (one.remaining, *shown)]
        where = (f"{one.data}, {one.model}", one.scale, f"{one.steps} of {one.batch}", one.settings, one.runs)
        cells = (*where, f"{one.deviation:.2f} ({one.metric})", *numbers, f"{one.hours:.2f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    single, runs, hours = found.runs[found.deviation.isna()].sum(), found.runs.sum(), found.hours.sum()
    below = f"{single} further runs have one seed each. All {runs} recorded runs took {hours:.1f} hours of training."
    return "\n".join([HEAD, *lines, "", below])
