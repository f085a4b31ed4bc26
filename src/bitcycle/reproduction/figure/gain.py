"""When a schedule pays: its gain over static precision of equal cost, against how well static precision fits its training images,
and against the price of training for fewer steps."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from numpy import linspace

from bitcycle.picture.layout import legend, panels
from bitcycle.reproduction.analysis.cells import numbers_of_seeds
from bitcycle.reproduction.analysis.gain_table import Row, gain_rows
from bitcycle.reproduction.analysis.metrics import estimate_of
from bitcycle.reproduction.figure.board import claims_of_board
from bitcycle.reproduction.figure.data import ItemData, cost_against
from bitcycle.reproduction.figure.plots import INTERVALS, draw_points, label_axes, point
from bitcycle.reproduction.figure.style import PROFILES, Drawing, Style
from bitcycle.reproduction.figure.table import Table, interval, number, signed

COLOURS = {"RTH": PROFILES["rex"], "CR": PROFILES["cosine"]}
MARKERS = {"ResNet-8": "o", "ResNet-20": "s", "ResNet-38": "^"}
SMALLEST, LARGEST = 3.5, 8.5  # points, of the shortest and the longest training


def draw_gain(data: ItemData) -> Drawing | None:
    """Draw the gains against the training accuracy of static 8 bits, and against the price of training for fewer steps."""
    rows = gain_rows(data.results.done, data.pool)
    if not rows:
        return None
    figure, (left, right) = panels(2, width=5.4, height=4.2)
    _draw(left, [(row, row.fit.mean) for row in rows if row.fit])
    _draw(right, [(row, row.price.mean) for row in rows])
    end = max(row.price.mean for row in rows)
    right.plot(
        [0, end], [0, end], color="0.35", linestyle="--", linewidth=1, label="as good as static 8 bits of full length"
    )
    for axes in (left, right):
        axes.axhline(0, color="0.35", linewidth=1)
    gain = "gain over static 8 bits of equal cost, points"
    proxy = ", a proxy" if data.results.scale != "paper" else ""
    label_axes(left, f"{rows[0].data}{proxy}", "accuracy of static 8 bits on its training images (%)", gain, 70)
    label_axes(right, "the same", "price: what static 8 bits loses by training for fewer steps, points", gain, 70)
    legend(figure, (left, right), 4)
    return Drawing(
        figure,
        "What a schedule gains over static 8 bits of equal cost, that is with fewer steps, paired by seed. Left: against how well"
        " static 8 bits of full length fits (last 5 % of the steps, with augmentation). Right: against the price of these fewer"
        f" steps; on the dashed line a schedule loses nothing. {INTERVALS}; {numbers_of_seeds(row.gain.n for row in rows)}.",
    )


def _draw(axes: Axes, placed: Sequence[tuple[Row, float]]) -> None:
    """Points, which are larger the longer the training."""
    lengths = sorted({row.steps for row, _ in placed})
    sizes = dict(zip(lengths, linspace(SMALLEST, LARGEST, len(lengths)).tolist(), strict=True))
    for row, place in placed:
        label, colour = f"{row.schedule}, {row.network}", COLOURS.get(row.schedule, "0.35")
        style = Style(label, colour, MARKERS.get(row.network, "D"), size=sizes[row.steps])
        draw_points(axes, style, [point(place, row.gain)])
    for steps, size in sizes.items():
        axes.plot([], [], "o", color="0.6", markersize=size, label=f"{steps:,} steps")


def tables(data: ItemData) -> list[Table]:
    """The gains as a table, then the claims; empty if there are no runs."""
    rows = gain_rows(data.results.done, data.pool)
    if not rows:
        return []
    return [Table("Gains over static 8 bits of equal cost", _records(rows, data)), *claims_of_board(data, "estimate")]


def _records(rows: Sequence[Row], data: ItemData) -> list[dict[str, str]]:
    return [
        {
            "schedule": row.schedule,
            "network and data": f"{row.network}, {row.data}",
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
            "difference to static 8 bits of equal length": signed(row.at_length.mean),
            "its 95 % interval": interval(row.at_length, signed),
            "n": str(row.gain.n),
        }
        for row in rows
    ]
