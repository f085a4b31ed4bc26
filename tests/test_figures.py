"""Figures, tables, gallery and verdicts, from made-up runs with known numbers and from none."""

from __future__ import annotations

import csv
import gzip
import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bitcycle.analysis.claims import (
    CHECKS,
    COMPUTED,
    CONTRADICTED,
    CONTRADICTED_REDUCED,
    NOT_CHECKABLE,
    NOT_RUN,
    REPRODUCED,
    SIGN,
    SIGN_AT_PAPER_SCALE,
    UNCHECKED,
    VERDICTS,
    verdict_on,
)
from bitcycle.analysis.claims_partial import speedup, steps_of
from bitcycle.analysis.collect import COLUMNS, read_summary
from bitcycle.analysis.compare import cells_of, compare
from bitcycle.analysis.curves import curve_of, read_curve, write_curve
from bitcycle.analysis.items import KINDS, PAPERS, read_claims, read_items, read_published
from bitcycle.analysis.results import Cell, Results, Run, Value, find_results, read_runs
from bitcycle.configuration import to_plain
from bitcycle.figure.make import MODULES, Places, comparison_of, gather, make_all, make_item
from bitcycle.schedule import SUITE
from bitcycle.sweep import read_sweep
from bitcycle.training.identity import run_hash
from bitcycle.training.run_folder import RunFolder, write_json
from tests.conftest import ROOT, configure

PUBLISHED = ROOT / "results" / "published"
ITEMS = {item.id: item for item in read_items(PUBLISHED)}
CLAIMS = {claim.id: claim for claim in read_claims(PUBLISHED)}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


# Made-up runs


def row_of(overrides: list[str], seed: int, **numbers: float) -> dict[str, object]:
    """A row of runs.csv of a run with these settings and numbers."""
    config = configure(*overrides)
    return {
        **dict.fromkeys(COLUMNS),
        "scale": config.scale,
        "seed": seed,
        "hash": run_hash(config),
        "metric": "test_accuracy",
        "total_steps": 1000,
        **{group: getattr(config, group).name for group in ("model", "dataset", "quantizer", "schedule")},
        "convention": "actual",
        "hardware": "bitops",
        "finished": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789abc",
        "processor": "made up",
        "settings": json.dumps(to_plain(config)),
        **numbers,
    }


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def made_up(*values: float, scale: str = "paper", gbitops: float | None = None, **paper: object) -> Cell:
    """A cell with runs of these metrics; settings by words such as schedule__q_max."""
    settings = {name.replace("__", "."): str(value) for name, value in paper.items()}
    nested: dict[str, dict[str, object]] = {}
    for key in ("model", "dataset", "schedule", "quantizer"):
        nested[key] = {"name": settings.get(key, {"quantizer": "sbm"}.get(key, ""))}
    runs = []
    for seed, value in enumerate(values):
        row = {"scale": scale, "hash": str(sorted(settings.items())), "seed": str(seed), "metric": "test_accuracy"}
        row |= {"final": str(value), "best": str(value), "total_steps": settings.get("training.steps", "64000")}
        row |= {"gbitops": str(gbitops)} if gbitops is not None else {}
        runs.append(Run(row, nested))
    return Cell(settings, settings, tuple(runs))


def verdict(claim: str, *cells: Cell, scale: str = "paper") -> str:
    return verdict_on(CLAIMS[claim], Results(scale, cells)).verdict


SMALL = [
    *("model=resnet8", "dataset=cifar10", "scale=mini", "training.steps=1000", "training.batch_size=32"),
    "training.evaluation_steps=500",
]
TABLE6 = {("CR", 8): (80.0, 81.0, 82.0), ("triangular", 8): (70.0, 70.0, 73.0), ("CR", 6): (60.0,)}
"""Pattern and q_max of table 6 of CPT at scale mini -> best accuracy of each seed."""


@pytest.fixture(scope="module")
def table6(tmp_path_factory):
    """What is known of table 6 with the runs above, and one of another length, which is none of the table's."""
    rows = []
    for (schedule, q_max), values in TABLE6.items():
        overrides = [
            *SMALL,
            f"schedule={schedule}",
            "schedule.cycles=32",
            "schedule.q_min=3",
            f"schedule.q_max={q_max}",
        ]
        for seed, value in enumerate(values):
            rows.append(row_of(overrides, seed, best=value, final=value - 1, gbitops=100.0, relative_to_static=0.5))
    other = [*SMALL, "schedule=CR", "schedule.cycles=8", "schedule.q_min=3", "schedule.q_max=8"]
    rows.append(row_of(other, 0, best=10.0, final=10.0, gbitops=1.0, relative_to_static=0.5))
    summary = write_rows(tmp_path_factory.mktemp("table6") / "results" / "summary" / "runs.csv", rows)
    places = Places(ROOT, summary.parent, summary)
    return gather(ITEMS["cpt/table6"], read_runs(read_summary(summary), summary), places)


