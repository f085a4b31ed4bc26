"""How much the recorded runs differ from seed to seed, and how small a difference so many seeds can show.

The deviation of a group of runs is pooled over its settings: the root of the mean variance between seeds, weighted by degrees of
freedom. Runs of equal seeds have initial weights and batches in common, and settings are compared seed by seed. What such a
comparison sees is the deviation s that remains in the model

    result of a setting with a seed = effect of the setting + effect of the seed + noise of variance s^2.

A difference between two settings with the same n seeds is detectable when a two-sided t-test at 5 % finds it in 80 of 100
repetitions, in the usual approximation

    delta = (t_0.975 + t_0.8) s sqrt(2 / n),    both quantiles with the degrees of freedom of s.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
from scipy.stats import t as student

from bitcycle.analysis.statistics import POWER, SIGNIFICANCE

Row = Mapping[str, str]
Group = tuple[str, str, str, str, str, str]


class Spread(NamedTuple):
    """The runs of one network on one data set at one length.

    Attributes:
        scale, model, dataset, metric, steps, batch_size: of all of them, see `group_of`.
        runs: number of runs.
        settings: number of different settings, of which each has one or more seeds.
        freedom: degrees of freedom of `remaining`.
        deviation: standard deviation between seeds, pooled; None where no setting has two.
        remaining: what remains of it beside the effect that a seed has on all settings; None where that cannot be told.
        seconds: time of all runs together.
    """

    scale: str
    model: str
    dataset: str
    metric: str
    steps: str
    batch_size: str
    runs: int
    settings: int
    freedom: int
    deviation: Optional[float]
    remaining: Optional[float]
    seconds: float

    def detectable(self, seeds: int) -> float | None:
        """The smallest difference of two settings that this many seeds of each are likely to show.

        Raises:
            ValueError: if `seeds` is not positive.
        """
        if seeds < 1:
            raise ValueError(f"seeds={seeds} is not positive: say how many runs each setting has")
        quantiles = student.ppf([1 - SIGNIFICANCE / 2, POWER], self.freedom).sum()
        return None if self.remaining is None else self.remaining * float(quantiles) * math.sqrt(2 / seeds)


def group_of(row: Row, settings: Mapping[str, Any]) -> Group:
    """Scale, network, data, metric, steps and batch size: runs with the same ones are taken to have the same deviation."""
    batch_size = str(settings.get("training", {}).get("batch_size", ""))
    return row["scale"], row.get("model", ""), data_of(row, settings), row["metric"], row["total_steps"], batch_size


def data_of(row: Row, settings: Mapping[str, Any] | None = None) -> str:
    """The data set of a row of runs.csv, with the number of samples if a part was trained on: `cifar10 (1,000 samples)`."""
    found = json.loads(row["settings"]) if settings is None else settings
    samples = found.get("dataset", {}).get("train_samples")
    return row.get("dataset", "") if samples is None else f"{row['dataset']} ({samples:,} samples)"


def spreads(rows: Iterable[Row]) -> list[Spread]:
    """The deviation of every group of rows of runs.csv, in the order of the file."""
    groups: dict[Group, list[Row]] = defaultdict(list)
    for row in rows:
        groups[group_of(row, json.loads(row["settings"]))].append(row)
    return [_spread(key, found) for key, found in groups.items()]


def _spread(key: Group, rows: Sequence[Row]) -> Spread:
    settings: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        settings[row["hash"]].append(float(row["final"]))
    repeated = [finals for finals in settings.values() if len(finals) > 1]
    between = sum(len(finals) - 1 for finals in repeated)
    squares = sum(statistics.variance(finals) * (len(finals) - 1) for finals in repeated)
    deviation = math.sqrt(squares / between) if between else None
    remaining, freedom = pooled({(row["hash"], row["seed"]): float(row["final"]) for row in rows})
    seconds = sum(float(row["seconds"]) for row in rows)
    return Spread(*key, len(rows), len(settings), freedom, deviation, remaining, seconds)


def pooled(values: Mapping[tuple[str, str], float]) -> tuple[float | None, int]:
    """The deviation beside the effects of settings and seeds, by least squares, and its degrees of freedom.

    Args:
        values: (setting, seed) -> number; settings with one seed say nothing.
    """
    repeated = Counter(setting for setting, _ in values)
    known = {key: value for key, value in values.items() if repeated[key[0]] > 1}
    if not known:
        return None, 0
    names = sorted({(0, setting) for setting, _ in known} | {(1, seed) for _, seed in known})
    design = np.array([[key[column] == value for column, value in names] for key in known], dtype=float)
    numbers = np.array(list(known.values()))
    effects, _, rank, _ = np.linalg.lstsq(design, numbers, rcond=None)
    freedom = len(known) - int(rank)
    squares = float(np.square(numbers - design @ effects).sum())
    return (math.sqrt(squares / freedom), freedom) if freedom else (None, 0)


TABLE = """\
| data, network | scale | steps, batch | settings | runs | deviation | beside the seed's | detectable, n = 3 | n = 10 | hours |
|---|---|---|---|---|---|---|---|---|---|
{rows}

{single} further runs have one seed each. All {runs} recorded runs took {hours:.1f} hours of training."""


def spread_table(rows: Iterable[Row]) -> str:
    """All groups in which a setting has two seeds, as Markdown; the others are summed up below."""
    found = spreads(rows)
    lines = []
    for one in (spread for spread in found if spread.deviation is not None):
        numbers = ("" if x is None else f"{x:.2f}" for x in (one.remaining, one.detectable(3), one.detectable(10)))
        where = (f"{one.dataset}, {one.model}", one.scale, f"{one.steps} of {one.batch_size}", one.settings, one.runs)
        cells = (*where, f"{one.deviation:.2f} ({one.metric})", *numbers, f"{one.seconds / 3600:.2f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    single = sum(spread.runs for spread in found if spread.deviation is None)
    hours = sum(spread.seconds for spread in found) / 3600
    return TABLE.format(rows="\n".join(lines), single=single, runs=sum(spread.runs for spread in found), hours=hours)
