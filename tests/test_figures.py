"""Figures, tables and the page of results, from made-up runs with known numbers and from none."""

from __future__ import annotations

import ast
import csv
import gzip
import html
import importlib.util
import json
import re
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import scipy.stats

from bitcycle.analysis.claims import read_claims
from bitcycle.analysis.curves import curve_of, read_curve, write_curve
from bitcycle.analysis.items import KINDS, PAPERS, Item, read_items, read_published
from bitcycle.analysis.results import Cell, Results, Run, Value, plain
from bitcycle.analysis.verdict import ClaimResult
from bitcycle.figure import board, make
from bitcycle.figure.data import ItemData, differences, estimates, panels_of, status_line
from bitcycle.figure.drawn import Drawn
from bitcycle.figure.make import Places, make_all, make_item, module_of, spec_of, titled
from bitcycle.figure.page import write_pages
from bitcycle.figure.plots import forest, side_by_side
from bitcycle.figure.style import Drawing
from bitcycle.figure.table import as_records, number, tables_of
from bitcycle.training.run_folder import RunFolder, write_json
from tests.conftest import ROOT

PUBLISHED = ROOT / "results" / "published"
ITEMS = {item.id: item for item in read_items(PUBLISHED)}
CLAIMS = {claim.id: claim for claim in read_claims(PUBLISHED)}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")


# Made-up runs


def made_up(*values: float, scale: str = "paper", gbitops: float | None = None, **paper: object) -> Cell:
    """A cell with runs of these metrics; settings by words such as schedule__q_max."""
    settings = {name.replace("__", "."): str(value) for name, value in paper.items()}
    nested: dict[str, dict[str, object]] = {}
    for key in ("model", "dataset", "schedule", "quantizer"):
        nested[key] = {"name": settings.get(key, {"quantizer": "sbm"}.get(key, ""))}
    for key, text in settings.items():
        if "." in key:
            group, _, rest = key.partition(".")
            nested.setdefault(group, {})[rest] = plain(text)
    runs = []
    for seed, value in enumerate(values):
        row = {"scale": scale, "hash": str(sorted(settings.items())), "seed": str(seed), "metric": "test_accuracy"}
        row |= {"final": str(value), "best": str(value), "total_steps": settings.get("training.steps", "64000")}
        row |= {"gbitops": str(gbitops)} if gbitops is not None else {}
        runs.append(Run(row, nested))
    return Cell(settings, settings, tuple(runs))


SMALL = {"dataset": "cifar100", "model": "resnet74"}
STATIC = {"schedule": "static", "schedule__q_max": 8}
CYCLIC = {"schedule": "CR", "schedule__q_min": 3, "schedule__q_max": 8, "schedule__cycles": 32}


def proxied(cell: Cell, model: str, dataset: str) -> Cell:
    """The same runs standing for another network and other data of the paper."""
    return Cell({**cell.paper, "model": model, "dataset": dataset}, cell.ours, cell.runs)


def data_of(name: str, *cells: Cell, scale: str = "paper", **more: object) -> ItemData:
    """What is known of an item with some cells."""
    return ItemData(ITEMS[name], Results(scale, cells), read_published(ITEMS[name], PUBLISHED), **more)


def records(data: ItemData) -> list[dict[str, str]]:
    return as_records(tables_of(data, spec_of(data.item)))


# Tables


def test_at_the_papers_setting_ours_stand_beside_published_numbers():
    pair = made_up(72.0, 73.0, 74.0, gbitops=60.0, **CYCLIC, **SMALL), made_up(70.0, 70.0, 70.0, **STATIC, **SMALL)
    rows = records(data_of("cpt/table2", *pair))
    found = [row for row in rows if row["source"] == "published" and row.get("ours")]
    cpt = next(row for row in found if row["method"] == "CPT" and row["metric"] == "test_accuracy")
    assert (cpt["published"], cpt["ours"], cpt["deviation"], cpt["n"]) == ("72.35", "73.00", "1.00", "3")
    assert cpt["difference"] == "+0.650"


