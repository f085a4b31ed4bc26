"""`make reproduce` and `make status` on a small folder of sweeps: order, interruption, states, and what comes out."""

import json
import math
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from bitcycle.errors import EXIT_DONE, EXIT_INTERRUPTED
from bitcycle.files import write_json
from bitcycle.reproduction.analysis.cells import Cell
from bitcycle.reproduction.figure.page import Entry
from bitcycle.reproduction.reproduce import items_table, train_all
from bitcycle.settings import SettingError
from bitcycle.sweep import registry
from bitcycle.sweep.local import LocalPool
from bitcycle.sweep.registry import distinct, sweep_index
from bitcycle.sweep.status import Speeds, sweeps_table
from bitcycle.training.run_folder import RunFolder
from tests.conftest import ROOT
from tests.reproduction.figures_cases import data_of, made_up

FIRST = """
hydra: {sweeper: {title: first, grids: [{dataset: digits, model: resnet8, training.steps: 4, schedule: [CR, LR]}],
  trials: {smoke: 2}}}
"""
SECOND = """
hydra: {sweeper: {title: second, grids: [{dataset: digits, model: resnet8, training.steps: 4, schedule: [CR, RR]},
  {dataset: digits, model: resnet8, training.steps: 4, model.initial_weights: WEIGHTS}]}}
"""

TRAIN = """
import json, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
with open("log.txt", "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
time.sleep(0.5)
(folder,) = (pathlib.Path(path) for arguments, path in json.load(open("folders.json")) if arguments == sys.argv[1:])
folder.mkdir(parents=True)
(folder / "status.json").write_text('{"state": "done"}')
(folder / "summary.json").write_text('{"final": 1}')
"""
"""A train.py that trains nothing."""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A repository of two sweeps, the second of which begins from a run of the first; two runs are shared."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    folder = tmp_path / "sweeps" / "paper"
    folder.mkdir(parents=True)
    (folder / "b.yaml").write_text(FIRST)
    first = sweep_index(tmp_path, "smoke")["paper/b"]
    (folder / "a.yaml").write_text(SECOND.replace("WEIGHTS", str(first[0].path)))
    return tmp_path


def finish(folder: RunFolder, seconds: float = 10.0) -> None:
    """Make a run folder look as after training."""
    import torch

    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_status("done", 4, 4)
    write_json(folder.summary, {"final": 1, "seconds": seconds})
    folder.checkpoint.last.parent.mkdir(exist_ok=True)
    from bitcycle.model import build_seeded
    from tests.conftest import configure

    config = configure("dataset=digits", "model=resnet8")
    model = build_seeded(config.model, config.dataset.info(config.data_folder).shape, 0)
    torch.save({"model": model.state_dict()}, folder.checkpoint.last)


# The runs of all sweeps.


def test_shared_runs_are_one_and_a_run_without_its_weights_waits(small):
    stock = sweep_index(small, "smoke")
    assert [len(stock[name]) for name in ("paper/a", "paper/b")] == [3, 4]
    assert [run.state for run in stock["paper/a"]] == ["missing", "missing", "waiting"]
    assert len(distinct(stock.values())) == 6
    assert "no such file or folder" in stock["paper/a"][2].problem


def test_configurations_are_kept_until_a_file_changes(small, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(small / "cache"))
    monkeypatch.setattr("bitcycle.cache._in_memory", {})
    before = sweep_index(small, "smoke")
    monkeypatch.setattr("bitcycle.cache._in_memory", {})
    composed = []
    composing = registry.composing
    monkeypatch.setattr(registry, "composing", lambda conf: composed.append(conf) or composing(conf))
    assert sweep_index(small, "smoke") == before
    assert composed == []
    finish(before["paper/b"][0].folder)  # the weights that a run begins from
    assert [run.state for run in sweep_index(small, "smoke")["paper/a"]] == ["done", "missing", "missing"]
    path = small / "sweeps" / "paper" / "b.yaml"
    path.write_text(path.read_text().replace("smoke: 2", "smoke: 1"))
    assert len(sweep_index(small, "smoke")["paper/b"]) == 2
    assert len(composed) == 1


def test_configurations_that_are_kept_have_the_present_folder_of_data(small, monkeypatch):
    """`gpu-day` looked for data in the former one, and left out what it did not find there."""
    for folder in ("former", "present"):
        monkeypatch.setenv("BITCYCLE_DATA", folder)
        assert {run.config.data_root for run in sweep_index(small, "smoke")["paper/b"]} == {folder}


