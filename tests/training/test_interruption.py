"""Signals at any moment, files that somebody touched, folders of other runs: one clear line, and nothing lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from bitcycle import files
from bitcycle.errors import RunError
from bitcycle.files import read_json, read_records
from bitcycle.reproduction.analysis.collect import collect, summary_row
from bitcycle.signals import StopSignal
from bitcycle.threads import share_of
from bitcycle.training.loop import Trainer
from bitcycle.training.plan import Plan
from bitcycle.training.report import status_table
from bitcycle.training.run import execute
from bitcycle.training.run_folder import RunFolder
from tests.conftest import ROOT, ForkedTraining, digits_plan, plan, run_train, train_command
from tests.dataset.test_dataset import write_folders
from tests.training.test_resume import Crash

ALL = ("dataset.train_samples=null", "dataset.test_samples=null")
SMALL = ("dataset=digits", "model=resnet8", "scale=smoke")


def wait_for_steps(path: Path) -> None:
    """Return when a run below a folder has recorded steps: a stop before the first one leaves nothing to resume."""
    deadline = time.monotonic() + 120
    while not any(file.stat().st_size for file in path.rglob("metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_while_libraries_are_imported(number, tmp_path):
    command = train_command(*SMALL, f"results_root={tmp_path}")
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    time.sleep(0.7)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert errors.strip() == "interrupted: run the same command again"


def test_an_interruption_ends_the_sweep(command, tmp_path):
    def interrupt():
        wait_for_steps(tmp_path)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    code, _, errors = command("-m", *SMALL, "training.steps=100000", "seed=0,1", "hydra.launcher.workers=1")
    assert code == 75, errors
    (status,) = tmp_path.rglob("status.json")  # seed 1 was not begun
    assert RunFolder(status.parent).state() == "resumable"
    assert "Traceback" not in errors


def test_a_signal_to_the_whole_group_is_no_failure_of_the_processes_that_decode(tmp_path):
    write_folders(tmp_path / "data" / "train", {"cat": 40, "dog": 40}, size=(8, 8))
    overrides = ["dataset=image_folder", f"dataset.path={tmp_path}/data", "dataset.memory_gib=0", "dataset.workers=2"]
    overrides += ["model=resnet8", "scale=smoke", *ALL, "training.steps=100000", "training.batch_size=8"]
    process = ForkedTraining(tmp_path, *overrides, f"results_root={tmp_path}/runs")  # in a session of its own
    wait_for_steps(tmp_path / "runs")
    os.killpg(process.pid, signal.SIGTERM)
    done = process.wait(timeout=60)
    assert done.returncode == 75, done.stderr
    (status,) = (tmp_path / "runs").rglob("status.json")
    assert RunFolder(status.parent).state() == "resumable"
    assert "Traceback" not in done.stderr


def test_nothing_interrupts_a_save():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with stop.held():
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.received == "SIGINT"


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """Plans of runs that crashed before step 40, with checkpoints before."""
    train_step = Trainer.train_step

    def dying(self, batch):
        if self.step == 40:
            raise Crash
        train_step(self, batch)

    @cache
    def make(*overrides: str) -> Plan:
        planned = digits_plan(tmp_path_factory.mktemp("crashed"), "training.checkpoint_seconds=0", *overrides)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "train_step", dying)
            with pytest.raises(Crash):
                execute(planned)
        return planned

    return make


@pytest.fixture
def interrupted(digits, crashed):
    """The same, each in a folder of its own."""

    def make(*overrides: str) -> Plan:
        planned = digits("training.checkpoint_seconds=0", *overrides)
        shutil.copytree(crashed(*overrides).folder.path, planned.folder.path)
        return planned

    return make


@pytest.mark.parametrize("damage", ["deleted", "cut"])
def test_lost_metrics_are_noticed(interrupted, damage):
    planned = interrupted()
    if damage == "deleted":
        planned.folder.metrics.unlink()
    else:
        planned.folder.metrics.write_bytes(planned.folder.metrics.read_bytes()[:50])
    with pytest.raises(RunError, match=r"metrics\.jsonl has .* Restore it, or delete"):
        execute(planned)


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for line in ("garbage", "7", "null"):
        path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
        with pytest.raises(RunError, match="line 2 of"):
            read_records(path)


def test_a_checkpoint_of_another_run_is_passed_over(interrupted):
    ours, theirs = interrupted(), interrupted("schedule=RTH")
    shutil.copy(theirs.folder.checkpoint.last, ours.folder.checkpoint.last)
    summary = execute(ours)
    assert "which belongs to another run" in ours.folder.log.read_text()
    assert summary["schedule"] == ours.schedule.name
    shutil.copy(ours.folder.checkpoint.last, theirs.folder.checkpoint.last)
    shutil.copy(ours.folder.checkpoint.last, theirs.folder.checkpoint.previous)
    with pytest.raises(RunError, match="no usable checkpoint"):
        execute(theirs)


def test_a_checkpoint_of_other_code_is_one_line(interrupted):
    planned = interrupted()
    checkpoint = planned.folder.checkpoint
    state = torch.load(checkpoint.last, weights_only=True)
    state["model"].popitem()
    for _ in range(2):  # as the last one and as the previous one
        checkpoint.save(state)
    with pytest.raises(RunError, match="another version of this code"):
        execute(planned)


def test_another_number_of_threads_is_said(interrupted):
    planned = interrupted()
    environment = read_json(planned.folder.environment)
    planned.folder.environment.write_text(json.dumps({**environment, "threads": environment["threads"] + 1}))
    execute(planned)
    assert "resumed with threads=" in planned.folder.log.read_text()


@pytest.fixture
def four_threads(monkeypatch):
    """As on a machine of four cores, whose user has chosen no number of threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("bitcycle.threads.allowed_cores", lambda: 4)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("others", "threads"), [(0, 4), (1, 2), (2, 1), (9, 1)])