def test_a_proxy_never_stands_in_the_row_of_another_network():
    """46.35 of ResNet-8 stood in the row of ResNet-152 on CIFAR-100, with a difference to its published accuracy."""
    pair = (
        made_up(44.0, 45.0, **CYCLIC, model="resnet8", dataset="cifar10"),
        made_up(46.35, **STATIC, model="resnet8", dataset="cifar10"),
    )
    proxies = [proxied(cell, model, "cifar100") for cell in pair for model in ("resnet74", "resnet164")]
    rows = records(data_of("cpt/table2", *proxies, scale="mini"))
    assert not any(row.get("ours") for row in rows if row["source"] == "published")
    ours = [row for row in rows if row["source"] == "ours"]
    assert len(ours) == 2, "two networks with the same trainings are one setting"
    for row in ours:
        assert (row["network"], row["data"], row["scale"], row["steps"]) == (
            "ResNet-8",
            "CIFAR-10",
            "mini, proxy",
            "64000",
        )


def test_differences_are_taken_seed_by_seed():
    """The table said -2.47, unpaired, where the claim said -3.47 of the seed that both have."""
    cells = (
        made_up(43.0, **CYCLIC, model="resnet8", dataset="cifar10"),
        made_up(46.47, 45.0, 44.94, **STATIC, model="resnet8", dataset="cifar10"),
    )
    row = next(
        row
        for row in records(data_of("cpt/fig1", *cells, scale="mini"))
        if row.get("schedule") == "CR" and row["source"] == "ours"
    )
    assert row["difference to baseline"] == "-3.47"


def test_runs_of_unequal_lengths_are_not_compared():
    """A deficit that trains five times as long as the baseline says nothing about the deficit."""
    common = {"model": "gcn_small", "dataset": "cora"}
    window = {"schedule": "deficit", "schedule__start": 0, "schedule__end": 50, "schedule__q_max": 8}
    cells = [
        made_up(81.0, 82.0, training__steps=200, **STATIC, **common),
        made_up(83.0, 83.0, training__steps=400, **STATIC, **common),
        made_up(82.0, 84.0, training__steps=400, **window, **common),
        made_up(70.0, 70.0, training__steps=300, **window, **common),
    ]
    rows = [row for row in records(data_of("better/fig8", *cells, scale="mini")) if row["source"] == "ours"]
    found = {(row["schedule"], row["steps"]): row["difference to baseline"] for row in rows}
    assert found["deficit", "400"] == "0.00" and found["deficit", "300"] == ""
    assert found["static", "200"] == found["static", "400"] == "baseline"
    axes = module_of("better").FIGURES["fig8"](data_of("better/fig8", *cells, scale="mini")).figure.axes[0]
    assert [line.get_ydata()[0] for line in axes.get_lines() if line.get_marker() == "o"] == [0.0]
    plt.close("all")


def test_published_deviations_are_shown():
    rows = records(data_of("better/table1"))
    assert {row["published deviation"] for row in rows if row["published"] == "92.23"} == {"0.09"}


def test_numbers_of_steps_are_those_at_the_ends_of_phases():
    """HLHLp, table 6: what variants A and D had after each of their phases stands beside the published steps."""
    item = ITEMS["hlhlp/table6"]
    cells = []
    for bits, perplexities in (("[32,2,8,2]", (95.0, 99.0, 92.0, 97.0)), ("[32,2]", (96.0, 112.0))):
        cell = made_up(perplexities[-1], schedule="hlhlp", schedule__bits=bits, model="gru_hlhlp", dataset="ptb")
        object.__setattr__(cell.runs[0], "curve", {"phases": [{"final": number} for number in perplexities]})
        cells.append(cell)
    data = ItemData(item, Results("paper", tuple(cells)), read_published(item, PUBLISHED))
    published, ours = tables_of(data, spec_of(item))
    rows = [dict(zip(published.headings, row)) for row in published.rows]
    found = {row["group"]: row["ours"] for row in rows if row["ours"] and " step " in row["group"]}
    expected = {f"(A) step {step}": value for step, value in enumerate(("95.00", "99.00", "92.00", "97.00"), 1)}
    assert found == {**expected, "(D) step 3": "96.00", "(D) step 4": "112.00"}
    assert [row[-1] for row in ours.rows] == ["95, 99, 92, 97", "96, 112"]


# Panels, differences and what is drawn


