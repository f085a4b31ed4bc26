"""What is drawn: panels, differences, intervals, the board; and what is not."""

from __future__ import annotations

import runpy
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
import scipy.stats
import yaml
from matplotlib.lines import Line2D

from bitcycle.files import read_csv, write_csv
from bitcycle.picture.layout import legend, panels, render
from bitcycle.reproduction.analysis.cells import Cell, Results, read_runs
from bitcycle.reproduction.analysis.collect import SUMMARY
from bitcycle.reproduction.analysis.contrast import Pool
from bitcycle.reproduction.analysis.facts import fact, select
from bitcycle.reproduction.analysis.items import PAPERS, Item
from bitcycle.reproduction.analysis.statistics import over_seeds
from bitcycle.reproduction.figure import board, data
from bitcycle.reproduction.figure.data import ItemData, differences, gather, panels_of, status_line, timed, timed_panels
from bitcycle.reproduction.figure.make import board_items, draw_item, inputs_of, make_item, write_picture
from bitcycle.reproduction.figure.plots import draw_curve, forest, side_by_side
from bitcycle.reproduction.figure.style import Drawing, Style
from tests.conftest import ROOT
from tests.reproduction.figures_cases import CYCLIC, ITEMS, SMALL, STATIC, claim_result, data_of, made_up, proxied

# Panels, differences and what is drawn


def test_the_same_trainings_are_one_panel():
    pair = (
        made_up(45.0, **CYCLIC, model="resnet8", dataset="cifar10", scale="mini"),
        made_up(46.0, **STATIC, model="resnet8", dataset="cifar10", scale="mini"),
    )
    networks = ("resnet74", "resnet152", "mobilenet_v2")
    data = data_of(
        "better/fig3", *(proxied(cell, name, "cifar100") for name in networks for cell in pair), scale="mini"
    )
    (panel,) = panels_of(data)
    assert panel.title == "ResNet-8, CIFAR-10, 64,000 steps"
    assert panel.proxy_for == ("ResNet-74, CIFAR-100", "ResNet-152, CIFAR-100", "MobileNetV2, CIFAR-100")
    assert len(panel.cells) == 2
    assert "2 distinct trainings in 6 of 6 cells" in status_line(data)


def on(processor: str, hour: int, *cells: Cell) -> list[Cell]:
    """Cells whose runs, of a seed of their own, lasted half an hour on a processor, beside each other."""
    found = []
    for minute, cell in enumerate(cells, start=30):
        times = {"processor": processor, "seconds": "1800", "finished": f"2026-11-26T{hour:02}:{minute}:00+00:00"}
        runs = tuple(replace(run, row={**run.row, **times, "seed": str(hour)}) for run in cell.runs)
        found.append(replace(cell, runs=runs))
    return found


def test_times_are_those_of_one_processor():
    """Three runs of a CPU and one of a GPU are no curve over time; runs that had the machine to themselves are preferred, unless
    they fill less than half of the settings."""
    cells = [made_up(50.0, **STATIC, **SMALL, training__steps=steps) for steps in (2000, 4000, 8000)]
    shared, other, alone = on("CPU", 1, *cells), on("GPU", 3, cells[0]), on("CPU", 5, cells[0]) + on("CPU", 7, cells[1])

    def found(*several: Cell) -> tuple[str, int]:
        pool = Pool([run for cell in several for run in cell.runs])
        (panel,) = panels_of(data_of("partial/fig2", *several, pool=pool))
        name = timed(panel).name
        return name.removeprefix(f"{panel.name}; "), len(timed(panel).cells)

    first, second = (replace(one, runs=one.runs + more.runs) for one, more in zip(shared, alone))
    assert found(*shared, *other) == ("CPU, shared", 3)
    assert found(first, *shared[1:]) == ("CPU, shared", 3)
    assert found(first, second, shared[2]) == ("CPU, alone", 2)
    once = [on("XEON", hour, cell)[0] for hour, cell in enumerate(cells, start=9)]
    assert found(*once) == ("XEON, alone", 3)
    twice = [on("CPU", hour, cell)[0] for hour, cell in enumerate(cells[:2], start=13)]
    several = [replace(cell, runs=cell.runs + more.runs) for cell, more in zip(alone, twice)]
    both = [replace(cell, runs=cell.runs + more.runs) for cell, more in zip(once, several)]
    assert found(*both, once[2]) == ("CPU, alone", 2), "twelve seeds of a decided claim, not one of each setting"


