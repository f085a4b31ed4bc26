"""The gains of schedules over static precision of equal cost, as estimates over seeds, for the board and `bitcycle advise`."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple, Optional

from bitcycle.reproduction.analysis.cells import Cell
from bitcycle.reproduction.analysis.contrast import Pool, contrast
from bitcycle.reproduction.analysis.facts import matches
from bitcycle.reproduction.analysis.gain import Comparison, comparisons
from bitcycle.reproduction.analysis.labels import our_data, our_model, schedule_of
from bitcycle.reproduction.analysis.metrics import estimate_of
from bitcycle.reproduction.analysis.statistics import Estimate

STATIC = {"schedule": "static", "fw": 8}
"""Static 8 bits of any length."""


class Row(NamedTuple):
    """A schedule at one length on one network."""

    schedule: str
    network: str
    data: str
    steps: int  # length of the schedule's run
    one: Comparison
    fit: Optional[Estimate]  # accuracy in percent of static 8 bits of equal length on its training data, if recorded
    gain: Estimate  # points over static 8 bits of equal cost
    price: Estimate  # points of static 8 bits of equal length over that of equal cost
    at_length: Estimate  # points over static 8 bits of equal length: the gain less the price


def gain_rows(cells: Iterable[Cell], pool: Pool) -> list[Row]:
    """All schedules that have a static run of equal cost, by network and length."""
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.runs:
            groups[our_model(cell), our_data(cell)].append(cell)
    found = []
    for (network, data), members in groups.items():
        static = [cell for cell in members if matches(cell, STATIC)]
        for one in comparisons([cell for cell in members if cell not in static], static):
            pairs = (one.schedule, one.equal), (one.full, one.equal), (one.schedule, one.full)
            gain, price, at_length = (contrast([a], [b], (), ("final",) * 2).estimate(pool) for a, b in pairs)
            if gain and price and at_length:
                steps, fit = int(one.full.runs[0].row["total_steps"]), estimate_of(one.full, "fit")
                found.append(Row(schedule_of(one.schedule), network, data, steps, one, fit, gain, price, at_length))
    return found