def test_a_run_shares_the_cores_with_others_that_run_already(others, threads, four_threads, monkeypatch, tmp_path):
    monkeypatch.setattr("bitcycle.training.run.runs_beside", lambda: others)
    planned = digits_plan(tmp_path, "training.steps=1")
    execute(planned)
    assert read_json(planned.folder.environment)["threads"] == threads
    assert ("of 4 threads" in planned.folder.log.read_text()) == (threads < 4)


def test_a_run_leaves_all_threads_to_the_next_one_of_its_process(four_threads, monkeypatch, tmp_path):
    """In a search, in which runs follow each other, one that began beside others left its few threads to all later ones."""
    others = iter((3, 0))
    monkeypatch.setattr("bitcycle.training.run.runs_beside", lambda: next(others))
    plans = [digits_plan(tmp_path, "training.steps=1", f"seed={seed}") for seed in (0, 1)]
    for planned in plans:
        execute(planned)
    assert [read_json(planned.folder.environment)["threads"] for planned in plans] == [1, 4]


def test_a_resumed_run_keeps_its_number_of_threads(interrupted, four_threads, monkeypatch):
    """Others would round its sums differently, so that its end would depend on what else the machine did."""
    monkeypatch.setattr(
        "bitcycle.training.run.runs_beside", lambda: 0
    )  # the first part would share the cores with real ones
    planned = interrupted()
    environment = read_json(planned.folder.environment)
    planned.folder.environment.write_text(json.dumps({**environment, "threads": 2}))
    monkeypatch.setattr("bitcycle.training.run.runs_beside", lambda: 3)
    execute(planned)
    assert read_json(planned.folder.environment)["threads"] == 2
    log = planned.folder.log.read_text()
    assert "2 of 4 threads, as before" in log and "resumed with threads=" not in log


