"""A sweep ends with what was measured beside what was published."""

from __future__ import annotations

import pytest

from bitcycle.errors import DataError
from bitcycle.files import resource_root
from bitcycle.reproduction.analysis.items import PUBLISHED, read_items
from bitcycle.reproduction.figure.table import show_sweep, sweep_tables
from bitcycle.reproduction.manifest import read_manifest
from bitcycle.sweep.registry import SweepRun
from bitcycle.sweep.table import FinishedSetting, finished_runs, finished_settings, show_runs, table_of
from tests.conftest import ROOT, configure


@pytest.fixture
def finished(finished_digits):
    folder = finished_digits(
        "schedule=RTH", "schedule.cycles=2", "training.steps=8", "training.evaluation_steps=8"
    ).folder
    return folder, folder.read_summary()


def cells(table):
    """Heading -> the cells below it."""
    return {str(column.header): list(column.cells) for column in table.columns}


def test_runs_of_a_users_own_have_a_plain_table(finished, capsys):
    summary = finished[1]
    table = cells(table_of(finished_settings([finished])))
    assert table["n"] == ["1"] and float(table["test_accuracy (%)"][0]) == pytest.approx(summary["final"], rel=1e-3)
    cost = summary["cost"]["total"]["relative_to_static"]
    assert float(table["cost relative to static q_max"][0]) == pytest.approx(cost, rel=1e-3)
    assert not show_sweep("own/sweep", [finished]) and not capsys.readouterr().out
    show_runs([finished])
    assert "Finished runs" in capsys.readouterr().out


def test_one_row_for_the_seeds_of_a_setting_and_a_column_for_what_varies():
    run = {"metric": "loss", "unit": "", "final": 2.0, "cost": {"total": {"gbitops": 8.0, "relative_to_static": 0.5}}}
    first = {"schedule.name": "CR", "schedule.cycles": 8, "training.steps": 4, "model.name": "mlp"}
    second = {**first, "schedule.name": "static", "schedule.cycles": None, "training.steps": 9}
    found = [FinishedSetting(first, [run, {**run, "final": 3.0}]), FinishedSetting(second, [run])]
    assert cells(table_of(found)) == {
        "schedule.name": ["CR", "static"],
        "training.steps": ["4", "9"],
        "n": ["2", "1"],
        "loss": ["2.5", "2"],
        "GBitOps": ["8", "8"],
        "cost relative to static q_max": ["0.5", "0.5"],
    }


def test_energy_and_latency_have_columns_where_a_cost_model_estimates_them():
    """A sweep with `hardware=bitfusion` showed bit operations alone."""
    cost = {"gbitops": 8.0, "relative_to_static": 0.5, "energy_j": 0.25, "latency_s": 0.125}
    run = {"metric": "loss", "unit": "", "final": 2.0, "cost": {"total": cost}}
    without = {**run, "cost": {"total": {**cost, "energy_j": None, "latency_s": None}}}
    table = cells(table_of([FinishedSetting({"seed": 0}, [run]), FinishedSetting({"seed": 1}, [without])]))
    assert (table["energy (J)"], table["latency (s)"]) == (["0.25", ""], ["0.125", ""])
    assert not {"energy (J)", "latency (s)"} & cells(table_of([FinishedSetting({}, [without])])).keys()


def test_settings_of_one_schedule_have_a_column_beside_other_schedules():
    """Static 5 and 8 bits beside CR were two rows of the same name."""
    run = {"metric": "loss", "unit": "", "final": 2.0, "cost": {"total": {"gbitops": 8.0, "relative_to_static": 0.5}}}
    static = [{"schedule.name": "static", "schedule.q_max": bits, "schedule.cycles": None} for bits in (5, 8)]
    cyclic = {"schedule.name": "CR", "schedule.q_max": 8, "schedule.cycles": 8}
    table = cells(table_of([FinishedSetting(one, [run]) for one in (*static, cyclic)]))
    assert table["schedule.q_max"] == ["5", "8", "8"] and "schedule.cycles" not in table


@pytest.mark.parametrize("asked", ["hardware.convention=cpt", "hardware=bitfusion", "hardware.count=with_bn"])
def test_costs_are_those_that_the_command_asks_for(asked, digits, copied_digits):
    """A sweep whose runs were finished showed the cost as it was counted before, whatever it was asked for."""
    first, second = [copied_digits("schedule=CR", f"seed={seed}") for seed in (0, 1)]
    other = digits("schedule=CR", asked)
    runs = [SweepRun({}, str(run.folder.path), config=other.config) for run in (first, second)]
    for _, summary in finished_runs(runs):
        assert summary["cost"]["total"] == other.cost().summary()
    as_recorded = SweepRun({}, str(second.folder.path), config=first.config)
    [(_, summary)] = finished_runs([as_recorded])
    assert summary["cost"]["total"]["gbitops"] == first.cost().gbitops


def test_a_run_whose_data_have_moved_keeps_its_row_without_a_cost(copied_digits, caplog, monkeypatch):
    """With another cost model, the table at the end of a sweep was lost to the error."""
    run = copied_digits("schedule=CR", "seed=0")
    monkeypatch.setattr("bitcycle.sweep.table.make_plan", moved)
    asked = SweepRun({}, str(run.folder.path), config=configure("hardware=bitfusion"))
    [(folder, _)] = found = finished_runs([asked])
    assert "no cost by this cost model: the data have moved" in caplog.text
    table = cells(table_of(finished_settings(found)))
    assert folder.path == run.folder.path and "GBitOps" not in table and table["n"] == ["1"]


def moved(config):
    raise DataError("the data have moved")


@pytest.mark.parametrize(
    ("recorded", "asked", "same"),
    [
        ("hardware=bitops", "hardware=bitops", True),
        ("hardware=bitfusion", "hardware=bitops", True),
        ("hardware=bitops", "hardware=bitfusion", False),
        ("hardware.convention=cpt", "hardware=bitops", False),
        ("hardware.run_samples=9", "hardware=bitops", True),  # without effect
        ("hardware.convention=cpt hardware.run_samples=9", "hardware.convention=cpt", False),
    ],
)
def test_what_is_counted_again(recorded, asked, same):
    """Planning a large network takes seconds, so a sweep counts again only what other numbers would follow from."""
    counting = configure(*recorded.split()).hardware.counting()
    assert configure(asked).hardware.is_recorded(counting) is same
    own = {**counting, "source": "0af1"}
    assert not configure(asked).hardware.is_recorded(own)


def test_unfinished_runs_are_left_out(digits, capsys):
    show_runs(finished_runs([SweepRun({}, str(digits("seed=5").folder.path))]))
    assert not capsys.readouterr().out


def test_a_sweep_of_a_paper_shows_published_numbers_beside_its_runs(finished):
    """The run takes the place of one that the manifest of the item names."""
    [item] = [item for item in read_items(resource_root() / PUBLISHED) if item.id == "cpt/table6"]
    place = next(p for p in read_manifest(ROOT / "results" / "manifest" / "cpt" / "table6.csv") if p.scale == "smoke")
    folder, summary = finished
    tables = sweep_tables(item.sweep, [(folder, {**summary, "hash": place.hash})])
    assert tables[0].caption.startswith("Published numbers")
    assert tables[-1].caption.startswith("Our runs"), [table.caption for table in tables]
    assert "ResNet-8" in str(tables[-1].rows)