def test_times_of_shared_machines_are_left_out_beside_others():
    """Of runs on a GPU that four and more others shared, those of 64,000 steps took less time than those of 32,000."""
    ours = [made_up(50.0, **STATIC, **SMALL, training__steps=steps) for steps in (2000, 4000)]
    theirs = [
        made_up(70.0, **STATIC, dataset="cifar10", model="resnet38", training__steps=steps) for steps in (2000, 4000)
    ]
    alone = [run for hour, cell in enumerate(ours) for run in on("CPU", hour, cell)]

    def found(*several: Cell) -> tuple[int, str]:
        pool = Pool([run for cell in several for run in cell.runs])
        panels, words = timed_panels(panels_of(data_of("partial/fig2", *several, pool=pool)))
        return len(panels), words

    shared = on("GPU", 9, *theirs)
    assert found(*on("CPU", 1, *ours), *shared) == (2, "")
    assert found(*alone) == (1, "")
    panels, words = found(*alone, *shared)
    assert panels == 1 and words.endswith("; GPU.") and "Left out" in words


def test_intervals_are_those_of_a_paired_t_test():
    ours, base = made_up(71.0, 75.0, 74.0, 99.0, **CYCLIC, **SMALL), made_up(70.0, 72.0, 72.0, **STATIC, **SMALL)
    (panel,) = panels_of(data_of("cpt/table2", ours, base))
    (found,) = differences(panel, panel.first({"schedule": "static"}), "best").values()
    test = scipy.stats.ttest_rel([71, 75, 74], [70, 72, 72]).confidence_interval(0.95)
    assert (found.mean, found.interval(), found.n) == (2.0, pytest.approx((test.low, test.high)), 3)


def test_few_seeds_take_the_pooled_deviation_or_none():
    assert over_seeds([1.0], (0.5, 10)).interval()[1] == pytest.approx(1 + 0.5 * scipy.stats.t.ppf(0.975, 10))
    assert over_seeds([1.0, 2.0]).interval() is None


def test_a_caption_of_means_promises_no_pooled_deviation():
    """Points of partial/fig1 with one seed are hollow, and the caption said that their bars have the pooled deviation."""
    cells = [made_up(50.0, 51.0, **STATIC, **SMALL, training__steps=steps) for steps in (2000, 4000)]
    runs = [run for cell in cells for run in cell.runs]
    figure, caption = draw_item(data_of("partial/fig1", *cells, pool=Pool(runs)))
    assert {line.get_markerfacecolor() for line in figure.axes[0].get_lines() if line.get_marker() != "None"} == {
        "white"
    }
    assert "pooled" not in caption and "hollow points have fewer than three seeds" in caption and "n = 2." in caption
    plt.close(figure)


@pytest.mark.parametrize("name", ["cpt/fig1", "fractrain/fig4"])
def test_a_caption_of_differences_has_the_number_of_pairs(name):
    """Figure 4 of FracTrain said n = 8 to 90 of differences of at most ten seeds, figure 3 of Better Schedules nothing."""
    pfq = made_up(
        71.0, 72.0, 74.0, schedule="pfq", schedule__epsilon=0.05, schedule__stages="[3,8]", gbitops=50, **SMALL
    )
    cells = pfq, made_up(70.0, 72.0, 72.0, 71.0, **STATIC, gbitops=100, **SMALL)
    assert "; n = 3." in drawn(data_of(name, *cells)).caption


def test_a_network_without_static_8_bits_is_compared_with_its_costliest_static_precision():
    """Trainings of ResNet-38 in figure 5 of FracTrain, at 2, 3 and 4 bits and by DFQ, were not drawn."""
    low, base = (
        made_up(*values, schedule="static", schedule__q_max=q, schedule__gradient=6, gbitops=cost, **SMALL)
        for values, q, cost in (((28.0, 30.0, 31.0), 2, 75.0), ((36.0, 37.0, 38.0), 4, 170.0))
    )
    cells = made_up(39.0, 38.0, 40.0, schedule="dfq", schedule__target=1.0, gbitops=158.0, **SMALL), low, base
    figure, caption = draw_item(data_of("fractrain/fig5", *cells))
    assert "differences to static 4/6 bits of equal seeds" in caption and "n = 3." in caption
    assert figure.axes[0].get_xlabel() == "bit operations relative to static 4/6 bits"
    assert "static 4/6 bits" in figure.axes[0].get_legend_handles_labels()[1]
    plt.close(figure)


