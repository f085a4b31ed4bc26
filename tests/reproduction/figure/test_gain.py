"""The board of gains over static precision of equal cost, from made-up runs."""

from __future__ import annotations

from dataclasses import replace

import matplotlib.pyplot as plt
import pytest

from bitcycle.reproduction.analysis.cells import Results
from bitcycle.reproduction.analysis.contrast import Pool
from bitcycle.reproduction.analysis.items import Item
from bitcycle.reproduction.figure import gain
from bitcycle.reproduction.figure.data import ItemData
from tests.conftest import ROOT
from tests.reproduction.analysis.test_gain import arms


@pytest.fixture
def data() -> ItemData:
    cells = (*arms(noise=0.05), *arms(model="resnet8", fall=0.5, noise=0.05))
    pool = Pool([run for cell in cells for run in cell.runs])
    return ItemData(Item("board", "gain", "board", "gain", "board/gain"), Results("mini", cells), root=ROOT, pool=pool)


def test_table_of_gains(data: ItemData) -> None:
    rows, claims = gain.tables(data)
    first = rows.records[0]
    assert first["schedule"] == "RTH" and first["steps"] == "1,000" and first["n"] == "4"
    assert first["training accuracy of static 8 bits"] == "50.00" and first["price of fewer steps"] == "+5.00"
    gains = [float(row["gain"]) for row in rows.records]
    assert gains == pytest.approx([3, 2, 1, 3, 2.5, 2], abs=0.1)
    at_length = [float(row["difference to static 8 bits of equal length"]) for row in rows.records]
    prices = [float(row["price of fewer steps"]) for row in rows.records]
    assert at_length == pytest.approx([gain - price for gain, price in zip(gains, prices)], abs=0.02)
    assert claims.records[0]["verdict"] == "supported"


def test_the_caption_has_the_number_of_pairs(data: ItemData) -> None:
    """It said n = 4 to 8, the numbers of runs, of gains with four or five seeds."""
    runs = data.results.cells[0].runs
    more = replace(runs[0], row={**runs[0].row, "seed": "99"})
    cells = (replace(data.results.cells[0], runs=(*runs, more)), *data.results.cells[1:])
    figure, caption = gain.draw_gain(replace(data, results=Results("mini", cells)))
    assert caption.endswith("; n = 4.")
    plt.close(figure)


def test_points_stand_at_training_accuracy_and_at_the_price(data: ItemData) -> None:
    figure = gain.draw_gain(data).figure
    left, right = ([float(one.lines[0].get_xdata()[0]) for one in axes.containers] for axes in figure.axes[:2])
    assert left == [50, 70, 90, 50, 70, 90] and right == [5] * 6
    sizes = [one.lines[0].get_markersize() for one in figure.axes[0].containers]
    assert sizes[0] < sizes[1] < sizes[2], "longer trainings have larger points; numbers beside the points touched"
    plt.close(figure)


def test_without_runs_there_is_nothing_to_draw() -> None:
    empty = ItemData(Item("board", "gain", "board", "gain", "board/gain"), Results())
    assert gain.draw_gain(empty) is None and gain.tables(empty) == []