def test_known_means_stand_in_the_table(table6):
    lines = compare(table6.published, table6.results, comparison_of(table6.item))
    found = {(line.labels["group"], line.labels["schedule"]): line for line in lines if line.published is not None}
    cosine = found["ResNet-74 FW(3,8)/BW8", "cosine"]
    assert cosine.ours == Value(81.0, 1.0, 3)
    assert cosine.published == 72.35
    assert cosine.difference == pytest.approx(81.0 - 72.35)
    assert cells_of(cosine) == ("72.35", "81.00", "1.00", "3", "+8.65")
    triangular = found["ResNet-74 FW(3,8)/BW8", "triangular"]
    assert triangular.ours.mean == pytest.approx(71.0)
    assert triangular.ours.std == pytest.approx(3**0.5)
    one = found["ResNet-164 FW(3,6)/BW6", "cosine"]
    assert one.ours == Value(60.0, None, 1)
    assert cells_of(one)[2:4] == ("", "1")
    assert found["ResNet-74 FW(3,8)/BW8", "cosine annealing"].ours is None
    assert found["ResNet-74 FW(3,8)/BW8", "cosine annealing"].difference is None


def test_runs_are_found_by_their_hash_and_named_as_stand_ins(table6):
    assert table6.results.scale == "mini"
    assert {cell.value("best").mean for cell in table6.results.done} == {81.0, 71.0, 60.0}
    assert ("resnet8", "resnet74") in set().union(*(cell.stand_ins for cell in table6.results.done))


def test_tables_are_written_in_three_forms(table6, tmp_path):
    entry = make_item(table6, tmp_path)
    assert {file.suffix for file in entry.files} == {".csv", ".md", ".html"}
    with open(tmp_path / "cpt" / "table6.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {"published", "ours", "standard deviation", "n", "difference"} <= set(rows[0])
    assert any(row["ours"] == "81.00" and row["n"] == "3" for row in rows)
    text = (tmp_path / "cpt" / "table6.md").read_text()
    assert "scale mini, n = 1 to 3" in text
    assert re.search(r"7 runs in \d+ of 18 cells", text), "one run fills several cells"
    assert "resnet8 for" in (tmp_path / "cpt" / "table6.html").read_text()


def test_scale_with_more_cells_is_shown():
    sweep = read_sweep(ROOT / "sweeps" / "cpt" / "table6.yaml")
    assert find_results([], []).done == ()
    with pytest.raises(ValueError, match="scale"):
        sweep.expand("large")


# Everything from no runs


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """Everything, made without any run: the folder, and the entries of the gallery."""
    target = tmp_path_factory.mktemp("figures")
    return target, make_all(Places(ROOT, target / "results", target / "none.csv"))


def test_all_items_are_listed():
    assert len(ITEMS) == 62
    assert {item.kind for item in ITEMS.values()} == set(KINDS)
    assert {item.paper for item in ITEMS.values()} == set(PAPERS) == set(MODULES)
    files = {path.stem.replace("_digitized", "") for path in PUBLISHED.glob("*_*.csv")}
    assert files <= {f"{item.paper}_{item.name}" for item in ITEMS.values()}
    for item in ITEMS.values():
        assert not item.sweep or (ROOT / "sweeps" / f"{item.sweep}.yaml").exists() or item.sweep_file(ROOT / "sweeps")


def test_every_item_has_an_output(empty):
    target, entries = empty
    assert [entry.data.item.id for entry in entries] == list(ITEMS)
    page = (target / "results" / "index.html").read_text()
    for entry in entries:
        assert entry.files, entry.data.item.id
        assert all(file.stat().st_size > 0 for file in entry.files)
        assert (entry.picture is None) == (entry.data.item.kind == "table")
        assert f'id="{entry.data.item.id}"' in page


def test_items_without_runs_say_what_to_run(empty):
    target, entries = empty
    for entry in entries:
        article = article_of(target, entry.data.item.id)
        if entry.data.command:
            assert f"no runs yet: {entry.data.command}" in html.unescape(article)


def article_of(target: Path, item: str) -> str:
    page = (target / "results" / "index.html").read_text()
    return re.search(rf'<article id="{re.escape(item)}">(.*?)</article>', page, re.DOTALL)[1]


def test_published_numbers_in_the_gallery_are_those_of_the_files(empty):
    target, _ = empty
    for item in ITEMS.values():
        rows = [row for suffix in ("", "_digitized") for row in read_published(item, PUBLISHED, suffix)]
        rows = [row for row in rows if row["metric"] != "none_stated"]
        body = re.search(r"<tbody>(.*?)</tbody>", article_of(target, item.id), re.DOTALL)
        shown = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in body[1].splitlines()] if body else []
        assert len(shown) == len(rows), item.id
        for row, cells in zip(rows, shown):
            published = html.unescape(cells[-5])
            assert (row["printed"] or row["value"]) in published, (item.id, published)
            assert cells[-4:] == ["", "", "", ""]


