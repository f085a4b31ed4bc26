"""What analyses of finished networks say, in numbers and pictures."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace

import matplotlib
import matplotlib.pyplot as plt
import pytest

from bitcycle.analysis.aggregation import Cell, Results
from bitcycle.analysis.claims import read_claims
from bitcycle.analysis.judge import judge
from bitcycle.analysis.landscape import rise, rise_around
from bitcycle.analysis.verdict import NOT_RUN, UNDECIDED
from bitcycle.figure.data import ItemData
from bitcycle.figure.landscape import contours, radial_rise
from bitcycle.figure.style import UNDATED
from bitcycle.measurement.artifacts import Result
from tests.conftest import ROOT
from tests.figures_cases import ITEMS, made_up

# What the results say


def made_surface(height, points: int = 21, seed: int = 0) -> Result:
    """A surface of a function of the radius."""
    places = [-1 + 2 * index / (points - 1) for index in range(points)]
    rows = [
        {"x": f"{x:.7g}", "y": f"{y:.7g}", "loss": str(height(math.hypot(x, y))), "error_percent": "0"}
        for y, x in itertools.product(places, places)
    ]
    options = {"extent": 1.0, "points": points, "seed": seed, "split": "train", "precision": "run"}
    runs = [{"scale": "mini", "hash": "a", "seed": 0, "phase": None}]
    facts = {"samples": 10, "bits": [8, 8]}
    header = {"kind": "surface", "options": options, "units": 1, "done": 1, "facts": facts, "runs": runs}
    return Result(header, rows)


def test_rise_is_the_mean_over_a_ring():
    assert rise(made_surface(lambda r: 7 + r)) == pytest.approx(0.5, abs=0.02)
    assert rise(made_surface(lambda r: 3 * r * r)) == pytest.approx(0.75, abs=0.06)
    assert rise(made_surface(lambda r: math.nan if r > 0.5 else 1.0)) == math.inf


def test_rise_around_a_network():
    """A wall beside the second network; the third is in the middle of a basin."""
    rows = [{"network": str(k), "x": x, "y": y} for k, (x, y) in enumerate([(0, 0), (4, 0), (0, 4)], 1)]
    rows += [{"network": "", "x": i / 2, "y": j / 2} for i in range(-2, 11) for j in range(-2, 11)]
    for row in rows:
        row["error_percent"] = 60 if row["x"] > 4.2 else 10
    plane = Result({"kind": "plane"}, [{key: str(value) for key, value in row.items()} for row in rows])
    assert rise_around(plane, 3) == 0 < rise_around(plane, 2) < 25
    assert rise_around(Result({"kind": "plane"}, plane.rows[:3]), 3) is None


def cell_with(surfaces: list[Result], **settings: object) -> Cell:
    """A cell with one run that has some surfaces."""
    cell = made_up(90.0, dataset="cifar100", model="resnet74", schedule__q_max=8, **settings)
    vars(cell.runs[0])["analyses"] = surfaces
    return cell


def three_cells(slopes: dict[str, float], pairs: int = 3) -> list[Cell]:
    """Static, progressive and cyclic precision with cones of some slopes, for pairs of directions."""
    return [
        cell_with(
            [made_surface(lambda r, slope=slope: 0.5 + slope * r, seed=seed) for seed in range(pairs)], schedule=name
        )
        for name, slope in slopes.items()
    ]


@pytest.mark.parametrize(
    ("slopes", "pairs", "expected"),
    [
        ({"static": 6.0, "pfq_manual": 4.0, "CR": 3.0}, 3, -1.25),
        ({"static": 3.0, "pfq_manual": 4.0, "CR": 6.0}, 3, 1.0),
        ({"static": 3.0, "pfq_manual": 4.0, "CR": 2.0}, 0, None),
    ],
)
def test_wider_minima(slopes, pairs, expected):
    """Half of the slopes' differences, as the rise is taken at half of the radius; one network of each decides nothing."""
    claim = next(claim for claim in read_claims(ROOT / "results" / "published") if claim.id == "cpt/fig2-c1")
    (found,) = judge([claim], {claim.item: Results("paper", tuple(three_cells(slopes, pairs)))})
    assert found.verdict == (UNDECIDED if pairs else NOT_RUN)
    assert found.estimate == (None if expected is None else pytest.approx(expected, abs=0.1))


def test_contours_show_what_there_is():
    cells = three_cells({"static": 6.0, "pfq_manual": 4.0})
    data = ItemData(ITEMS["cpt/fig2"], Results("paper", (*cells, Cell({}, {}))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure, caption = contours(data, "cpt_method_bits")
        flat = (cell_with([made_surface(lambda r: 20.0)], schedule="CR"),)
        contours(replace(data, results=Results("paper", flat)), "cpt_method_bits")
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [bool(axes.collections) for axes in panels[:2]] == [True, True]
    assert "3 pairs of random directions" in panels[2].get_title()
    assert "21 x 21 points on 10 training images" in caption
    plt.close("all")


def test_the_loss_rises_with_the_distance():
    rises = radial_rise(made_surface(lambda r: 7 + 2 * r))
    assert list(rises) == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert list(rises.values()) == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0], abs=0.05)


def test_without_measurements_there_is_no_picture():
    data = ItemData(ITEMS["cpt/fig2"], Results("mini", (cell_with([], schedule="CR"),)))
    assert contours(data, "cpt_method_bits") is None


def test_pictures_have_neither_dates_nor_random_names(tmp_path):
    figure, axes = plt.subplots(figsize=(1, 1))
    axes.fill_between([0, 1], [0, 1], hatch="/")  # hatches have names in SVG files
    contents = []
    for name, (suffix, metadata) in itertools.product("ab", UNDATED.items()):
        figure.savefig(tmp_path / f"{name}{suffix}", metadata=metadata)
        contents.append((tmp_path / f"{name}{suffix}").read_bytes())
    plt.close(figure)
    assert contents[:2] == contents[2:]
    assert b"<dc:date>" not in contents[1] and matplotlib.rcParams["svg.hashsalt"] == "bitcycle"