def cyclic_and_static(missing: int, final: float = 70.0) -> ItemData:
    pair = made_up(final - 1, gbitops=60.0, **CYCLIC, **SMALL), made_up(final, gbitops=100.0, **STATIC, **SMALL)
    return data_of("cpt/fig1", *pair, *(Cell({"seed": str(n)}, {}) for n in range(missing)))


def drawn(data: ItemData) -> Drawing | None:
    found = draw_item(data)
    plt.close("all")
    return found


def test_runs_are_drawn_however_few_of_the_cells_have_some():
    assert drawn(cyclic_and_static(missing=9)).caption.startswith("Ours:")


def test_settings_at_the_ceiling_are_not_compared():
    assert drawn(cyclic_and_static(0)) and not drawn(cyclic_and_static(0, final=99.7))


@pytest.mark.parametrize(
    ("paper", "item"), [("better", "fig6"), ("better", "fig4"), ("hlhlp", "fig1"), ("hlhlp", "appH")]
)
def test_published_or_computed_numbers_alone_are_no_picture(paper, item):
    """Bars of published differences stood on an axis of accuracies, costs that are computed as if they were measured."""
    assert drawn(data_of(f"{paper}/{item}")) is None


def test_two_evaluations_are_no_curve():
    data = cyclic_and_static(0)
    for cell in data.results.cells:
        object.__setattr__(
            cell.runs[0], "curve", {"evaluations": {"step": [500, 1000], "value": [40.0, 45.0], "gbitops": [1, 2]}}
        )
    assert "Differences to static" in drawn(data).caption.replace("Ours: d", "D")
    for cell in data.results.cells:
        steps = list(range(100, 1100, 100))
        object.__setattr__(cell.runs[0], "curve", {"evaluations": {"step": steps, "value": steps, "gbitops": steps}})
    assert "band" in drawn(data).caption


def test_a_curve_over_costs_that_depend_on_the_seed_has_their_means():
    """FracTrain's mean accuracy over seeds stood at the costs of the first seed."""
    cell = made_up(90.0, 92.0, schedule="fractrain", **SMALL)
    for run, cost in zip(cell.runs, (1.0, 3.0)):
        steps = list(range(1, 6))
        evaluations = {"step": steps, "gbitops": [cost * step for step in steps], "value": [50.0] * 5}
        object.__setattr__(run, "curve", {"evaluations": evaluations})
    figure, (axes,) = panels(1)
    draw_curve(axes, cell, Style("FracTrain"), "gbitops")
    assert list(axes.get_lines()[0].get_xdata()) == [2.0, 4.0, 6.0, 8.0, 10.0]
    plt.close(figure)


def test_points_of_equal_cost_stand_side_by_side():
    places = side_by_side({0: 0.4, 1: 0.4, 2: 0.401, 3: 1.0})
    assert len(set(places.values())) == 4 and places[3] == 1.0
    assert sorted(places.values())[1] == pytest.approx(0.4003, abs=1e-3)


def test_titles_are_one_line_and_fit():
    for name, paper in (("fig3", "cpt"), ("fig2", "better")):
        data = data_of(f"{paper}/{name}")
        figure = draw_item(data).figure
        assert "\n" not in figure.get_suptitle()
        box = figure._suptitle.get_window_extent()
        assert box.width <= figure.bbox.width
        plt.close(figure)


def test_forest_has_a_panel_for_each_unit():
    rows = [
        claim_result("cpt/fig1-c1", estimate=1.0, low=0.5, high=1.5, published_value=0.9),
        claim_result(
            "cpt/fig1-c2", "undecided", estimate=-1.0, low=-2.0, high=0.5, decided=False, leaning="contradicted"
        ),
        claim_result("cpt/table5-c1", estimate=2.0, unit="ppl"),
        claim_result("partial/fig1-c1", estimate=1.2, unit="x"),
    ]
    figure = forest(rows).figure
    assert [axes.get_xlabel() for axes in figure.axes] == ["pp", "ppl", "ratio"]
    assert [axes.lines[0].get_xdata()[0] for axes in figure.axes] == [0, 0, 1]  # where there is no effect
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["cpt/fig1-c1", "cpt/fig1-c2"]
    plt.close(figure)


