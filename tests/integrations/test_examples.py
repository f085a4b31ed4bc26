"""The examples of the documentation: the script of fine-tuning with fewer steps, and the notebook from top to bottom."""

import copy
import json
import runpy

import bitcycle
from tests.conftest import ROOT


def test_fine_tuning_with_the_trainer(tmp_path, monkeypatch):
    """Its bits are those of the schedule, its cost grows as the picture shows, and the picture is drawn."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    script = ROOT / "docs" / "examples" / "fine_tuning.py"
    assert len(script.read_text().splitlines()) <= 65
    log = runpy.run_path(str(script))["main"](8, "picture.png")
    steps = [entry for entry in log if "loss" in entry]
    schedule = bitcycle.schedule("CR", q_min=3, q_max=8, cycles=4, total_steps=8)
    assert [entry["bits_weight"] for entry in steps] == [schedule(step).weight for step in range(8)]
    costs = [entry["gbitops"] for entry in steps]
    assert costs == sorted(costs) and costs[0] > 0
    assert steps[-1]["cost_relative_to_static"] < 1 and 0 <= log[-1]["eval_accuracy"] <= 1
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_notebook_runs_from_top_to_bottom(monkeypatch):
    """With the pictures and kinds of output that are stored in it."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    stored = json.loads((ROOT / "docs" / "examples" / "own-model.ipynb").read_text())
    executed = runpy.run_path(str(ROOT / "scripts" / "notebook.py"))["execute"](copy.deepcopy(stored))
    kinds, kinds_stored = (
        [[out["output_type"] for out in cell.get("outputs", [])] for cell in notebook["cells"]]
        for notebook in (executed, stored)
    )
    assert kinds == kinds_stored
    assert sum(kind == "display_data" for cell in kinds for kind in cell) >= 2
    report, stored_report = (notebook["cells"][3]["outputs"][0]["text"] for notebook in (executed, stored))
    assert report == stored_report