def test_a_folder_without_sweeps_is_refused(tmp_path):
    with pytest.raises(SettingError, match="run this in the repository's root"):
        sweep_index(tmp_path, "smoke")


# Status.


def test_states_and_the_time_that_is_left(small):
    stock = sweep_index(small, "smoke")
    done, half, failed, _ = (run.folder for run in stock["paper/b"])
    finish(done, seconds=10)
    half.path.mkdir(parents=True)
    half.write_status("running", 1, 4)
    failed.path.mkdir(parents=True)
    failed.write_status("failed", 2, 4, "no memory")
    runs = stock["paper/b"]
    with half.lock():
        table = sweeps_table(list(stock.items()), "sweeps", workers=2)
    rows = {row[0]: row[1:] for row in zip(*(column.cells for column in table.columns))}
    headings = [column.header for column in table.columns][1:]
    assert headings == ["runs", "done", "running", "failed", "missing", "waiting", "time left", "note"]
    assert rows["paper/b"][:6] == ("4", "1", "1", "1", "1", "")
    assert rows["paper/b"][6] == "0:00:11"  # the rest of runs of 10 seconds, two at a time
    assert rows["paper/b"][7].startswith("last update 20") and rows["paper/b"][7].endswith("1 failed: no memory")
    assert rows["all, each run once"][0] == "6"
    assert rows["paper/a"][7] == "1 waiting for paper/b"
    assert sum(filter(None, map(Speeds(runs[:1]).of, runs[1:]))) == pytest.approx(10 * (3 / 4 + 2 / 4 + 1))
    assert Speeds([]).left(runs[1:], 1) == "3 runs of a kind never measured"


# Training all.


def test_a_run_that_begins_from_another_comes_after_it_and_none_is_tried_twice(small):
    first = sweep_index(small, "smoke")["paper/b"][0]
    trained, begins_from = [], []

    class Pool:
        stopped_by, workers, until = None, 1, math.inf

        def serve(self, take, ended, put_back):
            while (taken := take()) is not None:
                run, command = taken
                trained.append(run.path)
                begins_from.append(any(argument.startswith("model.initial_weights=") for argument in command))
                finish(run.folder)
                ended(run, 0)

    assert train_all(small, "smoke", Pool()) == EXIT_DONE
    assert len(set(trained)) == len(trained) == 6
    assert trained[0] == first.path
    assert begins_from == [False, False, True, False, False, False]  # as soon as it can, in the order of the sweeps


def test_an_interrupted_reproduction_goes_on_with_what_is_missing(small):
    """Every run takes a moment and leaves a finished folder; the first command is stopped after one."""
    (small / "sweeps" / "paper" / "a.yaml").unlink()
    pool = partial(LocalPool, 1, method="spawn")
    (small / "folders.json").write_text(
        json.dumps([[run.arguments, run.path] for run in distinct(sweep_index(small, "smoke").values())])
    )
    (small / "train.py").write_text(TRAIN)

    def finished() -> int:
        return len(list(small.rglob("summary.json")))

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not finished() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    assert train_all(small, "smoke", pool()) == EXIT_INTERRUPTED
    assert 1 <= finished() < 4
    assert train_all(small, "smoke", pool()) == EXIT_DONE
    assert finished() == 4
    assert len((small / "log.txt").read_text().splitlines()) <= 5  # only the one that was stopped ran twice


def test_the_table_of_items_says_what_is_missing():
    with_run, without = made_up(1.0, scale="smoke"), Cell({}, {})
    items = {
        "cpt/fig1": [with_run, with_run],
        "cpt/table2": [with_run, without],
        "cpt/table3": [without],
        "cpt/fig9": [],
    }
    data = [data_of(name, *cells, scale="smoke" if with_run in cells else None) for name, cells in items.items()]
    table = items_table([Entry(one, (), None, (Path("page.md"),)) for one in data], "smoke")
    assert [list(column.cells) for column in table.columns][1:] == [
        ["2 of 2", "1 of 2", "0 of 1", "needs no runs"],
        ["1"] * 4,
        ["complete", "1 cells without runs", "no runs", "complete"],
    ]
    assert str(table.caption).startswith("2 of 4 complete")