def test_forest_shows_margins_and_where_lower_is_better():
    numbers = {"low": 0.5, "high": 1.5, "unit": "perplexity", "margin": 3.0}
    margins = ("equivalent", "all_equivalent", "at_least", "at_most", "none_better")
    rows = [claim_result(f"cpt/fig1-c{n}", estimate=1.0, predicate=one, **numbers) for n, one in enumerate(margins)]
    axes = forest(
        [*rows, claim_result("cpt/fig1-c9", estimate=1.0, predicate="higher", **{**numbers, "margin": None})]
    ).figure.axes[0]
    strokes = [line for line in axes.get_lines() if line.get_marker() == "|"]
    assert [tuple(map(float, (*line.get_xdata(), *line.get_ydata()))) for line in strokes] == [
        *((-3.0, 0.0), (3.0, 0.0), (-3.0, 1.0), (3.0, 1.0), (-3.0, 2.0), (3.0, 3.0), (3.0, 4.0)),
    ]
    assert axes.get_xlabel() == "perplexity (lower is better)"
    plt.close("all")


def test_forest_tells_a_claim_that_is_supported_in_part():
    """Seven claims stood among those that are supported."""
    numbers = {"estimate": 1.0, "low": 0.5, "high": 1.5, "leaning": "supported"}
    rows = [claim_result(f"cpt/fig1-c{n}", one, **numbers) for n, one in enumerate(["supported", "supported in part"])]
    figure = forest(rows).figure
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["ours, proxy: supported", "ours, proxy: supported in part"]
    assert len({line.get_color() for line in figure.axes[0].get_lines()[1:]}) == 2
    plt.close(figure)


# The board


def board_of(*cells: Cell) -> ItemData:
    return ItemData(Item("board", "methods", "board", "methods", "board/methods"), Results("mini", cells))


def on_board(
    *values: float, steps: int = 2000, cost: float = 100.0, model: str = "resnet8", **settings: object
) -> Cell:
    return made_up(
        *values, gbitops=cost, training__steps=steps, model=model, dataset="cifar10_16", scale="mini", **settings
    )


def test_methods_are_compared_with_static_precision_of_equal_cost():
    """By hand: at 0.6 of the cost, static 8 bits has 52 and 53 (between 50, 51 at 0.5 and 60, 61 at 1.0), CR 54 and 57."""
    cells = [
        on_board(60, 61, **STATIC),
        on_board(50, 51, steps=1000, cost=50.0, **STATIC),
        on_board(54, 57, cost=60.0, **CYCLIC),
        on_board(70, 70, cost=60.0, model="resnet8_extra_skip", schedule="partial_pretrain"),
        on_board(40, 40, cost=30.0, schedule="RTH"),
        on_board(48, 48, cost=55.0, schedule="RR"),
        on_board(53, 53, cost=49.8, schedule="LR"),
    ]
    rows = {(row.cell.setting("schedule"), row.cost): row for row in board.rows_of(board_of(*cells))}
    assert rows["CR", 0.6].gap.mean == pytest.approx((54 - 52 + 57 - 53) / 2)
    assert rows["LR", 0.498].gap.mean == 2.5, "as cheap as the cheapest static run, up to half a percent"
    assert rows["RTH", 0.3].gap is None, "cheaper than every static run"
    assert rows["partial_pretrain", 0.6].gap is None, "another network"
    assert rows["static", 0.5].gap is None
    front = {key for key, row in rows.items() if row.best}
    assert front == {("RTH", 0.3), ("LR", 0.498), ("CR", 0.6), ("static", 1.0)}


@pytest.mark.parametrize("recorded", ["False", ""])
def test_the_best_perplexity_on_a_board_is_the_lowest(recorded):
    """The Pareto front was that of the worst, and still was for runs from before the direction of a metric was recorded."""
    cells = [
        on_board(100, 101, **STATIC),
        on_board(120, 121, steps=1000, cost=50.0, **STATIC),
        on_board(105, 106, cost=60.0, **CYCLIC),
        on_board(200, 200, cost=70.0, schedule="RTH"),
    ]
    for run in (run for cell in cells for run in cell.runs):
        run.row.update(metric="test_perplexity", higher_is_better=recorded)
    front = {(row.cell.setting("schedule"), row.cost) for row in board.rows_of(board_of(*cells)) if row.best}
    assert front == {("static", 0.5), ("CR", 0.6), ("static", 1.0)}


