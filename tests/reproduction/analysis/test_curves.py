"""Curves of runs."""

from __future__ import annotations

import gzip
import json

import pytest

from bitcycle.files import write_json
from bitcycle.picture.curve import curve_of
from bitcycle.reproduction.analysis.collect import read_curve, write_curve
from bitcycle.training.run_folder import RunFolder

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
    rising = [{**record, "accuracy": record["step"] / 10} for record in many]
    kept = curve_of([*rising, RECORDS[-1]], {**SUMMARY, "total_steps": 1000})["training"]["accuracy"]
    assert kept[0] == pytest.approx(0.3) and kept[-1] == pytest.approx(99.8)  # means of five steps


def test_curves_are_equal_bytes(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    write_json(folder.summary, SUMMARY)
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    first = write_curve(folder, tmp_path / "curves").read_bytes()
    assert write_curve(folder, tmp_path / "curves").read_bytes() == first
    assert json.loads(gzip.decompress(first)) == read_curve(tmp_path / "curves", SUMMARY)
    assert read_curve(tmp_path / "curves", {**SUMMARY, "seed": 4}) == {}


def test_blocks_of_an_allocation_are_read_in_the_order_of_the_network(tmp_path):
    """Block 10 stood before block 2, so that the thirds of a deep network were not its thirds."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    write_json(folder.summary, SUMMARY)
    blocks = [f"group{group}.{number}" for group in (1, 2) for number in range(12)]
    test = {**RECORDS[-1], "allocation": {name: {"8/8": 1.0} for name in blocks}}
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in [RECORDS[0], test]))
    write_curve(folder, tmp_path / "curves")
    (found,) = read_curve(tmp_path / "curves", SUMMARY)["allocation"].values()
    assert list(found) == blocks


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
