"""When a schedule pays: its gain over static precision of equal cost, against how well static precision fits its training images,
and against the price of training for fewer steps."""

from collections.abc import Sequence
from typing import NamedTuple, Optional

from matplotlib.axes import Axes

from bitcycle.picture.layout import legend, panels
from bitcycle.reproduction.analysis.aggregation import Cell
from bitcycle.reproduction.analysis.contrast import Pool, contrast, matches
from bitcycle.reproduction.analysis.gain import Comparison, comparisons
from bitcycle.reproduction.analysis.labels import our_model, schedule_of
from bitcycle.reproduction.analysis.metrics import estimate_of
from bitcycle.reproduction.analysis.statistics import Estimate
from bitcycle.reproduction.figure.board import STATIC, claims_of_board
from bitcycle.reproduction.figure.data import ItemData, Panel, cost_against, panels_of
from bitcycle.reproduction.figure.plots import INTERVALS, draw_points, label_axes, point
from bitcycle.reproduction.figure.style import PROFILES, Drawing, Style
from bitcycle.reproduction.figure.table import Table, interval, number, signed

COLOURS = {"RTH": PROFILES["rex"], "CR": PROFILES["cosine"]}
MARKERS = {"ResNet-8": "o", "ResNet-20": "s", "ResNet-38": "^"}


class Row(NamedTuple):
    """A schedule at one length on one network."""

    network: str  # with its data
    one: Comparison
    fit: Optional[Estimate]  # training accuracy of static 8 bits of equal length; None if it is not recorded
    gain: Estimate  # over static 8 bits of equal cost
    price: Estimate  # static 8 bits of equal length over that of equal cost

    @property
    def steps(self) -> int:
        """Length of the schedule's run."""
        return int(self.one.full.runs[0].row["total_steps"])


def rows_of(data: ItemData) -> list[Row]:
    """All schedules with a static run of equal cost, by network and length."""
    return [row for panel in panels_of(data) for row in _rows(panel, data.pool)]


def _rows(panel: Panel, pool: Pool) -> list[Row]:
    static = [cell for cell in panel.cells if matches(cell, STATIC)]
    found = []
    for one in comparisons([cell for cell in panel.cells if cell not in static], static):
        gain, price = (_over(pool, cell, one) for cell in (one.schedule, one.full))
        if gain and price:
            found.append(Row(panel.name, one, estimate_of(one.full, "fit"), gain, price))
    return found


def _over(pool: Pool, cell: Cell, one: Comparison) -> Estimate | None:
    return contrast([cell], [one.equal], (), ("final", "final")).estimate(pool)


def draw_gain(data: ItemData) -> Drawing | None:
    """Draw the gains against the training accuracy of static 8 bits, and against the price of training for fewer steps."""
    rows = rows_of(data)
    if not rows:
        return None
    figure, (left, right) = panels(2, width=5.4, height=4.2)
    for row in rows:
        if row.fit:
            _draw(left, row, row.fit.mean)
        _draw(right, row, row.price.mean)
    end = max(row.price.mean for row in rows)
    right.plot(
        [0, end], [0, end], color="0.35", linestyle="--", linewidth=1, label="as good as static 8 bits of full length"
    )
    for axes in (left, right):
        axes.axhline(0, color="0.35", linewidth=1)
    gain = "gain over static 8 bits of equal cost, points"
    proxy = ", a proxy" if data.results.scale != "paper" else ""
    title = f"{rows[0].network.partition(', ')[2]}{proxy}; numbers: steps"
    label_axes(left, title, "accuracy of static 8 bits on its training images (%)", gain, 70)
    label_axes(right, "the same", "price: what static 8 bits loses by training for fewer steps, points", gain, 70)
    legend(figure, (left, right), 4)
    return Drawing(
        figure,
        "What a schedule gains over static 8 bits of equal cost, that is with fewer steps, paired by seed. Left: against how well"
        " static 8 bits of full length fits (last 5 % of the steps, with augmentation). Right: against the price of these fewer"
        f" steps; on the dashed line a schedule loses nothing. {INTERVALS}. {data.results.trials}.",
    )


def _draw(axes: Axes, row: Row, place: float) -> None:
    name, model = schedule_of(row.one.schedule), our_model(row.one.full)
    draw_points(
        axes, Style(f"{name}, {model}", COLOURS.get(name, "0.35"), MARKERS.get(model, "D")), [point(place, row.gain)]
    )
    axes.annotate(
        f"{row.steps:,}", (place, row.gain.mean), xytext=(5, 4), textcoords="offset points", fontsize=6.5, color="0.35"
    )


def tables(data: ItemData) -> list[Table]:
    """The gains as a table, then the claims; empty if there are no runs."""
    rows = rows_of(data)
    if not rows:
        return []
    return [Table("Gains over static 8 bits of equal cost", _records(rows, data)), *claims_of_board(data, "estimate")]


def _records(rows: Sequence[Row], data: ItemData) -> list[dict[str, str]]:
    return [
        {
            "schedule": schedule_of(row.one.schedule),
            "network and data": row.network,
            "scale": data.results.scale or "",
            "steps": f"{row.steps:,}",
            "cost relative to static 8 bits": number(cost_against(row.one.schedule, row.one.full)),
            "training accuracy of static 8 bits": number(row.fit.mean if row.fit else None),
            "test accuracy of static 8 bits": number(
                found.mean if (found := estimate_of(row.one.full, "final")) else None
            ),
            "price of fewer steps": signed(row.price.mean),
            "gain": signed(row.gain.mean),
            "95 % interval": interval(row.gain, signed),
            "n": str(row.gain.n),
        }
        for row in rows
    ]