def test_a_seed_is_compared_as_soon_as_the_static_runs_around_its_cost_have_it():
    """The longest static run has one seed, which only what costs more than the second longest needs."""
    cells = [
        on_board(70, steps=2000, **STATIC),
        on_board(60, 61, steps=1600, cost=80.0, **STATIC),
        on_board(50, 51, steps=1000, cost=50.0, **STATIC),
        on_board(56, 59, cost=65.0, **CYCLIC),
        on_board(66, 66, cost=90.0, schedule="ETH"),
    ]
    rows = {row.cell.setting("schedule"): row for row in board.rows_of(board_of(*cells))}
    assert (rows["CR"].gap.mean, rows["CR"].gap.n) == (pytest.approx(2.0), 2)
    assert (rows["ETH"].gap.mean, rows["ETH"].gap.n) == (pytest.approx(1.0), 1)


def test_a_board_without_static_8_bits_shows_its_claims_alone():
    """The first runs of a new board are mostly those of its schedules; `make figures` ended with an IndexError."""
    item = Item("board", "fewer_bits", "board", "fewer bits", "board/fewer_bits")
    unfinished = ItemData(item, Results("mini", (on_board(54, 57, **CYCLIC),)), root=ROOT)
    (claims,) = board.tables(unfinished)
    assert claims.caption.startswith("Claims") and len(claims.records) == 2
    assert board.draw_board(unfinished) is None and board.tables(board_of(*unfinished.results.cells)) == []


def test_static_runs_of_equal_cost_are_one_baseline():
    """Two static settings of equal length could not be sorted. By hand: at 0.75 of the cost, static 8 bits has 56 for seed 0
    (between 50 and the mean of 60 and 64) and 55 for seed 1, which one of them has."""
    cells = [
        on_board(60, 60, **STATIC),
        on_board(64, **STATIC, training__learning_rate__initial=0.2),
        on_board(50, 50, steps=1000, cost=50.0, **STATIC),
        on_board(57, 58, cost=75.0, **CYCLIC),
    ]
    (row,) = [row for row in board.rows_of(board_of(*cells)) if row.cell.setting("schedule") == "CR"]
    assert (row.gap.mean, row.gap.n) == (pytest.approx(((57 - 56) + (58 - 55)) / 2), 2)


def test_without_shorter_static_runs_full_length_is_the_baseline():
    other = on_board(58, 58, 58, quantizer="fp8", **STATIC)
    cells = [on_board(60, 61, 62, **STATIC), on_board(59, 61, 60, cost=60.0, **CYCLIC), other]
    found = board.rows_of(board_of(*cells))
    rows = {(row.cell.setting("schedule"), row.cell.setting("quantizer")): row for row in found}
    assert rows["CR", "sbm"].gap.mean == -1.0 and rows["static", "fp8"].gap.mean == -3.0
    assert board.reference(found) == "static 8 bits of full length"
    cells[2] = on_board(58, 58, 58, cost=90.0, quantizer="fp8", **STATIC)  # the cheaper one was taken for the baseline
    figure, _ = board.draw_board(board_of(*cells))
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert labels == {"static 8 bits, by its steps", "static, by its bits, fp8", "cyclic"}
    plt.close(figure)


def test_board_has_a_picture_and_a_table_that_name_the_proxy():
    cells = [
        on_board(60, 61, 62, **STATIC),
        on_board(50, 51, 52, steps=1000, cost=50.0, **STATIC),
        on_board(54, 57, 55, cost=60.0, **CYCLIC),
    ]
    figure, caption = board.draw_board(board_of(*cells))
    assert "16x16: a proxy" in figure.axes[0].get_title().replace("\n", " ") and "n = 3" in caption
    (table,) = board.tables(board_of(*cells))
    rows = [dict(zip(table.headings, row)) for row in table.rows]
    assert [row["method"] for row in rows] == ["static 8 bits, 50 % of the steps", "CR 3-8 bits", "static 8 bits"]
    assert rows[1]["difference to static 8 bits of equal cost"].startswith("+") and rows[1]["scale"] == "mini"
    assert draw_item(board_of(*(Cell({"seed": str(n)}, {}) for n in range(2)))) is None
    plt.close(figure)


