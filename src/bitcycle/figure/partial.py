"""The pictures of partial pre-training: accuracy against iterations and wall-clock time, and the split between both phases."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from matplotlib.figure import Figure

from bitcycle.analysis.claims_partial import METHODS, numbers, partial_method, phase_steps, seconds_of, steps_of
from bitcycle.analysis.compare import Comparison
from bitcycle.analysis.items import Published
from bitcycle.analysis.labels import dataset_of, model_of, panel_of, same
from bitcycle.analysis.results import Cell
from bitcycle.figure.schematic import algorithm
from bitcycle.figure.style import COLOURS, ItemData, label_axes, legend, panel_title, panels, published_bars, titled


def against_iterations(data: ItemData) -> Figure:
    """Figure 1: minimum, median and maximum of the final metric against the number of iterations."""
    return _against(data, steps_of, "iterations (each point is a training of its own)")


def against_time(data: ItemData) -> Figure:
    """Figure 2: the same against the wall-clock time of the simulation."""
    return _against(data, seconds_of, "seconds of training (median; simulated precision)")


def _against(data: ItemData, place: Callable[[Cell], float], x: str) -> Figure:
    if not data.results.done:
        return published_bars(data)
    names = list(dict.fromkeys(panel_of(cell) for cell in data.results.done))
    figure, axes = panels(len(names), columns=2, width=4)
    for name, part in zip(names, axes, strict=True):
        for method in METHODS:
            cells = [c for c in data.results.done if panel_of(c) == name and partial_method(c) == method]
            cells.sort(key=place)
            values = [numbers(cell, "final") for cell in cells]
            places = [place(cell) for cell in cells]
            if not cells:
                continue
            middles = [statistics.median(group) for group in values]
            part.plot(places, middles, "o-", markersize=4, color=COLOURS[method], label=method)
            part.fill_between(
                places,
                [min(group) for group in values],
                [max(group) for group in values],
                color=COLOURS[method],
                alpha=0.2,
                linewidth=0,
            )
        part.set_xscale("log")
        of_panel = [cell for cell in data.results.done if panel_of(cell) == name]
        alike = ([cell for cell in of_panel if partial_method(cell) == method] for method in reversed(METHODS))
        shown = apart(sorted({place(cell) for cell in max(alike, key=len)}))
        part.set_xticks(shown, [f"{x:.3g}" if x < 1000 else f"{x / 1000:.3g}k" for x in shown])
        part.minorticks_off()
        part.set_title(panel_title(name, data.results))
        part.set_ylabel(
            next(c for c in data.results.done if panel_of(c) == name).runs[0].row["metric"].replace("_", " ")
        )
    label_axes(figure, axes, x, "")
    legend(figure, axes)
    words = "; ".join(
        f"{row['model']} {row['metric'].replace('_', ' ')} {row['printed']}"
        for row in data.published
        if "speedup" in row["metric"]
    )
    return titled(figure, data, f"median, band from minimum to maximum. Published: {words}")


def apart(places: Sequence[float], share: float = 0.12) -> list[float]:
    """Those of the ascending places whose labels fit beside each other on a logarithmic axis: so much of its length apart.

    >>> apart([1, 2, 2.1, 4, 100])
    [1, 2, 4, 100]
    """
    kept: list[float] = []
    least = (places[-1] / places[0]) ** share if places and places[0] > 0 else 1.0
    for here in places:
        if not kept or here >= kept[-1] * least:
            kept.append(here)
    return kept


def splits(data: ItemData) -> Figure:
    """Figure 3: accuracy over iterations in both phases, and against the split of equal budgets."""
    if not data.results.done:
        return published_bars(data)
    cells = [(phase_steps(cell), statistics.median(numbers(cell, "final"))) for cell in data.results.done]
    figure, (left, right) = panels(2, columns=2, width=4.4, height=3.4)
    shown = left.scatter(
        [f for (f, _), _ in cells],
        [low for (_, low), _ in cells],
        c=[value for _, value in cells],
        s=160,
        marker="s",
        cmap="viridis",
    )
    figure.colorbar(shown, ax=left, label="final test accuracy (%)")
    left.set_xlabel("iterations in full precision")
    left.set_ylabel("iterations in low precision")
    for budget in sorted({full + low for (full, low), _ in cells}):
        line = sorted((full / budget, value) for (full, low), value in cells if full + low == budget)
        if len(line) > 1:
            right.plot(
                [share for share, _ in line],
                [value for _, value in line],
                "o-",
                markersize=3,
                label=f"{budget} iterations",
            )
    right.axvline(0.5, color="0.6", linestyle=":", linewidth=1)
    right.set_xlabel("share of full precision")
    right.set_ylabel("final test accuracy (%)")
    legend(figure, [right])
    return titled(figure, data, "median over seeds; published: the even split is near the best at every budget")


# Which cell a printed number is about


def full_length(cell: Cell, cells: Sequence[Cell]) -> bool:
    """Whether a cell has the longest training of its network and method."""
    alike = [c for c in cells if panel_of(c) == panel_of(cell) and partial_method(c) == partial_method(cell) and c.runs]
    return bool(cell.runs) and steps_of(cell) == max(map(steps_of, alike), default=0)


def same_cell(row: Published, cell: Cell) -> bool:
    """Network, data and method agree, at the full length of training."""
    words = {"low-precision": "low precision"}
    method = words.get(row["method"], row["method"])
    return (
        bool(cell.runs)
        and same(row["model"], model_of(cell))
        and same(row["dataset"], dataset_of(cell))
        and method == partial_method(cell)
        and _budget(cell) >= 1
    )


def _budget(cell: Cell) -> float:
    """Length of training relative to the full one, as the sweep says; 1 where it says nothing."""
    for key, full in (
        ("training.steps", {"movielens_20m": 387925}),
        ("training.epochs", {"imagenet": 90, "movielens_20m": 8}),
    ):
        if (value := cell.paper.get(key)) not in (None, "null"):
            default = 64000 if key == "training.steps" else 90
            return float(str(value)) / full.get(str(cell.setting("dataset", "cifar10")), default)
    return 1.0


def _described(cell: Cell) -> dict[str, str]:
    full, low = phase_steps(cell)
    return {"method": partial_method(cell), "setting": f"{full} steps in full, {low} in low precision"}


FIGURES: dict[str, Callable[[ItemData], Figure]] = {
    "alg1": algorithm,
    "fig1": against_iterations,
    "fig2": against_time,
    "fig3": splits,
}
COMPARISON = Comparison("final", same_cell, describe=_described)
COMPARISONS: dict[str, Comparison] = {}
