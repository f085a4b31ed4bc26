"""A sweep ends with what was measured beside what was published."""

from __future__ import annotations

import pytest

from bitcycle.analysis.aggregation import read_runs
from bitcycle.analysis.items import PUBLISHED, read_items
from bitcycle.figure.sweep_table import measured, show_sweep, sweep_tables
from bitcycle.resources import resource_root
from bitcycle.sweep.manifest import read_manifest
from tests.conftest import ROOT


@pytest.fixture
def finished(finished_digits):
    return finished_digits(
        "schedule=RTH", "schedule.cycles=2", "training.steps=8", "training.evaluation_steps=8"
    ).folder


def test_runs_without_an_item_have_a_plain_table(finished, capsys):
    [table] = sweep_tables("", [finished])
    row = dict(zip(table.headings, table.rows[0]))
    summary = finished.read_summary()
    assert (row["model"], row["schedule"], row["metric"], row["n"]) == ("resnet8", "RTH", "test_accuracy", "1")
    assert float(row["final"]) == pytest.approx(summary["final"], abs=0.01)
    assert float(row["of static"]) == pytest.approx(summary["cost"]["total"]["relative_to_static"], abs=1e-3)
    show_sweep("", [finished])
    assert "RTH" in capsys.readouterr().out


def test_mean_and_deviation_over_seeds():
    row = {"final": "90", "metric": "test_accuracy", "relative_to_static": "0.4", "settings": "{}"}
    row |= dict.fromkeys(("scale", "model", "dataset", "quantizer", "schedule", "q_min", "q_max", "cycles"), "x")
    row |= {"total_steps": "8", "hash": "h"}
    [line] = measured(read_runs([row, {**row, "final": "92"}], ROOT)).rows
    assert line[-4:] == ["91.00", "1.41", "2", "0.400"]


def test_unfinished_runs_are_left_out(digits):
    assert sweep_tables("", [digits("seed=5").folder]) == []


def test_a_sweep_of_a_paper_shows_published_numbers_beside_its_runs(finished, monkeypatch):
    """The run takes the place of one that the manifest of the item names."""
    [item] = [item for item in read_items(resource_root() / PUBLISHED) if item.id == "cpt/table6"]
    place = next(p for p in read_manifest(ROOT / "results" / "manifest" / "cpt" / "table6.csv") if p.scale == "smoke")
    real = finished.read_summary()
    monkeypatch.setattr(type(finished), "read_summary", lambda self: {**real, "hash": place.hash})
    tables = sweep_tables(item.sweep, [finished])
    assert tables[0].caption.startswith("Published numbers")
    assert tables[-1].caption.startswith("Our runs"), [table.caption for table in tables]
    assert "ResNet-8" in str(tables[-1].rows)