def test_a_difference_on_a_board_has_its_own_number_of_seeds(tmp_path, monkeypatch):
    """Static 6 bits were listed as better than static 8 bits of equal cost with n = 4: one of their seeds had a partner."""
    cells = [
        on_board(60, 61, 62, **STATIC),
        on_board(50, 51, 52, steps=1000, cost=50.0, **STATIC),
        on_board(74, 77, 75, 76, cost=60.0, **CYCLIC),
    ]
    alone = on_board(80, 80, 80, 80, cost=70.0, schedule="static", schedule__q_max=6)
    for seed, run in enumerate(alone.runs, start=2):
        run.row["seed"] = str(seed)
    runs = [run for cell in cells for run in cell.runs]
    data = replace(board_of(*cells, alone), pool=Pool(runs))
    (table,) = board.tables(data)
    found = {row["method"]: (row["n"], row["n of the difference"]) for row in table.records}
    assert (
        found["CR 3-8 bits"] == ("4", "3") and found["static 6 bits"] == ("4", "1") and found["static 8 bits"][1] == ""
    )
    figure, caption = board.draw_board(data)
    assert "n = 3 to 4, of differences n = 1 to 3" in caption and "hollow: fewer than three" in caption
    plt.close(figure)
    script = runpy.run_path(str(ROOT / "scripts" / "board.py"))
    monkeypatch.setitem(script["board_list"].__globals__, "PAGE", tmp_path / "x.md")
    write_csv(tmp_path / "made.csv", table.headings, table.records)
    lines = script["board_list"]("made")
    assert "CR 3-8 bits" in lines and "n = 3)" in lines and "6 bits" not in lines


# Papers do not know each other


def test_no_code_is_of_one_paper_alone():
    for room in ("analysis", "figure"):
        names = {path.stem for path in (ROOT / "src" / "bitcycle" / "reproduction" / room).rglob("*.py")}
        assert not names & set(PAPERS)
    files = {path.stem: yaml.safe_load(path.read_text()) for path in data.DESCRIPTIONS.glob("*.yaml")}
    assert set(files) == {*PAPERS, "board"}
    for paper, content in files.items():
        boards = {f"board/{path.stem}" for path in (ROOT / "sweeps" / "board").glob("*.yaml")}
        assert {f"{paper}/{name}" for name in content.get("items", {})} <= {*ITEMS, *boards}


def test_a_paper_without_a_description_still_has_its_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "DESCRIPTIONS", tmp_path)
    data._content.cache_clear()
    entry = make_item(data_of("cpt/table2"), tmp_path)
    data._content.cache_clear()
    assert entry.picture is None and len(entry.tables[0].rows) == 120


def test_cells_of_another_sweep_stand_beside_those_of_a_picture_and_count_nowhere_else():
    """Appendix E of HLHLp had one of three quantizers beside fine-tuning: the runs of the others are those of table 3."""
    pool = Pool(read_runs(read_csv(ROOT / SUMMARY), ROOT / SUMMARY))
    found = gather(ITEMS["hlhlp/appE"], pool, ROOT)
    assert all(fact(cell, "phases") == "HLHLp" for cell in found.beside)
    assert {fact(cell, "quantizer") for cell in found.beside} == {"ternary", "multibit"}
    assert found.drawn.results.cells == (*found.results.cells, *found.beside)
    assert "hlhlp" not in {cell.ours["schedule"] for cell in found.results.cells if cell.ours["quantizer"] == "ternary"}
    assert replace(found, results=replace(found.results, cells=())).drawn.results.cells == ()


def test_figures_show_the_runs_of_a_board_that_tests_their_claims_in_another_regime():
    """The claims of cpt/fig1 and better/fig3 are tested with all images, and their pictures had none of these runs."""
    pool = Pool(read_runs(read_csv(ROOT / SUMMARY), ROOT / SUMMARY))
    regime = gather(next(item for item in board_items(ROOT / "sweeps") if item.name == "all_images"), pool, ROOT)
    trained = [claim for claim, row in board.board_verdicts(regime) if row.estimate is not None]
    restated = {name.rpartition("-")[0]: claim for claim in trained for name in claim.restates}
    assert {"cpt/fig1", "better/fig3"} <= set(restated)
    for name, claim in restated.items():
        found = gather(ITEMS[name], pool, ROOT)
        shown = {run.training for cell in found.beside for run in cell.runs}
        tested = {run.training for cell in select(regime.results.done, claim.a) for run in cell.runs}
        assert tested <= shown, f"{name} does not show what {claim.id} tests"
        assert draw_item(found.drawn).caption.endswith(" Also shown: runs of board/all_images.")


