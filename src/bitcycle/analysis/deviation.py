"""How much the recorded runs differ from seed to seed, and how small a difference so many seeds can show.

The deviation of a group of runs is pooled over its settings: the root of the mean variance between seeds, weighted by degrees of
freedom. Runs of equal seeds have initial weights and batches in common, and settings are compared seed by seed. What such a
comparison sees is the deviation s that remains in the model

    result of a setting with a seed = effect of the setting + effect of the seed + noise of variance s^2,

so that a difference between two settings with the same n seeds has the deviation s sqrt(2), see `statistics.detectable`.
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
    """Scale, network, data, metric, steps and batch size: runs with the same ones are taken to have the same deviation."""
    dataset = settings.get("dataset", {})
    words = {"vocabulary": "vocabulary of {:,}", "train_samples": "{:,} samples"}
    parts = [text.format(number) for name, text in words.items() if (number := dataset.get(name))]
    data = row.get("dataset", "") + (f" ({', '.join(parts)})" if parts else "")
    batch_size = str(settings.get("training", {}).get("batch_size", ""))
    return row["scale"], row.get("model", ""), data, row["metric"], row["total_steps"], batch_size


def spreads(rows: Iterable[Row]) -> pd.DataFrame:
    """One row for every group of rows of runs.csv, in the order of the file.

    Returns:
        the columns of GROUP; settings, runs and hours; deviation between seeds, NaN where no setting has two; what remains of it
        beside the effect that a seed has on all settings, and the degrees of freedom of that.
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
    """The deviation of (setting, seed) -> number beside the effects of both, by least squares, and its degrees of freedom."""
    table = pd.DataFrame([(*key, value) for key, value in values.items()], columns=["setting", "seed", "value"])
    table = table[table.duplicated("setting", keep=False)]  # a setting with one seed says nothing
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
"""Degrees of freedom below which the table leaves out what an estimate would pretend to know: two settings with two seeds each
have one, and may agree to the digit by chance."""


def spread_table(rows: Iterable[Row]) -> str:
    """All groups in which a setting has two seeds, as Markdown; the others are summed up below."""
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
