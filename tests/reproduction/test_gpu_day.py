"""`bitcycle gpu-day`: the order of sweeps, the hours, resuming, and a whole day of seconds at scale smoke."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bitcycle.doctor import work
from bitcycle.errors import EXIT_DONE, EXIT_INTERRUPTED, RunError
from bitcycle.files import read_csv, read_object, write_csv
from bitcycle.reproduction import gpu_day
from bitcycle.reproduction.analysis.claims import Claim
from bitcycle.reproduction.analysis.items import Item
from bitcycle.reproduction.figure.page import Entry
from bitcycle.reproduction.gpu_day import claims_of_sweeps, paper_and_ours, plan_table, planned
from bitcycle.reproduction.reproduce import train_all
from bitcycle.sweep.local import LocalPool
from bitcycle.sweep.registry import SweepRun
from bitcycle.sweep.status import measured_seconds
from tests.conftest import ROOT
from tests.reproduction.figures_cases import data_of, made_up

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


SWEEPS = {"cpt/table2": "[static, CR]", "better/fig3": "[static, RTH]"}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A repository of two small sweeps with claims."""
    monkeypatch.chdir(tmp_path)
    for name in ("conf", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    published = tmp_path / "results" / "published"
    published.mkdir(parents=True)
    for file in (ROOT / "results" / "published").iterdir():
        (published / file.name).symlink_to(file)
    (published / "items.csv").unlink()
    items = [item for item in read_csv(ROOT / "results" / "published" / "items.csv") if item["sweep"] in SWEEPS]
    write_csv(published / "items.csv", list(items[0]), items)
    for name, schedules in SWEEPS.items():
        file = tmp_path / "sweeps" / f"{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(SWEEP.replace("SCHEDULES", schedules))
    monkeypatch.setattr(gpu_day, "BENCHMARK", ("--parts", "quantizers", "--rounds", "1"))
    monkeypatch.setattr(work, "RUN_BUDGET", 0.1)
    return tmp_path


def test_a_dry_run_times_and_trains_nothing(small, capsys):
    assert gpu_day.gpu_day(small, "smoke", 0.01, LocalPool(1), dry=True) == EXIT_DONE
    shown = capsys.readouterr().out
    assert "cpt/table2" in shown and "better/fig3" in shown
    assert not (small / "results" / "runs").exists()
    known = json.loads((small / "results/gpu-day/smoke/seconds.json").read_text())
    assert 1 <= len(known) <= 3 and all(seconds > 0 for seconds in known.values())


def test_a_day_from_the_doctor_to_the_figures_and_the_next_one_goes_on(small, capsys):
    target = small / gpu_day.OUTPUT / "smoke"
    assert gpu_day.gpu_day(small, "smoke", 1.0, LocalPool(1), dry=False) == EXIT_DONE
    shown = capsys.readouterr().out
    assert (
        "quantizers" in shown and "claims per hour" in shown and str(gpu_day.OUTPUT / "smoke" / "index.html") in shown
    )
    assert read_object(target / "benchmark.json")["quantizers"]
    summaries = sorted(small.rglob("results/runs/smoke/*/*/summary.json"))
    assert len(summaries) == 3, "the static run of both sweeps is one"
    assert len(read_csv(target / "summary" / "runs.csv")) == 3
    assert (target / "index.html").exists() and list((target / "figures").rglob("*.md"))
    table = (target / "paper-and-ours.md").read_text()
    assert [line for line in table.splitlines() if line.startswith("## ")] == ["## better/fig3", "## cpt/table2"]
    kept = [*summaries, target / "benchmark.json"]
    before = [path.stat().st_mtime_ns for path in kept]
    assert gpu_day.gpu_day(small, "smoke", 1.0, LocalPool(1), dry=False) == EXIT_DONE
    assert [path.stat().st_mtime_ns for path in kept] == before, "nothing is measured or trained again"


def test_the_published_numbers_stand_beside_ours():
    settings = {"model": "resnet74", "dataset": "cifar10", "quantizer": "sbm", "schedule__q_max": 8}
    data = data_of("cpt/table2", made_up(93.0, 95.0, schedule="static", **settings))
    text = paper_and_ours([Entry(data, (), None, (Path("page.md"),))], "paper")
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]
    [row] = [found for line in lines[2:] if (found := dict(zip(lines[0], line)))["ours"]]
    assert float(row["ours"]) == 94
    assert (row["schedule"], row["n"]) == ("static", "2")
    assert float(row["difference"]) == pytest.approx(94 - float(row["published"]))
    assert paper_and_ours([Entry(data, (), None, (Path("page.md"),))], "mini").strip() == "", "no runs of that scale"


@pytest.fixture
def examined(tmp_path, monkeypatch):
    """Runs the examination of a checkout whose commands return these exit codes: (commands, their environments)."""
    (tmp_path / gpu_day.GOLDEN).mkdir(parents=True)
    (tmp_path / "benchmark.json").write_text("{}")
    monkeypatch.setattr(gpu_day, "choose_device", lambda name: torch.device("meta"))

    def run(doctor: int = EXIT_DONE, golden: int = 0) -> list[tuple[str, str]]:
        commands = []

        def called(command, env, **options):
            commands.append((" ".join(command[1:]), env[gpu_day.GOLDEN_DEVICE]))
            return SimpleNamespace(returncode=golden)

        monkeypatch.setattr(gpu_day, "examine", lambda settings, as_json: doctor)
        monkeypatch.setattr(gpu_day.subprocess, "run", called)
        gpu_day.examine_once(tmp_path, tmp_path)
        return commands

    return run


def test_the_golden_tests_run_once_on_the_device_of_runs(examined, monkeypatch):
    [(command, device)] = examined()
    assert command.startswith("-m pytest") and "-m golden" in command and device == "meta"
    assert examined() == [], "passed"
    monkeypatch.setattr(gpu_day, "choose_device", lambda name: torch.device("cpu"))
    assert [device for _, device in examined()] == ["cpu"], "another device may compute something else"


def test_an_unsound_machine_trains_nothing(examined):
    with pytest.raises(RunError, match="do what it says"):
        examined(doctor=1)
    for _ in range(2):  # a failure is not kept
        with pytest.raises(RunError, match="golden tests fail"):
            examined(golden=1)


def test_no_run_begins_when_the_hours_are_over(small):
    pool = LocalPool(1)
    pool.until = time.monotonic()
    assert train_all(small, "smoke", pool) == EXIT_INTERRUPTED
    assert not list(small.rglob("summary.json"))


def test_the_end_of_the_hours_stops_runs_that_are_in_progress(small):
    (small / "train.py").unlink()
    (small / "train.py").write_text(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\ntime.sleep(30)\n"
    )
    pool, began = LocalPool(1, method="spawn"), time.monotonic()
    pool.until = began + 1.5
    assert train_all(small, "smoke", pool) == EXIT_INTERRUPTED
    assert time.monotonic() - began < 20