def test_gallery_needs_nothing_from_outside(empty):
    target, entries = empty
    page = (target / "results" / "index.html").read_text()
    assert page.count('<img alt="') == sum(entry.picture is not None for entry in entries)
    assert set(re.findall(r'<img[^>]*src="(data:image/png;base64),', page)) == {"data:image/png;base64"}
    assert "<script" not in page and "http://" not in page and "https://" not in page
    assert '<meta name="viewport"' in page
    for claim in CLAIMS.values():
        assert html.escape(claim.text) in page


def test_equal_inputs_give_equal_bytes(empty, tmp_path):
    target, _ = empty
    make_all(Places(ROOT, tmp_path / "results", tmp_path / "none.csv", papers=("partial",)))
    files = sorted((tmp_path / "results" / "figures").rglob("*.*"))
    assert {file.suffix for file in files} == {".png", ".svg", ".csv", ".md", ".html"}
    for file in files:
        assert file.read_bytes() == (target / file.relative_to(tmp_path)).read_bytes(), file.name


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [390, 1280])
def test_browser_shows_every_picture_without_complaint(empty, tmp_path, width):
    target, entries = empty
    page = tmp_path / "index.html"
    text = (target / "results" / "index.html").read_text()
    # what a person would look for: pictures that do not load, and a page wider than the screen
    probe = """<script>addEventListener("load", () => {
    const broken = [...document.images].filter(i => !i.naturalWidth).length;
    const wide = document.documentElement.scrollWidth > innerWidth;
    document.title = `broken ${broken} of ${document.images.length} wide ${wide}`; });</script>"""
    page.write_text(text.replace("</body>", f"{probe}</body>"))
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += [
        "--enable-logging=stderr",
        f"--window-size={max(width, 500)},900",
        "--virtual-time-budget=5000",
        "--dump-dom",
    ]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    pictures = sum(entry.picture is not None for entry in entries)
    assert f"<title>broken 0 of {pictures} wide false</title>" in done.stdout
    assert "CONSOLE" not in done.stderr


# Verdicts


def test_cells_are_compared_seed_by_seed():
    """By hand: 71 - 70 and 75 - 72 for the seeds that both have; without one in common, means."""
    ours, base = made_up(71, 75, 90), made_up(70, 72)
    assert ours.less(base, "final") == Value(2.0, pytest.approx(2**0.5), 2)
    strangers = Cell({}, {}, tuple(Run({**run.row, "seed": "7"}, run.settings) for run in base.runs[:1]))
    assert ours.less(strangers, "final").mean == pytest.approx((71 + 75 + 90) / 3 - 70)
    assert ours.less(Cell({}, {}), "final") is None


def test_numbers_of_steps_are_those_at_the_ends_of_phases():
    """HLHLp, table 6: what variants A and D had after each of their phases stands beside the published steps."""
    item = ITEMS["hlhlp/table6"]
    cells = []
    for bits, perplexities in (("[32,2,8,2]", (95.0, 99.0, 92.0, 97.0)), ("[32,2]", (96.0, 112.0))):
        cell = made_up(perplexities[-1], schedule="hlhlp", schedule__bits=bits, model="gru_hlhlp", dataset="ptb")
        object.__setattr__(cell.runs[0], "curve", {"phases": [{"final": number} for number in perplexities]})
        cells.append(cell)
    lines = compare(read_published(item, PUBLISHED), Results("paper", tuple(cells)), comparison_of(item))
    found = {line.labels["group"]: line.ours.mean for line in lines if line.ours and " step " in line.labels["group"]}
    expected = {f"(A) step {step}": value for step, value in enumerate((95.0, 99.0, 92.0, 97.0), 1)}
    assert found == {**expected, "(D) step 3": 96.0, "(D) step 4": 112.0}


