"""Tables of items: ours beside published numbers, where that is a comparison."""

from __future__ import annotations

from dataclasses import replace

import matplotlib.pyplot as plt
import pytest

from bitcycle.reproduction.analysis.cells import Results
from bitcycle.reproduction.analysis.contrast import Pool
from bitcycle.reproduction.analysis.items import read_published
from bitcycle.reproduction.analysis.labels import backward_bits, forward_bits
from bitcycle.reproduction.figure.data import ItemData, panels_of, status_line
from bitcycle.reproduction.figure.make import draw_item
from bitcycle.reproduction.figure.table import as_records, tables_of
from bitcycle.reproduction.manifest import read_manifest
from tests.conftest import ROOT
from tests.reproduction.figures_cases import CYCLIC, ITEMS, PUBLISHED, SMALL, STATIC, data_of, made_up, proxied


def records(data: ItemData) -> list[dict[str, str]]:
    return as_records(tables_of(data))


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
        made_up(44.0, 45.0, scale="mini", **CYCLIC, model="resnet8", dataset="cifar10"),
        made_up(46.35, scale="mini", **STATIC, model="resnet8", dataset="cifar10"),
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


def test_lossy_data_are_named_beside_the_published_number():
    ours = made_up(73.0, **CYCLIC, **SMALL)
    for run in ours.runs:
        run.row["remark"] = "re-encoded as JPEG"
    (found,) = (row for row in records(data_of("cpt/table2", ours)) if row["source"] == "published" and row.get("ours"))
    assert (found["ours"], found["our data"]) == ("73.00", "re-encoded as JPEG")
    (own,) = (row for row in records(data_of("cpt/table2", ours)) if row["source"] == "ours")
    assert (own["data"], own["scale"]) == ("CIFAR-100, re-encoded as JPEG", "paper, proxy")


def test_the_speed_of_runs_that_shared_a_machine_is_not_compared_with_the_papers():
    """95 steps per second of an H200 that trained two networks stood beside the paper's 80 of a V100."""
    ours = made_up(87.0, schedule="partial_pretrain", model="resnet20_extra_skip", dataset="cifar10", split=1)
    cell = replace(ours, paper={"model": "resnet20_extra_skip", "dataset": "cifar10", "schedule.split": "1"})
    finished = {"finished": "2026-11-26T07:13:27+00:00", "seconds": "687", "steps_per_second": "95.1"}
    for run in cell.runs:
        run.row.update(finished, processor="NVIDIA H200")
    data = data_of("partial/table2", cell)
    busy = [("2026-11-26T06:23:00+00:00", "2026-11-26T09:23:00+00:00")]
    for times, expected in ((busy, []), ([], ["95.10"])):
        data = replace(data, pool=Pool(cell.runs, times))
        rows = [row for row in records(data) if row["source"] == "published" and row["metric"] == "training_speed"]
        assert [row["ours"] for row in rows if row.get("ours")] == expected


def test_energy_and_latency_of_an_accelerator_are_shown_with_its_name():
    """Runs that recorded Bit Fusion's energy and latency had no column for them."""
    fractrain, static = made_up(72.0, 73.0, **CYCLIC, **SMALL), made_up(70.0, 70.0, **STATIC, **SMALL)
    fractrain.runs[0].row.update(hardware="bitfusion", energy_j="2.5", latency_s="30")
    ours = {
        row["schedule"]: row for row in records(data_of("cpt/table2", fractrain, static)) if row["source"] == "ours"
    }
    columns = "energy, J", "latency, s", "accelerator"
    found = {schedule: tuple(row.get(name, "") for name in columns) for schedule, row in ours.items()}
    assert found == {"CR": ("2.50", "30.00", "bitfusion"), "static": ("", "", "")}
    assert not any("accelerator" in row for row in records(data_of("cpt/table4", fractrain, static))), (
        "of no interest there"
    )
    fractrain.runs[1].row.update(hardware="zc706", energy_j="2.5", latency_s="30")
    assert not any("accelerator" in row for row in records(data_of("cpt/table2", fractrain, static))), (
        "two accelerators"
    )


