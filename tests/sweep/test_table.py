"""A sweep ends with what was measured beside what was published."""

from __future__ import annotations

import pytest

from bitcycle.files import resource_root
from bitcycle.reproduction.analysis.aggregation import read_runs
from bitcycle.reproduction.analysis.items import PUBLISHED, read_items
from bitcycle.reproduction.figure.table import settings_of, show_sweep, sweep_tables
from bitcycle.reproduction.manifest import read_manifest
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
    assert (row["network"], row["schedule"], row["metric"], row["n"]) == ("ResNet-8", "RTH", "test_accuracy", "1")
    assert float(row["ours"]) == pytest.approx(summary["final"], abs=0.01)
    cost = summary["cost"]["total"]["relative_to_static"]
    assert float(row["cost relative to static"]) == pytest.approx(cost, abs=1e-3)
    show_sweep("", [finished])
    assert "RTH" in capsys.readouterr().out


def test_one_row_for_the_seeds_of_a_setting():
    row = {"final": "90", "scale": "mini", "hash": "h", "settings": "{}"}
    several = read_runs([row, {**row, "final": "92"}, {**row, "hash": "other"}, {**row, "scale": "smoke"}], ROOT)
    cells = settings_of(several, "mini")
    assert [len(cell.runs) for cell in cells] == [2, 1]


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