def test_the_same_trainings_are_one_panel():
    pair = (
        made_up(45.0, **CYCLIC, model="resnet8", dataset="cifar10"),
        made_up(46.0, **STATIC, model="resnet8", dataset="cifar10"),
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


def test_intervals_are_those_of_a_paired_t_test():
    ours, base = made_up(71.0, 75.0, 74.0, 99.0, **CYCLIC, **SMALL), made_up(70.0, 72.0, 72.0, **STATIC, **SMALL)
    (panel,) = panels_of(data_of("cpt/table2", ours, base))
    (found,) = differences(panel, panel.first(lambda cell: cell.setting("schedule") == "static"), "best").values()
    test = scipy.stats.ttest_rel([71, 75, 74], [70, 72, 72]).confidence_interval(0.95)
    assert found == (2.0, pytest.approx(test.low), pytest.approx(test.high), 3)


def test_few_seeds_take_the_pooled_deviation_or_none():
    assert estimates({0: [1.0]}, (0.5, 10))[0].high == pytest.approx(1 + 0.5 * scipy.stats.t.ppf(0.975, 10))
    assert estimates({0: [1.0, 2.0]})[0].low is None


def cyclic_and_static(missing: int, final: float = 70.0) -> ItemData:
    pair = made_up(final - 1, gbitops=60.0, **CYCLIC, **SMALL), made_up(final, gbitops=100.0, **STATIC, **SMALL)
    return data_of("cpt/fig1", *pair, *(Cell({"seed": str(n)}, {}) for n in range(missing)))


def drawn(paper: str, item: str, data: ItemData) -> Drawing | None:
    found = module_of(paper).FIGURES[item](data)
    plt.close("all")
    return found


@pytest.mark.parametrize(("missing", "expected"), [(2, True), (3, False)])
def test_nothing_is_drawn_below_half_of_the_cells(missing, expected):
    assert bool(drawn("cpt", "fig1", cyclic_and_static(missing))) == expected


def test_settings_at_the_ceiling_are_not_compared():
    assert drawn("cpt", "fig1", cyclic_and_static(0)) and not drawn("cpt", "fig1", cyclic_and_static(0, final=99.7))


@pytest.mark.parametrize(
    ("paper", "item"), [("better", "fig6"), ("better", "fig4"), ("hlhlp", "fig1"), ("hlhlp", "appH")]
)
def test_published_or_computed_numbers_alone_are_no_picture(paper, item):
    """Bars of published differences stood on an axis of accuracies, costs that are computed as if they were measured."""
    assert drawn(paper, item, data_of(f"{paper}/{item}")) is None


def test_two_evaluations_are_no_curve():
    data = cyclic_and_static(0)
    for cell in data.results.cells:
        object.__setattr__(
            cell.runs[0], "curve", {"evaluations": {"step": [500, 1000], "value": [40.0, 45.0], "gbitops": [1, 2]}}
        )
    assert "Differences to static" in drawn("cpt", "fig1", data).caption.replace("Ours: d", "D")
    for cell in data.results.cells:
        steps = list(range(100, 1100, 100))
        object.__setattr__(cell.runs[0], "curve", {"evaluations": {"step": steps, "value": steps, "gbitops": steps}})
    assert "band" in drawn("cpt", "fig1", data).caption


def test_points_of_equal_cost_stand_side_by_side():
    places = side_by_side({0: 0.4, 1: 0.4, 2: 0.401, 3: 1.0})
    assert len(set(places.values())) == 4 and places[3] == 1.0
    assert sorted(places.values())[1] == pytest.approx(0.4003, abs=1e-3)


def test_titles_are_one_line_and_fit():
    for name, paper in (("fig3", "cpt"), ("fig2", "better")):
        data = data_of(f"{paper}/{name}")
        figure = titled(module_of(paper).FIGURES[name](data), data).figure
        assert "\n" not in figure.get_suptitle()
        box = figure._suptitle.get_window_extent()
        assert box.width <= figure.bbox.width
        plt.close(figure)


def claim_result(name: str, verdict: str = "supported", **numbers: object) -> ClaimResult:
    given = {
        "scope": "proxy: ResNet-8, CIFAR-10 at 16x16",
        "unit": "pp",
        "decided": True,
        "published_effect": "0.9 pp",
        **numbers,
    }
    return ClaimResult(
        name, name.rpartition("-")[0], name.partition("/")[0], "CPT beats static", verdict=verdict, **given
    )


def test_forest_has_a_panel_for_each_unit():
    rows = [
        claim_result("cpt/fig1-c1", estimate=1.0, low=0.5, high=1.5, published_value=0.9),
        claim_result(
            "cpt/fig1-c2", "undecided", estimate=-1.0, low=-2.0, high=0.5, decided=False, leaning="contradicted"
        ),
        claim_result("cpt/table5-c1", estimate=2.0, unit="ppl"),
    ]
    figure = forest([vars(row) for row in rows])
    assert [axes.get_xlabel() for axes in figure.axes] == ["pp", "ppl"]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["cpt/fig1-c1", "cpt/fig1-c2"]
    plt.close(figure)


# The board


def board_of(*cells: Cell) -> ItemData:
    return ItemData(Item("board", "methods", "board", "methods", "board/methods", 1), Results("mini", cells))


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
    ]
    rows = {(row.cell.setting("schedule"), row.cost): row for row in board.rows_of(board_of(*cells))}
    assert rows["CR", 0.6].gap.mean == pytest.approx((54 - 52 + 57 - 53) / 2)
    assert rows["RTH", 0.3].gap is None, "cheaper than every static run"
    assert rows["partial_pretrain", 0.6].gap is None, "another network"
    assert rows["static", 0.5].gap is None
    front = {key for key, row in rows.items() if row.best}
    assert front == {("RTH", 0.3), ("static", 0.5), ("CR", 0.6), ("static", 1.0)}