def test_every_claim_has_a_check_or_a_reason():
    assert len(CLAIMS) == 111
    assert set(CHECKS) | set(UNCHECKED) == set(CLAIMS)
    assert not set(CHECKS) & set(UNCHECKED)
    assert all(claim.item in ITEMS for claim in CLAIMS.values())
    assert len(CHECKS) >= 90


@pytest.mark.parametrize(
    "claim", ["better/fig2-c1", "better/fig2-c2", "cpt/fig9-c1", "cpt/table2-c2", "cpt/table3-c2", "fractrain/fig2-c1"]
)
def test_computed_claims_hold(claim):
    found = verdict_on(CLAIMS[claim], Results())
    assert found.verdict == COMPUTED, found.measured
    assert found.scale == "computed"


def test_without_runs_nothing_is_claimed():
    for name in CHECKS:
        assert verdict_on(CLAIMS[name], Results()).verdict in (NOT_RUN, COMPUTED)
    for name, reason in UNCHECKED.items():
        found = verdict_on(CLAIMS[name], Results())
        assert (found.verdict, found.reason) == (NOT_CHECKABLE, reason)


def cpt_pair(cpt: float, static: float, scale: str = "paper") -> list[Cell]:
    common = {"dataset": "cifar100", "model": "resnet74", "scale": scale}
    return [
        made_up(cpt, cpt + 0.1, cpt - 0.1, schedule="CR", schedule__q_min=3, schedule__q_max=8, **common),
        made_up(static, static, static, schedule="static", schedule__q_max=8, **common),
    ]


@pytest.mark.parametrize(
    ("gain", "scale", "expected"),
    [
        (0.9, "paper", REPRODUCED),
        (0.2, "paper", SIGN_AT_PAPER_SCALE),
        (-0.2, "paper", CONTRADICTED),
        (0.9, "mini", SIGN),
        (-0.9, "mini", CONTRADICTED_REDUCED),
        (0.9, "smoke", NOT_RUN),
    ],
)
def test_verdict_follows_size_and_scale(gain, scale, expected):
    assert verdict("cpt/fig1-c2", *cpt_pair(70 + gain, 70, scale), scale=scale) == expected


def test_the_first_few_of_many_cells_settle_nothing():
    """Two of six cells leave a claim open, two of four decide."""
    done = cpt_pair(71, 70)
    for missing, expected in ((4, NOT_RUN), (2, REPRODUCED)):
        cells = (*done, *(replace(done[0], runs=()) for _ in range(missing)))
        assert verdict("cpt/fig1-c2", *cells) == expected


def test_measured_words_have_seeds_and_spread():
    found = verdict_on(CLAIMS["cpt/fig1-c2"], Results("paper", tuple(cpt_pair(71, 70))))
    assert "+1.00" in found.measured and "n = 3" in found.measured and "standard deviation" in found.measured
    assert "36.67" in found.measured


def suite(values: dict[str, float], dataset: str, model: str, q_max: int = 8) -> list[Cell]:
    return [
        made_up(value, schedule=name, schedule__q_min=3, schedule__q_max=q_max, dataset=dataset, model=model)
        for name, value in values.items()
    ]


def test_groups_of_schedules():
    costs = {
        "RR": 66.5,
        "RTH": 66.4,
        "ER": 68.2,
        "ETH": 68.1,
        "static": 67.5,
        **dict.fromkeys(("LR", "LT", "CR", "CT", "RTV", "ETV"), 67.4),
    }
    cells = suite(costs, "imagenet", "resnet18")
    assert verdict("better/fig3-c4", *cells) == REPRODUCED
    assert verdict("better/fig3-c5", *cells) == REPRODUCED
    assert verdict("better/fig3-c7", *cells) == REPRODUCED
    assert verdict("better/fig3-c3", *cells) == REPRODUCED
    reverse = suite({name: 135 - value for name, value in costs.items()}, "imagenet", "resnet18")
    assert verdict("better/fig3-c4", *reverse) == CONTRADICTED
    assert verdict("better/fig3-c5", *reverse) == CONTRADICTED
    assert verdict("better/fig3-c3", *reverse) == CONTRADICTED


def test_one_network_for_several_counts_once():
    from bitcycle.analysis.claims_better import CIFAR, gaps

    one = suite({"CR": 91.0, "static": 90.0}, "cifar10", "resnet74")
    again = [Cell({**cell.paper, "model": "resnet152"}, cell.ours, cell.runs) for cell in one]
    assert len(gaps(Results("mini", (*one, *again)), tuple(SUITE), CIFAR)) == 1


