"""Partial pre-training: results against iterations and seconds, and how a budget is split between both phases."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from bitcycle.analysis.aggregation import Cell
from bitcycle.analysis.items import Published
from bitcycle.analysis.labels import dataset_of, model_of, precision_of, same, split_of
from bitcycle.figure.data import ItemData, metric_name, panels_of
from bitcycle.figure.plots import heat, points_by_setting, title
from bitcycle.figure.style import Drawing, look_of, panels
from bitcycle.figure.table import Spec

NAMES = {"full": "full precision", "partial": "partial pre-training", "low": "low precision"}


def partial_method(cell: Cell) -> str:
    """The method in the words of the paper."""
    return NAMES[precision_of(cell)]


def steps_of(cell: Cell) -> int:
    """Steps of our runs."""
    return int(cell.runs[0].row["total_steps"])


def seconds_of(cell: Cell) -> float:
    """Median training time of the runs."""
    return statistics.median([run.number("seconds") or 0.0 for run in cell.runs])


def splits(data: ItemData) -> Drawing | None:
    """Figure 3: the final metric by budget and split, as it is and relative to the even split of the same budget."""
    shown = panels_of(data)[:1] if data.complete_enough else []
    if not shown:
        return None
    values: dict[tuple[float, float], float] = {}
    for cell in shown[0].cells:
        if (value := cell.value("final")) is not None:
            total = steps_of(cell)
            values[round(split_of(cell) * total), total] = value.mean
    figure, axes = panels(2, columns=2, width=5.2, height=3.8)
    words = "iterations in full precision", "iterations in all"
    heat(axes[0], values, *words, metric_name(shown[0].cells))
    even = {total: value for (full, total), value in values.items() if 2 * full == total}
    gains = {(full, total): value - even[total] for (full, total), value in values.items() if total in even}
    heat(axes[1], gains, *words, "difference to the even split", difference=True)
    title(axes[0], shown[0].name)
    title(axes[1], f"{shown[0].name}: budgets with an even split")
    return Drawing(
        figure, f"Each square is one training ({data.results.trials}); the leftmost column is 1 bit throughout."
    )


# Which cell a printed number is about


def same_cell(row: Published, cell: Cell) -> bool:
    """Network, data and method agree, at the full length of training."""
    method = {"low-precision": "low precision"}.get(row["method"], row["method"])
    alike = same(row["model"], model_of(cell)) and same(row["dataset"], dataset_of(cell))
    return bool(cell.runs) and alike and method == partial_method(cell) and budget_of(cell) >= 1


FULL: Sequence[tuple[str, dict[str, int], int]] = (
    ("training.steps", {"movielens_20m": 387925}, 64000),
    ("training.epochs", {"imagenet": 90, "movielens_20m": 8}, 90),
)


def budget_of(cell: Cell) -> float:
    """Length of training relative to the full one, as the sweep says; 1 where it says nothing."""
    for key, full, default in FULL:
        if (value := cell.paper.get(key)) not in (None, "null"):
            return float(str(value)) / full.get(str(cell.setting("dataset", "cifar10")), default)
    return 1.0


def speed(cell: Cell) -> str:
    """Steps a second, the mean over seeds."""
    value = cell.value("steps_per_second")
    return f"{value.mean:.1f}" if value else ""


against = partial(points_by_setting, look=lambda cell: look_of(partial_method(cell)), column="final", log=True)
FIGURES: dict[str, Callable[[ItemData], Drawing | None]] = {
    "fig1": partial(against, place=steps_of, x="iterations (each point is a training of its own)"),
    "fig2": partial(
        against,
        place=seconds_of,
        x="seconds of training (median)",
        note=" Seconds of simulated precision on a machine that other runs shared.",
    ),
    "fig3": splits,
}
SPEC = Spec("final", same_cell, named=partial_method)
SPECS = {"table2": replace(SPEC, measures={"steps per second": speed})}