def test_without_shorter_static_runs_full_length_is_the_baseline():
    other = on_board(58, 58, 58, quantizer="fp8", **STATIC)
    cells = [on_board(60, 61, 62, **STATIC), on_board(59, 61, 60, cost=60.0, **CYCLIC), other]
    found = board.rows_of(board_of(*cells))
    rows = {(row.cell.setting("schedule"), row.cell.setting("quantizer")): row for row in found}
    assert rows["CR", "sbm"].gap.mean == -1.0 and rows["static", "fp8"].gap.mean == -3.0
    assert board.reference(found) == "static 8 bits of full length"


def test_board_has_a_picture_and_a_table_that_name_the_proxy():
    cells = [
        on_board(60, 61, 62, **STATIC),
        on_board(50, 51, 52, steps=1000, cost=50.0, **STATIC),
        on_board(54, 57, 55, cost=60.0, **CYCLIC),
    ]
    figure, caption = board.draw(board_of(*cells))
    assert "mini scale, a proxy" in figure.axes[0].get_title().replace("\n", " ") and "n = 3" in caption
    (table,) = board.tables(board_of(*cells))
    rows = [dict(zip(table.headings, row)) for row in table.rows]
    assert [row["method"] for row in rows] == ["static 8 bits, 50 % of the steps", "CR 3-8 bits", "static 8 bits"]
    assert rows[1]["difference to static 8 bits of equal cost"].startswith("+") and rows[1]["scale"] == "mini"
    assert board.draw(board_of(cells[0], *(Cell({"seed": str(n)}, {}) for n in range(2)))) is None
    plt.close(figure)


# Papers do not know each other


@pytest.mark.parametrize("paper", PAPERS)
def test_no_paper_imports_another(paper):
    source = Path(importlib.util.find_spec(f"bitcycle.figure.{paper}").origin).read_text()
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    imported |= {
        alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for alias in node.names
    }
    for other in set(PAPERS) - {paper}:
        assert not any(name and name.split(".")[-1] in (other, f"claims_{other}") for name in imported), other


def test_a_paper_without_a_module_still_has_its_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr(make, "module_of", lambda paper: None)
    with Drawn(tmp_path / "drawn.json") as known:
        entry = make_item(data_of("cpt/table2"), tmp_path, known)
    assert entry.picture is None and len(entry.tables[0].rows) == 120


# What has not changed is not drawn again