def test_precision_six_against_eight():
    low, high = (
        suite({"static": 60.0, "CR": 61.0}, "voc2012", "retinanet", 6),
        suite({"static": 62.0, "CR": 63.0}, "voc2012", "retinanet"),
    )
    assert verdict("better/fig4-c1", *low, *high) == REPRODUCED
    assert verdict("better/fig4-c1", *suite({"static": 65.0}, "voc2012", "retinanet", 6), *high) == CONTRADICTED


def deficits(values: dict[tuple[int, int], float]) -> list[Cell]:
    common = {"dataset": "cifar10", "model": "resnet74", "schedule__q_max": 8}
    return [
        made_up(value, schedule="static", **common)
        if end == 0
        else made_up(
            value, schedule="deficit", schedule__unit="step", schedule__start=start, schedule__end=end, **common
        )
        for (start, end), value in values.items()
    ]


def test_windows_of_low_precision():
    values = {(0, 0): 92.23, (0, 128000): 91.64, (0, 256000): 91.25, (16000, 144000): 92.08, (32000, 160000): 92.16}
    assert verdict("better/table1-c1", *deficits(values)) == REPRODUCED
    assert verdict("better/table1-c2", *deficits(values)) == REPRODUCED
    assert verdict("better/table1-c2", *deficits({**values, (0, 128000): 93.0})) == CONTRADICTED
    assert verdict("better/table1-c1", *deficits({(0, 0): 92.0})) == NOT_RUN


def test_pfq_saves_cost():
    common = {"dataset": "cifar10", "model": "resnet38"}
    stages = {"schedule": "pfq", "schedule__stages": "[3,4,6,8]", "schedule__gradient_stages": "[6,6,8,8]"}

    def cells(accuracy: float, cost: float) -> list[Cell]:
        return [
            made_up(accuracy, gbitops=cost, **stages, **common),
            made_up(92.0, gbitops=100.0, schedule="static", schedule__q_max=8, **common),
        ]

    assert verdict("fractrain/fig3-c1", *cells(92.1, 60.0)) == REPRODUCED
    assert verdict("fractrain/fig3-c1", *cells(92.1, 120.0)) == SIGN_AT_PAPER_SCALE
    assert verdict("fractrain/fig3-c1", *cells(90.0, 60.0)) == CONTRADICTED


def partial_runs(values: dict[float, dict[int, float]]) -> list[Cell]:
    common = {
        "dataset": "cifar10",
        "model": "resnet20_extra_skip",
        "schedule": "partial_pretrain",
        "quantizer": "pact_binary",
    }
    return [
        made_up(value, schedule__split=split, training__steps=steps, **common)
        for split, points in values.items()
        for steps, value in points.items()
    ]


def test_speedup_of_partial_pre_training():
    slow = {1000: 10.0, 2000: 20.0, 4000: 40.0, 8000: 80.0}
    fast = {1000: 20.0, 2000: 40.0, 4000: 80.0}
    cells = partial_runs({0.0: slow, 0.5: fast})
    assert speedup(cells, steps_of) == pytest.approx(2.0)
    assert verdict("partial/fig1-c2", *cells) == REPRODUCED
    assert verdict("partial/fig1-c1", *cells) == SIGN_AT_PAPER_SCALE  # twice as fast is more than the published 1.3
    assert verdict("partial/fig1-c1", *partial_runs({0.0: fast, 0.5: slow})) == CONTRADICTED


def test_ablation_of_hlhlp():
    def cells(*values: float) -> list[Cell]:
        bits = ("[32,2,8,2]", "[32,32,32,2]", "[32,2,2,2]", "[32,2]")
        return [
            made_up(value, schedule="hlhlp", schedule__bits=b, model="gru_hlhlp", dataset="ptb", quantizer="uniform_l2")
            for value, b in zip(values, bits)
        ]

    assert verdict("hlhlp/table6-c1", *cells(96.97, 115.92, 97.84, 112.08)) == REPRODUCED
    assert verdict("hlhlp/table6-c1", *cells(96.97, 98.0, 97.84, 97.5)) == SIGN_AT_PAPER_SCALE
    assert verdict("hlhlp/table6-c1", *cells(116.0, 97.0, 97.84, 112.08)) == CONTRADICTED
    assert verdict("hlhlp/table6-c1", *cells(96.97, 115.92)) == NOT_RUN


def test_verdicts_have_words():
    assert len(set(VERDICTS)) == 8


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