def test_runs_at_paper_scale_stand_beside_those_of_a_smaller_scale():
    """They were shown only once most cells had runs at paper scale, and then behind the others."""
    small = made_up(44.0, 45.0, scale="mini", **CYCLIC, model="resnet8", dataset="cifar10_16")
    large = made_up(73.0, **CYCLIC, **SMALL)
    data = data_of("cpt/table2", proxied(small, **SMALL), scale="mini")
    data = replace(data, results=replace(data.results, others=(Results("paper", (large,)),)))
    rows = records(data)
    assert [(row["network"], row["scale"]) for row in rows if row["source"] == "ours"] == [
        ("ResNet-74", "paper"),
        ("ResNet-8", "mini, proxy"),
    ]
    assert [row["ours"] for row in rows if row["source"] == "published" and row["ours"]] == ["73.00"]
    assert "paper scale, n = 1, 1 distinct trainings in 1 of 1 cells" in status_line(data)
    assert [panel.name for panel in panels_of(data)] == [
        "ResNet-74, CIFAR-100, paper scale",
        "ResNet-8, CIFAR-10 at 16x16",
    ]


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


def test_a_difference_has_its_own_number_of_seeds():
    """The table said n = 33 beside the interval of 17 pairs."""
    cells = made_up(43.0, 44.0, 46.0, 47.0, **CYCLIC, **SMALL), made_up(46.0, 45.0, 44.0, **STATIC, **SMALL)
    rows = {row["schedule"]: row for row in records(data_of("cpt/fig1", *cells)) if row["source"] == "ours"}
    assert (rows["CR"]["n"], rows["CR"]["n of the difference"]) == ("4", "3")
    assert rows["static"]["n of the difference"] == ""


def test_a_graph_is_compared_with_static_precision_of_its_own_aggregation():
    """A gain of ER with quantized aggregation was mostly that of quantized over float aggregation."""
    graph = {"model": "gcn", "dataset": "ogbn_arxiv"}
    cells = [
        made_up(*values, **settings, **graph, model__aggregation=aggregation)
        for aggregation, settings, values in (
            ("float", STATIC, (80.0, 80.1, 80.2, 80.3)),
            ("quantized", STATIC, (81.0, 81.1, 81.2)),
            ("quantized", CYCLIC, (81.5, 81.6, 81.7)),
        )
    ]
    rows = [row for row in records(data_of("better/fig6", *cells)) if row["source"] == "ours"]
    assert [row["difference to baseline"] for row in rows] == ["baseline", "baseline", "+0.500"]


def test_costs_of_a_table_have_one_baseline():
    """Static 6 bits had the cost of static 8 bits, 1.00, as each row was relative to static at its own highest bits."""
    cells = [
        made_up(70.0, gbitops=100.0, **STATIC, **SMALL),
        made_up(69.0, gbitops=56.0, schedule="static", schedule__q_max=6, **SMALL),
        made_up(71.0, gbitops=63.0, **CYCLIC, **SMALL),
    ]
    rows = [row for row in records(data_of("better/fig3", *cells)) if row["source"] == "ours"]
    assert [row["cost relative to baseline"] for row in rows] == ["1.00", "0.560", "0.630"]
    assert not any("highest bits" in name for row in rows for name in row)


def test_gradients_of_float_networks_are_float():
    cell = made_up(70.0, **STATIC, **SMALL, quantizer="none")
    assert (forward_bits(cell), backward_bits(cell)) == ("32", "32")
    tested = made_up(70.0, schedule="range_test", schedule__q_min=2, schedule__q_max=5, schedule__gradient=8, **SMALL)
    assert (forward_bits(tested), backward_bits(tested)) == ("2-4", "8")


