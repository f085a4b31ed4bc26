"""The board: accuracy against training cost of all methods, and their differences to static 8 bits of equal cost.

Static 8 bits trained for fewer steps shows its accuracy at lower cost. Between these costs it is interpolated linearly for each
seed, so that every method can be compared with it at the method's own cost, on the same network and data.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from statistics import fmean
from typing import NamedTuple, Optional

import numpy as np
from matplotlib.axes import Axes

from bitcycle.picture.layout import legend, panels
from bitcycle.reproduction.analysis.cells import Cell, numbers_of_seeds
from bitcycle.reproduction.analysis.claims import Claim, read_claims
from bitcycle.reproduction.analysis.facts import fact, matches, select
from bitcycle.reproduction.analysis.frozen import read_families
from bitcycle.reproduction.analysis.gain_table import STATIC
from bitcycle.reproduction.analysis.items import BOARDS
from bitcycle.reproduction.analysis.labels import backward_bits, forward_bits, schedule_of
from bitcycle.reproduction.analysis.metrics import readings
from bitcycle.reproduction.analysis.statistics import OWN_SEEDS, Estimate, over_seeds
from bitcycle.reproduction.analysis.verdict import ClaimResult, judge
from bitcycle.reproduction.figure.data import ItemData, Panel, cost_against, metric_name, our_network, panels_of
from bitcycle.reproduction.figure.plots import draw_points, label_axes, log_axis, point, side_by_side
from bitcycle.reproduction.figure.style import STYLES, Drawing, Style
from bitcycle.reproduction.figure.table import PAIRS, Table, interval, number, signed
from bitcycle.schedule import SUITE

COLUMN = "final"
NAMED = 8
"""Largest number of methods whose cyclic schedules and static bits are written beside their points."""
EQUAL = 0.005
"""Relative difference of costs that count as equal at the ends of the static runs, whose steps are whole numbers."""


Baseline = tuple[float, Mapping[str, float]]
"""Cost of static runs, and their metric by seed."""


class Row(NamedTuple):
    """A method on the board."""

    network: str
    cell: Cell
    cost: float  # relative to static 8 bits
    value: Estimate
    gap: Optional[Estimate]  # difference to static 8 bits at equal cost
    best: bool  # on the Pareto front


def method_name(cell: Cell, longest: int) -> str:
    """A method with its bits, its quantizer if not the default, and its fraction of the steps if it is a shortened run."""
    schedule, bits = schedule_of(cell), forward_bits(cell)
    words = {"32": "float", "dynamic": schedule}.get(bits, f"{schedule} {bits} bits")
    if cell.setting("quantizer", "sbm") not in ("sbm", "none"):
        words += f", {cell.setting('quantizer', 'sbm')}, gradients {backward_bits(cell)}"
    share = fact(cell, "steps") / longest
    return words if share > 0.99 or schedule != "static" else f"{words}, {100 * share:.0f} % of the steps"


def static_cells(panel: Panel) -> list[Cell]:
    """The cells of static 8 bits, the longest and most repeated first; only those with the quantizer of the first."""
    found = sorted(select(panel.cells, STATIC), key=lambda cell: (-fact(cell, "steps"), -len(cell.runs)))
    return [cell for cell in found if cell.setting("quantizer", "sbm") == found[0].setting("quantizer", "sbm")]


def static_curve(panel: Panel, costs: Mapping[int, float]) -> list[Baseline]:
    """The static runs, cheapest first; those of equal cost are one, with their mean for each seed."""
    base, found = static_cells(panel), dict[float, dict[str, list[float]]]()
    for index, cost in costs.items():
        if panel.cells[index] in base:
            values = found.setdefault(cost, {})
            for seed, value in readings(panel.cells[index], COLUMN).items():
                values.setdefault(seed, []).append(value)
    return [(cost, {seed: fmean(several) for seed, several in found[cost].items()}) for cost in sorted(found)]


def gaps_at_equal_cost(panel: Panel, costs: Mapping[int, float]) -> dict[int, Estimate]:
    """Index of a cell -> its difference to static 8 bits of equal cost; of full length, if there are no shorter runs."""
    base, curve = static_cells(panel), static_curve(panel, costs)
    found = dict[int, list[float]]()
    for index, cost in costs.items():
        around = [] if panel.cells[index] in base else _around(curve, cost)
        for seed, value in readings(panel.cells[index], COLUMN).items():
            if around and all(seed in values for _, values in around):
                places, values = zip(*((place, values[seed]) for place, values in around), strict=True)
                found.setdefault(index, []).append(value - float(np.interp(cost, places, values)))
    deviation, df = panel.pool.deviation(base[0].runs[0], COLUMN) if base else (None, 0)
    noise = None if deviation is None else math.sqrt(2) * deviation, df
    return {index: over_seeds(values, noise) for index, values in found.items()}


def _around(curve: Sequence[Baseline], cost: float) -> list[Baseline]:
    """The static runs that a cost lies between, or that of equal cost at an end; all if there is one; none beyond the ends."""
    if len(curve) < 2:
        return list(curve)
    if not curve[0][0] * (1 - EQUAL) <= cost <= curve[-1][0] * (1 + EQUAL):
        return []
    after = bisect_left(curve, cost, key=itemgetter(0))
    return list(curve[max(0, after - 1) : after + 1])


def reference(rows: Sequence[Row]) -> str:
    """The baseline of the differences, in words."""
    lengths = {fact(row.cell, "steps") for row in rows if matches(row.cell, STATIC)}
    return "static 8 bits of equal cost" if len(lengths) > 1 else "static 8 bits of full length"


def rows_of(data: ItemData) -> list[Row]:
    """All methods, cheapest first, with costs relative to static 8 bits of full length."""
    every = panels_of(data)
    first = next((base for panel in every if (base := next(iter(static_cells(panel)), None))), None)
    if first is None:
        return []
    found = []
    for panel in every:
        costs = {i: cost for i, cell in enumerate(panel.cells) if (cost := cost_against(cell, first)) is not None}
        values = {i: over_seeds(list(v.values())) for i in costs if (v := readings(panel.cells[i], COLUMN))}
        gaps = gaps_at_equal_cost(panel, costs)
        found += [Row(panel.name, panel.cells[i], costs[i], value, gaps.get(i), False) for i, value in values.items()]
    sign = 1 if first.runs[0].higher_is_better else -1
    found.sort(key=lambda row: (row.cost, -sign * row.value.mean))
    top = float("-inf")
    for place, row in enumerate(found):
        if sign * row.value.mean > top and row.network == our_network(first):
            top, found[place] = sign * row.value.mean, row._replace(best=True)
    return found


def draw_board(data: ItemData) -> Drawing | None:
    """Draw accuracy against cost with the Pareto front, and differences to static 8 bits of equal cost."""
    rows = rows_of(data)
    if not rows:
        return None
    figure, (left, right) = panels(2, width=5.4, height=4.0)
    main = next(row for row in rows if matches(row.cell, STATIC) and row.gap is None)  # not another 8-bit format
    style = partial(style_of_row, main=main.cell.setting("quantizer", "sbm"))
    for row in rows:
        draw_points(left, style(row), [point(row.cost, row.value)])
    compared = [row for row in rows if row.gap]
    places = side_by_side({index: math.log(row.cost) for index, row in enumerate(compared)}, 0.012) if compared else {}
    for index, row in enumerate(compared):
        if row.gap:
            draw_points(right, style(row), [point(math.exp(places[index]), row.gap)], hollow=row.gap.n < OWN_SEEDS)
    if len(rows) <= NAMED:
        name_points(left, rows)
    front = [row for row in rows if row.best]
    left.step([row.cost for row in front], [row.value.mean for row in front], where="post", color="0.5", linewidth=1)
    right.axhline(0, color="0.35", linewidth=1)
    for axes, shown in ((left, rows), (right, compared)):
        log_axis(axes, [row.cost for row in shown] or [1.0])
    cost, metric = "bit operations of training relative to static 8 bits", metric_name([main.cell])
    label_axes(left, f"{main.network}: a proxy" if data.results.scale != "paper" else main.network, cost, metric, 60)
    label_axes(right, f"against {reference(rows)}", cost, f"{metric}, difference")
    legend(figure, (left, right), 5)
    how = ", with its steps reduced to match the cost (interpolated linearly)" if "equal" in reference(rows) else ""
    pairs = [row.gap.n for row in rows if row.gap]
    how += "; below three seeds with pooled deviations" if min(pairs, default=OWN_SEEDS) < OWN_SEEDS else ""
    fewest = min([row.value.n for row in rows] + pairs)
    hollow = " (hollow: fewer than three seeds)" if fewest < OWN_SEEDS else ""
    counts = f"{numbers_of_seeds(row.value.n for row in rows)}, of differences {numbers_of_seeds(pairs)}"
    return Drawing(
        figure,
        f"Left: means over seeds with 95 % intervals{hollow}; black outline and line: the Pareto front of the means; right:"
        f" differences to {reference(rows)}, paired by seed{how}; points of equal cost stand side by side."
        f" {counts}; {other_networks(rows, main.network)}",
    )


def name_points(axes: Axes, rows: Sequence[Row]) -> None:
    """Write the names of cyclic schedules, and the bits of static ones but 8, beside their points."""
    for row in rows:
        schedule, bits = schedule_of(row.cell), forward_bits(row.cell)
        if matches(row.cell, STATIC):
            continue
        words = schedule if schedule in SUITE else "float" if bits == "32" else f"{bits} bits"
        place, offset = (row.cost, row.value.mean), (7, -11) if schedule in SUITE else (4, 16)  # apart at equal cost
        axes.annotate(words, place, xytext=offset, textcoords="offset points", fontsize=8)


def style_of_row(row: Row, main: str) -> Style:
    """The style of a method; static 8 bits and other quantizers than `main` have markers of their own."""
    schedule, others = schedule_of(row.cell), STYLES["other_quantizers"]
    label, colour, marker = STYLES["board"].get("cyclic" if schedule in SUITE else schedule, (schedule, "0.5", "o"))
    quantizer = row.cell.setting("quantizer", "sbm")
    if label in others and quantizer not in (main, "none"):
        colour, marker = others[label]
        marker = STYLES["formats"].get(quantizer, marker)
        label = f"{label}, {quantizer}"
    elif matches(row.cell, STATIC):
        label, marker = "static 8 bits, by its steps", "<"
    return Style(label, colour, marker, "black" if row.best else None)


def other_networks(rows: Sequence[Row], network: str) -> str:
    """A sentence on the methods that were run on another network."""
    names = sorted({f"{schedule_of(row.cell)} on {row.network}" for row in rows if row.network != network})
    return f"on another network, and so without a difference: {'; '.join(names)}." if names else "one network."


def tables(data: ItemData) -> list[Table]:
    """The board as a table, if it has runs of static 8 bits, then its claims; empty if there are no runs."""
    if not data.results.done:
        return []
    rows = rows_of(data)
    longest = max((fact(row.cell, "steps") for row in rows), default=1)
    records = [
        {
            "method": method_name(row.cell, longest),
            "network and data": row.network,
            "scale": data.results.scale or "",
            "steps": f"{fact(row.cell, 'steps'):,}",
            "result": number(row.value.mean),
            "95 % interval": interval(row.value),
            "n": str(row.value.n),
            "cost relative to static 8 bits": number(row.cost),
            f"difference to {reference(rows)}": signed(row.gap.mean if row.gap else None),
            "95 % interval of the difference": interval(row.gap, signed),
            PAIRS: str(row.gap.n) if row.gap else "",
            "on the Pareto front": "yes" if row.best else "",
        }
        for row in rows
    ]
    methods = [Table("Our runs of all methods, cheapest first", records)] if records else []
    return [*methods, *claims_of_board(data, f"difference, {metric_name(data.results.done)}")]


def claims_of_board(data: ItemData, difference: str) -> list[Table]:
    """The verdicts on a board's own claims, in a column `difference` their estimates; empty if it has none."""
    records = [
        {
            "claim": row.sentence,
            "source": row.section,
            "verdict": row.verdict,
            difference: signed(row.estimate),
            "95 % interval": "" if row.low is None else f"{signed(row.low)} to {signed(row.high)}",
            "n": str(row.n or ""),
            "p, corrected": number(row.p_corrected),
            "remark": row.reason,
        }
        for _, row in board_verdicts(data)
    ]
    return (
        [Table("Claims of the board, in frozen families apart from the claims of the papers", records)]
        if records
        else []
    )


def board_verdicts(data: ItemData) -> list[tuple[Claim, ClaimResult]]:
    """The claims of a board, each with its verdict; none if it has no claims."""
    published = data.root / BOARDS / data.item.name
    claims = {claim.id: claim for claim in read_claims(published)} if published.is_dir() else {}
    verdicts = judge(list(claims.values()), {data.item.id: data.results}, data.pool, read_families(published))
    return [(claims[row.claim_id], row) for row in verdicts]