def test_only_what_has_changed_is_drawn(tmp_path):
    drawn = []

    def draw() -> Drawing:
        drawn.append(1)
        figure, axes = plt.subplots(figsize=(1, 1))
        axes.fill_between([0, 1], [0, 1], hatch="/")  # hatches have names in SVG files
        return Drawing(figure, "a caption")

    def make_once(inputs: list[object]) -> bytes:
        with Drawn(tmp_path / "drawn.json") as known:
            picture = known.picture("x", inputs, tmp_path / "x", draw)
        assert picture.caption == "a caption"
        return b"".join(file.read_bytes() for file in picture.files)

    first = make_once([1])
    assert make_once([1]) == first and len(drawn) == 1
    assert make_once([2]) == first and len(drawn) == 2, "equal pictures are equal bytes"
    (tmp_path / "x.png").write_bytes(b"")
    assert make_once([2]) == first and len(drawn) == 3, "a file that was changed is drawn again"
    with Drawn(tmp_path / "drawn.json") as known:
        assert known.picture("x", [3], tmp_path / "x", lambda: None) is None
    assert not (tmp_path / "x.png").exists(), "no picture of results that are gone"


# Everything from no runs


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """Everything, made without any run: the folder, and the entries of the page."""
    target = tmp_path_factory.mktemp("figures")
    return target, make_all(Places(ROOT, target / "results", target / "none.csv"))


def test_all_items_are_listed(empty):
    target, entries = empty
    assert len(ITEMS) == 62
    assert {item.kind for item in ITEMS.values()} == set(KINDS)
    assert {item.paper for item in ITEMS.values()} == set(PAPERS)
    files = {path.stem.replace("_digitized", "") for path in PUBLISHED.glob("*_*.csv")}
    assert files <= {f"{item.paper}_{item.name}" for item in ITEMS.values()}
    assert [entry.data.item.id for entry in entries if entry.data.item.paper != "board"] == list(ITEMS)
    for entry in entries:
        item = entry.data.item
        assert all(file.stat().st_size > 0 for file in entry.files) and entry.files[-1].name == f"{item.name}.md"
        assert item.kind != "schematic" or entry.picture is not None
        assert not item.sweep or entry.data.command in (target / "results" / "index.html").read_text()


def test_published_numbers_in_the_files_are_those_of_the_papers(empty):
    target, _ = empty
    for item in ITEMS.values():
        rows = [row for suffix in ("", "_digitized") for row in read_published(item, PUBLISHED, suffix)]
        rows = [row for row in rows if row["metric"] != "none_stated"]
        path = target / "results" / "figures" / item.paper / f"{item.name}.csv"
        shown = list(csv.DictReader(open(path, newline=""))) if path.exists() else []
        assert len(shown) == len(rows), item.id
        for row, cells in zip(rows, shown):
            assert (row["printed"] or number(float(row["value"]))) in cells["published"], (item.id, cells)


# The page


@pytest.fixture(scope="module")
def page(empty, tmp_path_factory):
    """A page with every verdict, in a folder of its own."""
    target, entries = empty
    claims = [
        claim_result(
            "cpt/fig1-c1",
            estimate=0.94,
            low=-0.2,
            high=2.1,
            n=5,
            decided=False,
            section="4.1",
            rule="the interval above 0",
            p_raw=0.03,
        ),
        claim_result("cpt/fig1-c1", "contradicted", scope="proxy: GCN, Cora", estimate=-3.0, low=-4.0, high=-2.0, n=3),
        claim_result(
            "better/fig3-c1", "undecided", decided=False, estimate=0.1, low=-1.0, high=1.0, n=2, seeds_needed=12
        ),
        claim_result("better/fig2-c1", "computed", scope="", holds=True),
        claim_result("hlhlp/table1-c1", "no test", scope="", reason="The metric is at its ceiling"),
        *(ClaimResult(claim.id, claim.item, claim.item.partition("/")[0], claim.sentence) for claim in CLAIMS.values()),
    ]
    write_pages(target / "results", entries, claims)
    return target / "results"


def test_page_needs_nothing_from_outside_and_is_small(page):
    text = (page / "index.html").read_text()
    assert len(text) <= 1_500_000
    assert (
        len(text) + sum((page / name).stat().st_size for name in re.findall(r'<img src="([^"]+)"', text)) <= 1_500_000
    )
    loaded = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="([^"]+)"', text)
    assert all(name.startswith("data:,") or (page / name).exists() for name in loaded)
    assert "fetch(" not in text and "XMLHttpRequest" not in text and "@import" not in text