@pytest.mark.parametrize(("before", "share"), [(1, 2), (2, 1)])
def test_a_resumed_run_of_a_sweep_keeps_its_number_of_threads(before, share, interrupted, four_threads, monkeypatch):
    """When fewer runs were left than before the interruption, each had more threads, and another result."""
    planned = interrupted()
    environment = read_json(planned.folder.environment)
    planned.folder.environment.write_text(json.dumps({**environment, "threads": before}))
    for name, value in share_of(4 // share).items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(share)
    execute(planned)
    assert read_json(planned.folder.environment)["threads"] == before
    log = planned.folder.log.read_text()
    assert f"{before} of 4 threads, as before" in log and "resumed with threads=" not in log


def test_a_new_run_of_a_sweep_has_its_share_of_the_cores(four_threads, monkeypatch, tmp_path):
    monkeypatch.setattr("bitcycle.training.run.runs_beside", lambda: 9)  # among them those of the same sweep
    for name, value in share_of(2).items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(2)
    planned = digits_plan(tmp_path, "training.steps=1")
    execute(planned)
    assert read_json(planned.folder.environment)["threads"] == 2


def test_results_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    done = run_train(*SMALL, f"results_root={tmp_path}/file")
    assert done.returncode == 1
    assert done.stderr.startswith("run failed: cannot write to")


@pytest.mark.parametrize("content", ['["a list"]', "torn", ""])
def test_a_damaged_summary_is_written_again(copied_digits, content, tmp_path):
    planned = copied_digits()
    summary = execute(planned)
    planned.folder.summary.write_text(content)
    assert status_table(tmp_path / "runs").row_count == 1
    assert execute(planned)["final"] == summary["final"]
    planned.folder.status.write_text(content)
    assert status_table(tmp_path / "runs").row_count == 1


def test_a_run_that_was_killed_does_not_look_alive(interrupted, tmp_path):
    planned = interrupted()
    (state,) = status_table(tmp_path / "runs").columns[1].cells
    assert state == "stopped"
    with planned.folder.lock():
        (state,) = status_table(tmp_path / "runs").columns[1].cells
    assert state == "running"


def test_folders_that_are_not_whole_are_left_out_of_the_collection(copied_digits, tmp_path, capsys):
    planned = copied_digits()
    planned.folder.config.unlink()
    assert collect(tmp_path / "runs", tmp_path / "summary.csv") == []
    assert str(planned.folder.path) in capsys.readouterr().err


def test_a_finished_run_is_counted_as_asked(digits, copied_digits):
    recorded = copied_digits("schedule=CR").folder
    before = recorded.read_summary()
    execute(digits("schedule=CR", "hardware=bitfusion", "hardware.convention=cpt"))  # counts other bit operations
    assert recorded.read_summary() == before
    other = digits("schedule=CR", "hardware=bitfusion")
    summary = execute(other)
    assert summary["cost"]["total"] == other.cost().summary()
    assert summary["cost"]["total"]["energy_j"] > summary["cost"]["to_best"]["energy_j"] * 0.99
    assert execute(digits("schedule=CR"))["cost"]["total"]["energy_j"] is None
    assert recorded.read_summary() == summary  # energies are kept
    assert summary_row(recorded)["energy_j"] == str(summary["cost"]["total"]["energy_j"])
    assert summary_row(recorded)["hardware"] == "bitfusion"


def test_a_finished_run_is_counted_as_asked_where_nothing_can_be_written(digits, copied_digits, monkeypatch):
    before = copied_digits("schedule=CR").folder.read_summary()

    def refuse(path, content):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files, "write_atomically", refuse)
    planned = digits("schedule=CR", "hardware=bitfusion")
    assert execute(planned)["cost"]["total"] == planned.cost().summary()
    assert planned.folder.read_summary() == before


def test_a_batch_of_one_sample_is_said_in_words(tmp_path):
    write_folders(tmp_path / "data", {"cat": 6, "dog": 6}, size=(4, 4))
    planned = plan(
        *("dataset=image_folder", f"dataset.path={tmp_path}/data", *ALL, "model=resnet8", "scale=smoke"),
        *("training.batch_size=9", "training.steps=4", "schedule=static", f"results_root={tmp_path}/runs"),
    )
    with pytest.raises(RunError, match="batch of one sample"):
        execute(planned)


def test_samples_of_many_steps_are_counted_without_counting():
    planned = plan("schedule=static")
    assert planned.samples(0, 391) == 50_000
    assert planned.samples(389, 3) == 128 + 80 + 128
    started = time.process_time()  # of this process, whatever else runs; a loop over the steps takes a minute
    assert planned.samples(0, 10**9) == 10**9 // 391 * 50_000 + 10**9 % 391 * 128
    assert time.process_time() - started < 5


def test_files_that_this_user_may_not_read_end_no_table(copied_digits, monkeypatch):
    """A PermissionError, as in a folder that several users share, ended `bitcycle status` as a bug of ours."""
    folder = copied_digits().folder
    (folder.path / ".lock").touch()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    assert folder.read_status() == {} and not folder.is_in_use()
    assert status_table(folder.path.parents[1]).row_count == 1
