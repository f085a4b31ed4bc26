"""`bitcycle gpu-day`: the order of sweeps, the hours, resuming, and a whole day of seconds at scale smoke."""

from __future__ import annotations

import json
import time

import pytest

from bitcycle.errors import EXIT_DONE, EXIT_INTERRUPTED
from bitcycle.reproduction import gpu_day
from bitcycle.reproduction.analysis.claims import Claim
from bitcycle.reproduction.analysis.items import Item
from bitcycle.reproduction.gpu_day import claims_of_sweeps, plan_table, planned
from bitcycle.sweep.local import LocalPool
from bitcycle.sweep.registry import SweepRun, sweep_index
from bitcycle.sweep.status import measured_seconds
from tests.conftest import ROOT

SWEEP = """
hydra: {sweeper: {title: made up, trials: {smoke: 1}, grids: [{dataset: digits, model: resnet8, training.steps: 16,
  dataset.train_samples: 64, dataset.test_samples: 32, training.batch_size: 16, schedule: SCHEDULES}]}}
"""


def runs(name: str, count: int) -> list[SweepRun]:
    return [SweepRun({}, f"results/runs/smoke/{name}-{number}/seed=0") for number in range(count)]


def test_claims_are_those_that_runs_decide():
    items = [Item("cpt", name, "table", "", f"cpt/{sweep}") for name, sweep in (("a", "a"), ("b", "a"), ("c", "c"))]
    items.append(Item("cpt", "d", "table", "", ""))
    claims = [
        Claim(id="cpt/a-c1", predicate="higher"),
        Claim(id="cpt/b-c1", predicate="lower", items=["c"]),
        Claim(id="cpt/c-c1", predicate="none"),
        Claim(id="cpt/d-c1", predicate="higher"),
    ]
    assert claims_of_sweeps(claims, items) == {"cpt/a": 2, "cpt/c": 1}


def test_most_claims_per_hour_first_and_what_was_not_timed_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    index = {
        "p/slow": runs("m-slow-q-s", 2),
        "p/quick": runs("m-quick-q-s", 2),
        "p/absent": runs("m-absent-q-s", 1),
        "p/idle": runs("m-quick-q-t", 1),
        "p/equal": runs("m-quick-q-u", 2),
    }
    seconds = measured_seconds([(index["p/slow"][0], 7200.0), (index["p/quick"][0], 1800.0)])
    claims = {"p/slow": 3, "p/quick": 2, "p/absent": 9, "p/equal": 2}
    plan = planned(index, claims, seconds)
    assert [entered.sweep for entered in plan] == ["p/equal", "p/quick", "p/slow", "p/absent"]
    assert [entered.hours for entered in plan] == [1.0, 1.0, 4.0, 0.0]
    assert [entered.worth for entered in plan[1:3]] == [2.0, 0.75]
    ends = list(plan_table(plan, 2.5, workers=1).columns[-1].cells)
    assert ends[:2] == ["1.00 h", "2.00 h"] and ends[2].startswith("later") and ends[3].startswith("left out: 1 runs")
    index["p/quick"][0].folder.path.mkdir(parents=True)
    index["p/quick"][0].folder.write_status("done", 4, 4)
    (index["p/quick"][0].folder.summary).write_text('{"seconds": 1800}')
    assert planned(index, claims, seconds)[0].sweep == "p/quick", "half of its hours are done"


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A repository of two small sweeps with claims, in which the examination is skipped."""
    monkeypatch.chdir(tmp_path)
    for name in ("conf", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "published").symlink_to(ROOT / "results" / "published")
    for name, schedules in {"cpt/table2": "[static, CR]", "better/fig3": "[static, RTH]"}.items():
        file = tmp_path / "sweeps" / f"{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(SWEEP.replace("SCHEDULES", schedules))
    monkeypatch.setattr(gpu_day, "examine_once", lambda root, target: None)
    return tmp_path


def test_a_dry_run_times_and_trains_nothing(small, capsys):
    assert gpu_day.gpu_day(small, "smoke", 0.01, LocalPool(1), dry=True) == EXIT_DONE
    shown = capsys.readouterr().out
    assert "cpt/table2" in shown and "better/fig3" in shown
    assert not (small / "results" / "runs").exists()
    known = json.loads((small / "results/gpu-day/smoke/seconds.json").read_text())
    assert 1 <= len(known) <= 3 and all(seconds > 0 for seconds in known.values())


def test_a_day_trains_draws_and_resumes(small, capsys, monkeypatch):
    drawn = []

    def draw_all(root, scale, target):
        drawn.append(target)
        return EXIT_DONE, []

    monkeypatch.setattr(gpu_day, "draw_all", draw_all)
    assert gpu_day.gpu_day(small, "smoke", 1.0, LocalPool(1), dry=False) == EXIT_DONE
    summaries = sorted(small.rglob("results/runs/smoke/*/*/summary.json"))
    assert len(summaries) == 3, "the static run of both sweeps is one"
    before = [path.stat().st_mtime_ns for path in summaries]
    assert gpu_day.gpu_day(small, "smoke", 1.0, LocalPool(1), dry=False) == EXIT_DONE
    assert [path.stat().st_mtime_ns for path in summaries] == before, "finished runs are not trained again"
    assert drawn == [gpu_day.OUTPUT / "smoke"] * 2
    assert (small / gpu_day.OUTPUT / "smoke" / "paper-and-ours.md").exists()


def test_no_run_begins_when_the_hours_are_over(small, monkeypatch):
    monkeypatch.setattr(gpu_day, "draw_all", lambda root, scale, target: (EXIT_DONE, []))
    index = sweep_index(small, "smoke")
    plan = planned(
        index, dict.fromkeys(index, 1), measured_seconds((run, 1.0) for runs in index.values() for run in runs)
    )
    assert gpu_day.train_plan(small, plan, "smoke", LocalPool(1), seconds=0) == EXIT_INTERRUPTED
    assert not list(small.rglob("summary.json"))


def test_the_deadline_stops_runs_that_are_in_progress(small, monkeypatch):
    (small / "train.py").unlink()
    (small / "train.py").write_text(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\ntime.sleep(30)\n"
    )
    index = sweep_index(small, "smoke")
    plan = planned(
        index, dict.fromkeys(index, 1), measured_seconds((run, 1.0) for runs in index.values() for run in runs)
    )
    began = time.monotonic()
    code = gpu_day.train_plan(small, plan, "smoke", LocalPool(1, method="spawn"), seconds=1.5)
    assert code == EXIT_INTERRUPTED
    assert time.monotonic() - began < 20