def test_page_links_lead_somewhere(page):
    text = (page / "index.html").read_text()
    names = re.findall(r'id="([^"]+)"', text)
    assert len(names) == len(set(names)), "no name twice"
    links = re.findall(r'href="#([^"]+)"', text)
    assert set(links) <= set(names) and {*ITEMS, *CLAIMS} <= set(links)
    for link in re.findall(r'href="(?!#|https?:|data:)([^"]+)"', text):
        assert (page / link).exists() or (ROOT / "results" / link).exists(), link


def test_page_is_built_for_screen_readers(page):
    text = (page / "index.html").read_text()
    assert text.count("<table") == text.count("<caption>") > 40
    assert not re.search(r"<th(?![^>]* scope=)[ >]", text)
    assert not re.search(r"<img(?![^>]* alt=\"[^\"])", text)
    assert re.search(r'<a class="skip" href="#claims">', text) and '<html lang="en">' in text
    assert "prefers-color-scheme: dark" in text and '<meta name="viewport"' in text


def test_claims_stand_at_the_top_and_in_the_readme_with_their_rule(page):
    text, readme = html.unescape((page / "index.html").read_text()), (page / "README.md").read_text()
    for claim in CLAIMS.values():
        assert claim.sentence in text and claim.sentence.replace("|", "\\|") in readme
    for shown in (text, readme):
        assert "leaning: supported" in shown and "+0.940 [-0.200, +2.10] pp" in shown and "computed: holds" in shown
    assert (
        text.index("the table of claims")
        if "the table of claims" in text
        else text.index('id="claims"') < text.index('id="contents-title"')
    )
    assert "the interval above 0" in text and "p = 0.030" in text and "12 seeds would decide" in text
    item = (page / "figures" / "cpt" / "fig1.md").read_text()
    assert "the interval above 0" in item and "proxy: GCN, Cora" in item


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    selenium = pytest.importorskip("selenium", reason="no selenium here: pip install selenium")
    if not CHROMIUM or not CHROMEDRIVER:
        pytest.skip("no Chromium with its driver here: make browser")
    from selenium.webdriver.chrome.service import Service

    options = selenium.webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = selenium.webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    yield driver
    driver.quit()


