"""What analyses of finished networks say, in numbers and pictures."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace

import matplotlib
import matplotlib.pyplot as plt
import pytest
from scipy.stats import sem, t

from bitcycle.picture.layout import UNDATED
from bitcycle.reproduction.analysis.cells import Cell, Results
from bitcycle.reproduction.analysis.claims import read_claims
from bitcycle.reproduction.analysis.contrast import Pool
from bitcycle.reproduction.analysis.metrics import reading, rise, rise_around
from bitcycle.reproduction.analysis.verdict import NOT_TESTED, UNDECIDED, judge
from bitcycle.reproduction.figure.data import ItemData, with_analyses_of
from bitcycle.reproduction.figure.landscape import contours, measured, network_name, radial_rise
from bitcycle.reproduction.figure.make import draw_item
from bitcycle.reproduction.measurement.artifacts import Result, run_name, write_result
from bitcycle.sweep.registry import Sweep
from tests.conftest import ROOT
from tests.reproduction.figures_cases import ITEMS, made_up

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
    assert rise(made_surface(lambda r: 3 if 0.45 <= r <= 0.55 else 1.0 if r == 0 else 1000)) == 2, "one grid step wide"


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
        ({"static": 6.0, "pfq_manual": 4.0, "CR": 3.0}, 3, -1.0),
        ({"static": 3.0, "pfq_manual": 4.0, "CR": 6.0}, 3, 0.5),
        ({"static": 3.0, "pfq_manual": 4.0, "CR": 2.0}, 0, None),
    ],
)
def test_wider_minima(slopes, pairs, expected):
    """Half of the slopes' differences, as the rise is taken at half of the radius, of progressive precision; that of CPT is the
    second part of the claim. One network of each decides nothing."""
    claim = next(claim for claim in read_claims(ROOT / "results" / "published") if claim.id == "cpt/fig2-c1")
    (found,) = judge([claim], {claim.item: Results("paper", tuple(three_cells(slopes, pairs)))}, Pool([]))
    assert found.verdict == (UNDECIDED if pairs else NOT_TESTED)
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
    assert "3 pairs of random directions" in panels[2].get_title().replace("\n", " ")
    assert "21 x 21 points on 10 training images" in caption and "Trainings of each network: 1." in caption
    plt.close("all")


def test_the_loss_rises_with_the_distance():
    rises = radial_rise(made_surface(lambda r: 7 + 2 * r))
    assert list(rises) == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert list(rises.values()) == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0], abs=0.05)


def test_only_surfaces_that_the_sweep_asks_for_are_averaged(tmp_path):
    """A surface of the test images from the command line was averaged with that of the sweep, and one of extent 0.25 ended
    `make figures` with a StatisticsError."""
    (made,) = made_up(90.0, schedule="CR").runs
    run = replace(made, row={**made.row, "hash": "a"}, curves=tmp_path / "curves")
    asked = made_surface(lambda r: r)
    others = {"b": {"split": "test"}, "c": {"extent": 0.25}, "d": {"seed": 1}}
    for name, options in {"a": {}, **others}.items():
        header = {**asked.header, "options": {**asked.options, **options}, "columns": list(asked.rows[0])}
        rows = asked.rows if name == "a" else [{**row, "loss": "9"} for row in asked.rows]
        write_result(tmp_path / "analyses" / f"{run_name(run.row)}-{name}.csv", Result(header, rows))
    (tmp_path / "analyses" / f"{run_name(run.row)}-e.csv").write_text("damaged")
    sweep = Sweep(analyses=[{"kind": "surface", "points": 21, "at_scale": {"mini": {"points": 15}}}])
    (own,) = with_analyses_of(sweep, [run])
    assert [result.options for result in own.analyses] == [asked.options]
    assert reading(own, "rise") == pytest.approx(0.5, abs=0.02)
    (same,) = with_analyses_of(Sweep(), [run])
    assert len(same.analyses) == 5


def test_the_seeds_of_a_measurement_are_its_units_and_not_its_severities():
    """The bars were intervals over severities and seeds alike: six points of HLHLp's errors under corruption, where the seeds
    differ by tenths. By hand: both severities rise by one from seed to seed, so that the means are 31, 32 and 33."""
    cell = made_up(70.0, 70.0, 70.0, dataset="imagenet", model="resnet18", schedule="hlhlp", schedule__bits="[2,8,2]")
    for seed, run in enumerate(cell.runs):
        errors = {"1": 21.0 + seed, "2": 41.0 + seed}
        rows = [{"corruption": "blur", "severity": key, "error_percent": str(value)} for key, value in errors.items()]
        header = {"kind": "corruption", "units": 1, "done": 1, "runs": [{"seed": seed, "phase": None}]}
        vars(run)["analyses"] = [Result(header, rows)]
    data = ItemData(ITEMS["hlhlp/appD"], Results("mini", (cell,)))
    figure, caption = measured(data, "corruption", "corruption", "error_percent", "error (%)")
    ((line, _, (bar,)),) = (drawn.lines for drawn in figure.axes[0].containers)
    ends = t.interval(0.95, 2, 32, sem([31, 32, 33]))
    assert line.get_ydata() == [32] and [y for _, y in bar.get_segments()[0]] == pytest.approx(ends)
    assert caption.endswith("with 95 % intervals over seeds; n = 3.")
    plt.close(figure)


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


def made_plane(cells: list[Cell], split: str) -> Result:
    """A plane through the networks of two cells, the first of which is looked at twice."""
    names = [(cells[0], 1), (cells[0], None), (cells[1], None)]
    runs = [{"scale": "mini", "hash": c.runs[0].row["hash"], "seed": 0, "phase": phase} for c, phase in names]
    corners = [{"network": str(n), "x": x, "y": y} for n, (x, y) in enumerate([(0, 0), (4, 0), (0, 4)], 1)]
    grid = [{"network": "", "x": x, "y": y} for y in range(-1, 6) for x in range(-1, 6)]
    rows = [{**row, "loss": row["x"] + row["y"], "error_percent": 10 + row["x"]} for row in corners + grid]
    header = {"kind": "plane", "options": {"split": split, "points": 7}, "units": 1, "done": 1, "runs": runs}
    facts = {"samples": 10}
    return Result({**header, "facts": facts}, [{key: str(value) for key, value in row.items()} for row in rows])


def test_planes_and_measurements_name_their_networks():
    common = {"dataset": "cifar10", "model": "resnet20", "quantizer": "uniform_l2"}
    cells = [made_up(90.0, scale="mini", schedule=name, **common) for name in ("fine_tuning", "hlhlp")]
    noise = [{"noise": name, "cer_percent": rate} for name, rate in (("none", "1.0"), ("white", "2.0"))]
    header = {"kind": "noise", "options": {}, "units": 1, "done": 1, "runs": [{"phase": None}]}
    vars(cells[0].runs[0])["analyses"] = []
    vars(cells[1].runs[0])["analyses"] = [made_plane(cells, "test"), Result(header, noise)]
    for name, titles in (("fig1", ["FLOAT, Hlp, HLHLp"]), ("appH", None), ("appF", [""])):
        drawing = draw_item(ItemData(ITEMS[f"hlhlp/{name}"], Results("mini", tuple(cells))))
        assert (drawing is None) == (titles is None), name
        if drawing:
            assert drawing.figure.axes[0].get_title() == titles[0]
            assert drawing.caption.startswith("ResNet-20, CIFAR-10")
        if name == "fig1":
            assert drawing.caption.endswith("; the first seed.")
    assert [text.get_text() for text in drawing.figure.axes[0].get_xticklabels()] == ["none", "white"]
    plt.close("all")


def test_networks_measured_on_few_seeds_are_not_drawn_beside_those_of_many():
    """One seed after two steps stood beside the means of 13 seeds, and was not that of a typical seed."""
    cell = made_up(90.0, 91.0, 92.0, scale="mini", schedule="hlhlp")
    noise = [{"noise": "none", "cer_percent": "1.0"}]
    for run, phases in zip(cell.runs, ((None, 2), (None,), (None,))):
        headers = [
            {"kind": "noise", "options": {}, "units": 1, "done": 1, "runs": [{"phase": phase}]} for phase in phases
        ]
        vars(run)["analyses"] = [Result(header, noise) for header in headers]
    figure, _ = draw_item(ItemData(ITEMS["hlhlp/appF"], Results("mini", (cell,))))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["HLHLp"]
    plt.close(figure)


def test_a_first_phase_of_two_bits_is_not_called_float():
    """HLHLp's appendix D starts from a float network: its first phase has 2 bits already."""
    whole, short = made_up(90.0, schedule="hlhlp"), made_up(90.0, schedule="hlhlp")
    short.runs[0].settings["schedule"]["bits"] = [2, 8, 2]
    assert [network_name(whole, phase) for phase in (1, 2, None)] == ["FLOAT", "HLp", "HLHLp"]
    assert [network_name(short, phase) for phase in (1, None)] == ["HLp", "HLHLp"]