@pytest.mark.parametrize(("name", "metric"), [("cpt/fig1", "best test_accuracy"), ("better/fig3", "test_accuracy")])
def test_best_evaluations_are_not_called_final(name, metric):
    """CPT and FracTrain report the best evaluation of a training, and ours beside them had the name of the last one."""
    data = data_of(name, made_up(43.0, 44.0, **CYCLIC, **SMALL), made_up(46.0, 45.0, **STATIC, **SMALL))
    assert {row["metric"] for row in records(data) if row["source"] == "ours"} == {metric}
    label = draw_item(data).figure.axes[0].get_ylabel()
    assert label == f"{metric.replace('_', ' ')} (%), difference"
    plt.close("all")


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
    axes = draw_item(data_of("better/fig8", *cells, scale="mini")).figure.axes[0]
    assert [line.get_ydata()[0] for line in axes.get_lines() if line.get_marker() == "o"] == [0.0]
    plt.close("all")


def test_rows_of_equal_names_have_the_settings_in_which_they_differ():
    """The four learning rates of CPT's table 1 were four rows of equal names."""
    rates = [made_up(70.0 - rate, **CYCLIC, **SMALL, training__learning_rate__initial=rate) for rate in (0.1, 0.01)]
    cells = (*rates, made_up(70.0, **STATIC, **SMALL))
    rows = [row for row in records(data_of("cpt/table1", *cells)) if row["source"] == "ours"]
    assert [row["setting"].rpartition(", ")[2] for row in rows] == [
        "training.learning_rate.initial=0.1",
        "training.learning_rate.initial=0.01",
        "",
    ]


def test_published_deviations_are_shown():
    rows = records(data_of("better/table1"))
    assert {row["published deviation"] for row in rows if row["published"] == "92.23"} == {"0.09"}


GRU = {"schedule": "hlhlp", "model": "gru_hlhlp", "dataset": "ptb"}


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)
def test_the_settings_of_a_published_number_name_one_cell_of_its_sweep(item):
    file = item.sweep_file(ROOT / "sweeps")
    rows = [row for suffix in ("", "_digitized") for row in read_published(item, PUBLISHED, suffix)]
    wanted = {row.get("settings", "") for row in rows} - {""}
    places = read_manifest(ROOT / "results" / "manifest" / file.parent.name / f"{file.stem}.csv") if wanted else []
    for settings in wanted:
        words = dict(word.split("=", 1) for word in settings.split() if not word.startswith("phase="))
        at_paper = [place for place in places if place.scale == "paper" and not place.superseded]
        found = {p.hash or p.cell for p in at_paper if all(p.paper.get(key, "") == text for key, text in words.items())}
        assert len(found) == 1, settings


def test_numbers_of_steps_are_those_at_the_ends_of_phases():
    """HLHLp, table 6: what variants A and D had after each of their phases stands beside the published steps."""
    item, cells = ITEMS["hlhlp/table6"], []
    for bits, lengths, perplexities in (
        ("[32,2,8,2]", "[50,30,30,30]", (95.0, 99.0, 92.0, 97.0)),
        ("[32,2]", "[110,30]", (96.0, 112.0)),
    ):
        cell = made_up(perplexities[-1], **GRU, schedule__bits=bits, schedule__lengths=lengths)
        object.__setattr__(cell.runs[0], "curve", {"phases": [{"final": number} for number in perplexities]})
        cells.append(cell)
    data = ItemData(item, Results("paper", tuple(cells)), read_published(item, PUBLISHED))
    published, ours = tables_of(data)
    rows = [dict(zip(published.headings, row)) for row in published.rows]
    found = {row["group"]: row["ours"] for row in rows if row["ours"] and " step " in row["group"]}
    expected = {f"(A) step {step}": value for step, value in enumerate(("95.00", "99.00", "92.00", "97.00"), 1)}
    assert found == {**expected, "(D) step 3": "96.00", "(D) step 4": "112.00"}
    assert [row[-1] for row in ours.rows] == ["95, 99, 92, 97", "96, 112"]
