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
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

Row = Mapping[str, str]
SIGNIFICANCE, POWER = 0.05, 0.8


@dataclass(frozen=True)
class Spread:
    """The runs of one network on one data set at one length.

    Attributes:
        scale: paper, mini or smoke.
        model: the network.
        dataset: the data, and how many samples were trained on where that is a part.
        metric: what is measured.
        steps: length of the runs.
        batch_size: samples of a step.
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
    steps: int
    batch_size: str
    runs: int
    settings: int
    freedom: int
    deviation: float | None
    remaining: float | None
    seconds: float

    def detectable(self, seeds: int) -> float | None:
        """The smallest difference of two settings that this many seeds of each are likely to show.

        Raises:
            ValueError: if `seeds` is not positive.
        """
        if seeds < 1:
            raise ValueError(f"seeds={seeds} is not positive: say how many runs each setting has")
        return None if self.remaining is None else self.remaining * _factor(self.freedom) * math.sqrt(2 / seeds)


def _factor(freedom: int) -> float:
    return float(student.ppf(1 - SIGNIFICANCE / 2, freedom) + student.ppf(POWER, freedom))


def spreads(rows: Iterable[Row]) -> list[Spread]:
    """The deviation of every group of rows of runs.csv, in the order of the file."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        batch_size = str(json.loads(row["settings"])["training"]["batch_size"])
        groups[row["scale"], row["model"], data_of(row), row["metric"], row["total_steps"], batch_size].append(row)
    return [_spread(key, found) for key, found in groups.items()]


def data_of(row: Row) -> str:
    """The data set of a row of runs.csv, with the number of samples if a part was trained on: `cifar10 (1,000 samples)`."""
    samples = json.loads(row["settings"])["dataset"].get("train_samples")
    return row["dataset"] if samples is None else f"{row['dataset']} ({samples:,} samples)"


def _spread(key: Sequence[str], rows: Sequence[Row]) -> Spread:
    settings: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        settings[row["hash"]].append(float(row["final"]))
    repeated = [finals for finals in settings.values() if len(finals) > 1]
    between = sum(len(finals) - 1 for finals in repeated)
    squares = sum(statistics.variance(finals) * (len(finals) - 1) for finals in repeated)
    finals = {(row["hash"], row["seed"]): float(row["final"]) for row in rows}
    remaining, freedom = pooled(finals)
    scale, model, dataset, metric, steps, batch_size = key
    return Spread(
        *(scale, model, dataset, metric, int(steps), batch_size),
        runs=len(rows),
        settings=len(settings),
        freedom=freedom,
        deviation=math.sqrt(squares / between) if between else None,
        remaining=remaining,
        seconds=sum(float(row["seconds"]) for row in rows),
    )


def pooled(values: Mapping[tuple[str, str], float]) -> tuple[float | None, int]:
    """The deviation beside the effects of settings and seeds, by least squares, and its degrees of freedom.

    Args:
        values: (setting, seed) -> number; settings with one seed say nothing.
    """
    repeated = Counter(setting for setting, _ in values)
    known = {key: value for key, value in values.items() if repeated[key[0]] > 1}
    names = sorted({(0, setting) for setting, _ in known} | {(1, seed) for _, seed in known})
    if not known:
        return None, 0
    design = np.array([[key[column] == value for column, value in names] for key in known], dtype=float)
    numbers = np.array(list(known.values()))
    effects, _, rank, _ = np.linalg.lstsq(design, numbers, rcond=None)
    freedom = len(known) - int(rank)
    if freedom == 0:
        return None, 0
    return math.sqrt(float(np.square(numbers - design @ effects).sum()) / freedom), freedom


def spread_table(rows: Iterable[Row]) -> str:
    """All groups in which a setting has two seeds, as Markdown; the others are summed up below."""
    found = spreads(rows)
    known = [spread for spread in found if spread.deviation is not None]
    lines = [
        "| data, network | scale | steps, batch | settings | runs | deviation | beside the seed's | detectable, n = 3 | n = 10 "
        "| hours |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for spread in known:
        cells = (spread.remaining, spread.detectable(3), spread.detectable(10))
        numbers = " | ".join("" if cell is None else f"{cell:.2f}" for cell in cells)
        lines.append(
            f"| {spread.dataset}, {spread.model} | {spread.scale} | {spread.steps} of {spread.batch_size} | {spread.settings} "
            f"| {spread.runs} | {spread.deviation:.2f} ({spread.metric}) | {numbers} | {spread.seconds / 3600:.2f} |"
        )
    single = [spread for spread in found if spread.deviation is None]
    hours = sum(spread.seconds for spread in found) / 3600
    lines += [
        "",
        f"{sum(spread.runs for spread in single)} further runs have one seed each. All {sum(spread.runs for spread in found)} "
        f"recorded runs took {hours:.1f} hours of training.",
    ]
    return "\n".join(lines)