def test_what_single_runs_recorded():
    level = {"bits": 3, "accuracy": 0.4, "rise": 0.3}
    test = {"level_steps": 10, "window": 2, "threshold": 0.1, "levels": [level, {**level, "bits": 4}], "q_min": 3}
    training = {"step": [1, 2], "loss": [2.0, 1.0], "weight": [3, 8], "gradient": [6, 8]}
    blocks = {"a": {"0/0": 0.5, "4/6": 0.5}, "b": {"0/0": 0.0, "4/6": 1.0}}
    curve = {"range_test": test, "observations": {"step": [1, 2], "accuracy": [30.0, 40.0]}}
    curve |= {"training": training, "allocation": {"1000": blocks, "500": blocks}}
    cell = made_up(90.0, dataset="cifar10", model="resnet38", schedule="fractrain")
    vars(cell.runs[0])["curve"], cell.runs[0].row["q_min"] = curve, "3"
    for name, panels in (("cpt/fig4", 1), ("fractrain/fig1", 2), ("fractrain/fig8", 2)):
        figure, _ = draw_item(ItemData(ITEMS[name], Results("paper", (cell,))))
        assert len(figure.axes) == panels, name
    assert [axes.get_title() for axes in figure.axes] == ["step 500 of 64,000", "step 1,000 of 64,000"]
    plt.close("all")