def visit(browser, page: Path, width: int, theme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    browser.get((page / "index.html").as_uri())


CONTRAST = """
const lum = c => c.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
  .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const ground = e => {
  for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!c.endsWith(", 0)")) return c; }
  return "rgb(255, 255, 255)"; };
return Math.min(...[...document.querySelectorAll("p, th, td, a, .verdict, figcaption, .facts, pre, label")].map(e => {
  const [a, b] = [lum(getComputedStyle(e).color), lum(ground(e))].sort((x, y) => y - x);
  return (a + .05) / (b + .05); }));"""


@pytest.mark.parametrize(("width", "theme"), [(400, "dark"), (1400, "light")])
def test_browser_shows_every_picture_at_every_width_and_theme(browser, page, width, theme):
    visit(browser, page, width, theme)
    browser.execute_script("document.querySelectorAll('img').forEach(i => i.loading = 'eager')")
    loaded = "Promise.all(all.map(i => i.decode())).then(() => done(all.length), done)"
    wait = f"const done = arguments[0], all = [...document.images]; {loaded}"
    assert browser.execute_async_script(wait) == (page / "index.html").read_text().count("<img ")
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.execute_script(CONTRAST) >= 4.5
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_claims_are_sorted_and_filtered_by_keyboard(browser, page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    visit(browser, page, 1400)
    active = browser.switch_to.active_element
    active.send_keys(Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("class") == "skip"
    head = browser.find_element(By.CSS_SELECTOR, "#claims th:nth-child(3)")
    values = "return [...document.querySelectorAll('#claims tbody tr')].filter(r => !r.hidden).map(r => r.cells[2].dataset.sort)"
    for direction, first in (("ascending", "-3.0"), ("descending", "0.94")):
        head.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
        assert head.get_attribute("aria-sort") == direction
        assert browser.execute_script(values)[0] == first
    browser.find_element(By.NAME, "verdict").send_keys("contradicted")
    assert browser.execute_script(values) == ["-3.0"]
    assert browser.find_element(By.ID, "count").text.startswith("1 of ")
    browser.find_element(By.CSS_SELECTOR, "#filter button").send_keys(Keys.ENTER)
    browser.find_element(By.NAME, "text").send_keys("graphsage nothing-has-this")
    assert browser.execute_script(values) == []


# Verdicts


def test_cells_are_compared_seed_by_seed():
    """By hand: 71 - 70 and 75 - 72 for the seeds that both have; without one in common, means."""
    ours, base = made_up(71, 75, 90), made_up(70, 72)
    assert ours.less(base, "final") == Value(2.0, pytest.approx(2**0.5), 2)
    strangers = Cell({}, {}, tuple(Run({**run.row, "seed": "7"}, run.settings) for run in base.runs[:1]))
    assert ours.less(strangers, "final").mean == pytest.approx((71 + 75 + 90) / 3 - 70)
    assert ours.less(Cell({}, {}), "final") is None


# Curves of runs

RECORDS = [
    {"kind": "train", "step": 10, "loss": 2.0, "precision": [3, 3, 8]},
    {"kind": "train", "step": 20, "loss": 1.0, "precision": [8, 8, 8]},
    {
        "kind": "evaluation",
        "step": 20,
        "test_accuracy": 50.0,
        "test_accuracy_at_q_max": 51.0,
        "precision": [8, 8, 8],
        "cost": {"gbitops": 7.0},
    },
]
SUMMARY = {"metric": "test_accuracy", "total_steps": 20, "scale": "smoke", "hash": "0" * 10, "seed": 3}


def test_curve_of_a_run():
    curve = curve_of(RECORDS, SUMMARY)
    assert curve["training"] == {
        "step": [10, 20],
        "loss": [2.0, 1.0],
        "weight": [3, 8],
        "activation": [3, 8],
        "gradient": [8, 8],
    }
    assert curve["evaluations"]["value"] == [50.0]
    assert curve["evaluations"]["gbitops"] == [7.0]
    assert curve["final"]["test_accuracy_at_q_max"] == 51.0
    many = [{"kind": "train", "step": step, "loss": step % 2, "precision": [3, 3, 8]} for step in range(1, 1001)]
    thin = curve_of([*many, RECORDS[-1]], {**SUMMARY, "total_steps": 1000})["training"]
    assert len(thin["step"]) == 200 and thin["step"][-1] == 1000
    assert thin["loss"][0] == pytest.approx(3 / 5)


def test_curves_are_equal_bytes(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    write_json(folder.summary, SUMMARY)
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    first = write_curve(folder, tmp_path / "curves").read_bytes()
    assert write_curve(folder, tmp_path / "curves").read_bytes() == first
    assert json.loads(gzip.decompress(first)) == read_curve(tmp_path / "curves", SUMMARY)
    assert read_curve(tmp_path / "curves", {**SUMMARY, "seed": 4}) == {}


def test_allocations_are_kept_where_figure_8_looks():
    tests = [{**RECORDS[-1], "step": step, "allocation": {"group1.0": {"0/0": step / 160}}} for step in range(1, 161)]
    found = curve_of([RECORDS[0], *tests], {**SUMMARY, "total_steps": 160})["allocation"]
    assert list(found) == ["5", "45", "85", "160"]


def test_phases_and_range_tests_are_kept():
    phased = curve_of(RECORDS, {**SUMMARY, "phases": [{"phase": 1, "final": 50.0}]})
    assert phased["phases"] == [{"phase": 1, "final": 50.0}]
    levels = {"levels": [{"bits": 2, "accuracy": 0.1}], "level_steps": 10, "window": 5}
    observed = [{"kind": "observation", "step": 1, "loss": 2.0, "accuracy": 12.5, "precision": [2, 2, 8]}]
    tested = curve_of([*observed, *RECORDS], {**SUMMARY, "found": {"q_min": 2, "range_test": levels}})
    assert tested["range_test"]["q_min"] == 2
    assert tested["observations"] == {"step": [1], "accuracy": [12.5]}