def test_a_legend_is_hollow_only_if_all_points_of_a_label_are():
    """All markers of partial/fig1 stood hollow in its legend, which is said to mean fewer than three seeds."""
    figure, axes = plt.subplots()
    for label, filling in (("some", "white"), ("some", "red"), ("some", "white"), ("none", "white")):
        axes.errorbar([0], [0], [1], fmt="o", markerfacecolor=filling, label=label)
    legend(figure, [axes])
    lines = [
        line for line in figure.findobj(Line2D, include_self=False) if line.axes is None and line.get_marker() == "o"
    ]
    assert [line.get_markerfacecolor() for line in lines] == ["red", "white"]
    plt.close(figure)


# Unchanged pictures are not redrawn


def test_only_what_has_changed_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    drawn = []

    def draw() -> Drawing:
        drawn.append(1)
        figure, axes = plt.subplots(figsize=(1, 1))
        axes.fill_between([0, 1], [0, 1], hatch="/")  # hatches have names in SVG files
        return Drawing(figure, "a caption")

    def make_once(inputs: list[object]) -> bytes:
        monkeypatch.setattr("bitcycle.cache._in_memory", {})  # as in another process
        picture = write_picture("x", inputs, tmp_path / "x", draw)
        assert picture.caption == "a caption"
        return b"".join(file.read_bytes() for file in picture.files)

    first = make_once([1])
    assert make_once([1]) == first and len(drawn) == 1
    assert make_once([2]) == first and len(drawn) == 2, "equal pictures are equal bytes"
    (tmp_path / "x.png").write_bytes(b"")
    assert make_once([2]) == first and len(drawn) == 2, "a file that was changed is restored"
    assert write_picture("x", [3], tmp_path / "x", lambda: None) is None
    assert not (tmp_path / "x.png").exists(), "no picture of results that are gone"


def recorded(
    name: str, *cells: Cell, metric: str = "", value: str = "", busy: tuple[tuple[str, str], ...] = ()
) -> ItemData:
    """An item beside two other settings of its group, one of whose metrics is `value` instead of 50."""
    others = [run for settings in (CYCLIC, STATIC) for run in made_up(50.0, 50.0, **settings, **SMALL).runs]
    others[0] = replace(others[0], row={**others[0].row, **({metric: value} if metric else {})})
    return data_of(name, *cells, pool=Pool([*others, *(run for cell in cells for run in cell.runs)], busy))


@pytest.mark.parametrize(("item", "metric", "other"), [("cpt/fig5", "best", "final"), ("better/fig3", "final", "best")])
def test_a_picture_depends_on_the_pooled_deviation_of_its_metric(item, metric, other):
    """The pictures of CPT and FracTrain, which draw the best metric, kept intervals with the deviations of earlier runs."""
    cell = made_up(50.0, schedule="RTH", **SMALL)
    before = inputs_of(recorded(item, cell))
    assert before != inputs_of(recorded(item, cell, metric=metric, value="60"))
    assert before == inputs_of(recorded(item, cell, metric=other, value="60"))


def test_a_picture_over_time_depends_on_who_had_the_machine_alone():
    cells = on("CPU", 1, made_up(50.0, **STATIC, **SMALL))
    busy = (("2026-11-26T01:00:00+00:00", "2026-11-26T02:00:00+00:00"),)
    for name, differs in (("partial/fig2", True), ("partial/fig1", False)):
        assert (inputs_of(recorded(name, *cells)) != inputs_of(recorded(name, *cells, busy=busy))) == differs


def test_rounding_errors_of_the_layout_do_not_change_a_picture():
    """The solver numbers its variables on through a process: claims.svg depended on how many pictures were drawn before it."""
    pictures = set()
    for error in (0.0, 3e-14):
        figure = plt.figure(figsize=(2, 2))
        figure.add_axes((0.2 + error, 0.2, 0.7, 0.7)).plot([0, 1], [0, 1])
        pictures.add(render(figure)[".svg"])
    assert len(pictures) == 1
