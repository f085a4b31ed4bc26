"""Exact resume: however and wherever a run is cut off, it ends with the metrics and weights of the undisturbed run."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import pytest
import torch

from bitcycle import files
from bitcycle.errors import RunError
from bitcycle.files import lock_against_looks, read_json, read_records, try_lock
from bitcycle.quantizer import compiler_works
from bitcycle.task.classification import Classification
from bitcycle.training import run
from bitcycle.training.checkpoint import CheckpointFolder
from bitcycle.training.loop import Trainer
from bitcycle.training.report import summary_report
from bitcycle.training.run import execute
from bitcycle.training.run_folder import RunFolder
from tests.conftest import ForkedTraining, run_train
from tests.made_data import with_made_data
from tests.settings import RESUME, SLOW, run_of

CPU = torch.device("cpu")
NEVER = 1e9
UNTIMED = ("seconds", "evaluation_seconds", "steps_per_second", "finished")


class Crash(BaseException):
    """Ends a run as a kill does: nothing gets to clean up."""


def result(folder: RunFolder):
    """Everything about a finished run that must not depend on interruptions."""
    state = folder.checkpoint.load()
    state = {key: value for key, value in state.items() if key not in ("elapsed", "evaluating", "timing_bytes")}
    summary = {key: value for key, value in read_json(folder.summary).items() if key not in UNTIMED}
    told = state["phases"].pop("records"), state.pop("run")  # words, which assert_close does not compare
    return folder.metrics.read_bytes(), (summary, told), state


def assert_equal(found, expected) -> None:
    assert found[0] == expected[0], "metrics.jsonl differs"
    assert found[1] == expected[1], "summary.json differs"
    torch.testing.assert_close(found[2], expected[2], rtol=0, atol=0)


def crash_at(monkeypatch, crash_step: int, checkpoint_step: int) -> None:
    """Save a checkpoint after `checkpoint_step` steps only, and crash before step `crash_step`."""
    train_step = Trainer.train_step

    def dying_step(self, batch):
        if self.step == crash_step:
            raise Crash
        train_step(self, batch)
        self.options.checkpoint_seconds = 0 if self.step == checkpoint_step else NEVER

    monkeypatch.setattr(Trainer, "train_step", dying_step)


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in RESUME])
def test_a_crash_leaves_no_trace(case, digits, monkeypatch, tmp_path):
    overrides = with_made_data(run_of(case), tmp_path, monkeypatch)
    undisturbed = digits(*overrides, f"results_root={tmp_path}/undisturbed")
    disturbed = digits(*overrides, f"results_root={tmp_path}/disturbed")
    execute(undisturbed)
    generator = random.Random(case)
    first, second, third, fourth = sorted(generator.sample(range(1, undisturbed.total_steps), 4))
    for checkpoint_step, crash_step in ((first, second), (third, fourth)):
        with monkeypatch.context() as patch:
            crash_at(patch, crash_step, checkpoint_step)
            with pytest.raises(Crash):
                execute(disturbed)
    execute(disturbed)
    assert_equal(result(disturbed.folder), result(undisturbed.folder))


def test_the_time_of_interrupted_runs_adds_up(digits, monkeypatch):
    """A step takes a second, an evaluation ten: what was trained before and after the crash counts, what was lost does not."""
    now = [0.0]

    def timed(function, seconds):
        def wrapped(self, argument):
            now[0] += seconds
            return function(self, argument)

        return wrapped

    monkeypatch.setattr("bitcycle.training.loop.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Trainer, "train_step", timed(Trainer.train_step, 1))
    monkeypatch.setattr(Classification, "evaluate", timed(Classification.evaluate, 10))
    plan = digits("schedule=static", "training.evaluation_steps=8")
    with monkeypatch.context() as patch:
        crash_at(patch, 30, 20)
        with pytest.raises(Crash):
            execute(plan)
    summary = execute(plan)
    assert summary["seconds"] == 64 + 8 * 10
    assert summary["evaluation_seconds"] == 8 * 10
    assert summary["steps_per_second"] == pytest.approx(1)
    times = [(record["step"], record["seconds"]) for record in read_records(plan.folder.timing)]
    assert times == [(20, 20 + 2 * 10), (64, 64 + 8 * 10)]


def test_another_seed_gives_another_result(finished_digits):
    results = [result(finished_digits(*seed).folder) for seed in ((), ("seed=1",))]
    assert results[0][0] != results[1][0]
    assert not torch.equal(results[0][2]["model"]["conv1.weight"], results[1][2]["model"]["conv1.weight"])


def test_resume_in_another_mode_of_compilation(digits, monkeypatch, tmp_path):
    """Compiled and eager quantizers compute the same numbers: a run may change from one to the other."""
    if not compiler_works("cpu"):
        pytest.skip("no C++ compiler on this machine")
    plans = {
        mode: digits("schedule=RTH", f"training.compile={mode}", f"results_root={tmp_path}/{mode}")
        for mode in ("true", "false")
    }
    with monkeypatch.context() as patch:
        crash_at(patch, 30, 25)
        with pytest.raises(Crash):
            execute(plans["true"])
    for plan in plans.values():
        execute(plan)
    mixed = digits("schedule=RTH", "training.compile=false", f"results_root={tmp_path}/true")
    assert mixed.folder.state() == "done"
    assert_equal(result(plans["true"].folder), result(plans["false"].folder))


def test_all_costs_of_a_resumed_run_are_those_of_its_last_cost_model(digits, monkeypatch, caplog):
    """The best evaluation lies before the crash: its cost was that of the other cost model, without an energy to print."""
    accuracies = iter([50.0, 40.0])
    monkeypatch.setattr(Classification, "evaluate", lambda self, model: {"test_accuracy": next(accuracies)})
    with monkeypatch.context() as patch:
        crash_at(patch, 50, 40)
        with pytest.raises(Crash):
            execute(digits())
    plan = digits("hardware=bitfusion")
    cost = execute(plan)["cost"]
    assert "another cost model (hardware.name): costs of evaluations up to step 40 in metrics.jsonl" in caplog.text
    assert cost["to_best"]["energy_j"] == pytest.approx(cost["total"]["energy_j"] / 2)
    assert summary_report(plan.folder.read_summary(), plan.schedule.reference)


def wait_for_step(folder: RunFolder, process: ForkedTraining, step: int) -> None:
    deadline = time.monotonic() + 120
    while folder.read_status().get("step", 0) < step:
        assert process.poll() is None, process.wait().stderr
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_process_resumes_exactly(digits, tmp_path):
    """A real process, killed without warning at a random moment, then asked politely to stop, then left alone."""
    overrides = ["schedule=RTH", "training.steps=250", "training.evaluation_steps=100", "training.log_steps=7"]
    undisturbed = digits(*overrides, f"results_root={tmp_path}/undisturbed")
    execute(undisturbed)
    killed = digits(*overrides, "training.checkpoint_seconds=0.2", f"results_root={tmp_path}/killed")
    arguments = [*("dataset=digits", "model=resnet8", "scale=smoke", *overrides), "training.checkpoint_seconds=0.2"]
    arguments.append(f"results_root={tmp_path}/killed")
    environment = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    generator = random.Random(4)
    for signal_number, after in ((signal.SIGKILL, 40), (signal.SIGTERM, 130)):
        process = ForkedTraining(tmp_path, *arguments, env=environment)
        wait_for_step(killed.folder, process, after)
        time.sleep(generator.random() * 0.3)
        process.send_signal(signal_number)
        code = process.wait(timeout=60).returncode
        assert code == (75 if signal_number == signal.SIGTERM else -signal.SIGKILL)
    assert killed.folder.state() == "resumable"
    last = run_train(*arguments, env=environment)
    assert last.returncode == 0, last.stderr
    assert "resuming after step" in last.stderr
    assert_equal(result(killed.folder), result(undisturbed.folder))


def test_a_finished_run_is_not_run_again(copied_digits):
    plan = copied_digits()
    summary = execute(plan)
    before = {
        path: path.stat().st_mtime_ns for path in plan.folder.path.rglob("*") if path.name not in ("log.txt", ".lock")
    }
    assert execute(plan) == summary
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_two_processes_do_not_train_the_same_run(digits, tmp_path):
    plan = digits()
    with plan.folder.lock():
        done = run_train("dataset=digits", "model=resnet8", "scale=smoke", f"results_root={tmp_path}/runs")
    assert done.returncode == 1
    assert "another process is training this run" in done.stderr


def test_a_look_at_a_run_does_not_keep_it_from_starting(tmp_path):
    """`status` of many runs on a network disk looks at one or another of them all the time."""
    folder = RunFolder(tmp_path)
    with folder.lock():
        pass
    with open(tmp_path / ".lock") as looking:
        assert try_lock(looking, shared=True)
        threading.Timer(0.2, looking.close).start()
        with folder.lock():
            assert folder.is_in_use()


LOCKED_BY_A_PARENT = """
import os, sys, time
from bitcycle.files import try_lock
stream = open(sys.argv[1], "w")
assert try_lock(stream)
if os.fork():
    os.kill(os.getpid(), 9)
for descriptor in (1, 2):
    os.close(descriptor)
time.sleep(60)
"""


def test_a_forked_process_does_not_keep_the_lock_of_a_killed_one(tmp_path):
    """The workers of a data loader outlive a training by up to 5 seconds, in which it could not be resumed."""
    command = [sys.executable, "-c", LOCKED_BY_A_PARENT, tmp_path / "lock"]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    with open(tmp_path / "lock") as stream:
        assert lock_against_looks(stream)


def test_a_disk_without_locks_is_named(tmp_path, monkeypatch):
    """As Lustre without its mount option flock."""
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    with (
        pytest.raises(RunError, match=r"cannot lock .*\.lock: Function not implemented.*mount option flock"),
        RunFolder(tmp_path).lock(),
    ):
        pass


def test_a_damaged_checkpoint_falls_back_to_the_previous_one(digits, finished_digits, monkeypatch):
    plan = digits("training.checkpoint_seconds=0")
    folder = plan.folder
    with monkeypatch.context() as patch:
        train_step = Trainer.train_step
        patch.setattr(
            Trainer,
            "train_step",
            lambda self, batch: (_ for _ in ()).throw(Crash) if self.step == 30 else train_step(self, batch),
        )
        with pytest.raises(Crash):
            execute(plan)
    folder.checkpoint.last.write_bytes(damaged(folder.checkpoint.last.read_bytes())["one flipped bit"])
    with open(folder.metrics, "ab") as stream:
        stream.write(b'{"kind": "train", "st')  # the torn line of a crash
    assert read_records(folder.metrics)[-1]["step"] == 24
    execute(plan)
    assert "skipping the damaged checkpoint" in folder.log.read_text()
    assert_equal(result(folder), result(finished_digits().folder))


def damaged(content: bytes) -> dict[str, bytes]:
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    return {"truncated": content[:middle], "empty": b"", "garbage": os.urandom(2000), "one flipped bit": flipped}


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "one flipped bit"])
def test_every_damage_is_noticed(tmp_path, caplog, damage):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save({"step": step, "weights": torch.ones(1000)})
    folder.last.write_bytes(damaged(folder.last.read_bytes())[damage])
    assert folder.load()["step"] == 1
    assert "skipping the damaged checkpoint" in caplog.text


def test_a_flipped_bit_anywhere_is_noticed(tmp_path):
    """Also in the directory of the archive, which has no checksum of its own: one flip there once changed a tensor."""
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save({"step": step, "weights": torch.arange(3.0)})
    content = folder.last.read_bytes()
    assert torch.load(folder.last, weights_only=True)["step"] == 2  # the checksum is no obstacle
    for bit in range(0, 8 * len(content), 13):
        damaged_content = bytearray(content)
        damaged_content[bit // 8] ^= 1 << bit % 8
        folder.last.write_bytes(damaged_content)
        assert folder.load()["step"] == 1


def test_a_checkpoint_without_a_checksum_is_read(tmp_path):
    """As written before there was one; a checkpoint that lost its own is damaged."""
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save({"step": step})
    folder.last.write_bytes(folder.last.read_bytes()[:-8])
    assert folder.load()["step"] == 1
    torch.save({"step": 3}, folder.last)
    assert folder.load()["step"] == 3


def test_two_damaged_checkpoints_are_an_error_with_a_remedy(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save({"step": step})
    for path in (folder.last, folder.previous):
        path.write_bytes(b"torn")
    with pytest.raises(RunError, match="Delete that folder to start over"):
        folder.load()


def test_a_checkpoint_that_was_to_become_the_last_is_used_if_the_previous_one_is_damaged(tmp_path):
    """After a damaged last checkpoint, a kill between the two renames of the next one left none that could be used."""
    folder = CheckpointFolder(tmp_path)
    folder.save({"step": 3})
    os.replace(folder.last, folder.next)
    folder.previous.write_bytes(b"torn")
    assert folder.exists() and folder.load()["step"] == 3


def test_the_previous_checkpoint_is_kept_and_a_lost_last_one_replaced(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoint")
    assert folder.load() is None
    for step in (1, 2, 3):
        folder.save({"step": step, "weights": torch.ones(2)})
    assert folder.load()["step"] == 3
    folder.last.unlink()  # killed between the two renames
    assert folder.exists()
    assert folder.load()["step"] == 2


def test_what_a_killed_process_had_written_of_a_checkpoint_is_removed(tmp_path):
    """Each kill while a checkpoint was written, as at a time limit, left a file of that size for good."""
    script = (
        "import os, sys, torch; from pathlib import Path; from bitcycle.training.checkpoint import CheckpointFolder;"
        "os.fsync = lambda _: os.kill(os.getpid(), 9); CheckpointFolder(Path(sys.argv[1])).save({'step': 1})"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
    CheckpointFolder(tmp_path).save({"step": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_a_full_disk_keeps_the_previous_checkpoint(digits, monkeypatch, tmp_path):
    plans = [digits("training.checkpoint_seconds=0", f"results_root={tmp_path}/{name}") for name in ("roomy", "full")]
    execute(plans[0])
    save = torch.save

    def fill(state, stream):
        if state["step"] == 17:
            stream.write(b"half a checkpoint")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, stream)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fill)
        with pytest.raises(RunError, match=r"No space left.*free space .* same command again"):
            execute(plans[1])
    folder = plans[1].folder
    assert folder.read_status()["state"] == "failed"
    assert "No space left" in folder.read_status()["reason"]
    assert sorted(path.name for path in folder.checkpoint.last.parent.iterdir()) == ["last.pt", "previous.pt"]
    assert folder.checkpoint.load()["step"] == 16
    execute(plans[1])
    assert_equal(result(folder), result(plans[0].folder))


@pytest.mark.parametrize("name", ["config", "status", "summary"])
def test_a_disk_that_is_full_for_a_small_file_is_no_bug(name, digits, monkeypatch):
    """It was called one, with a traceback."""
    plan = digits("training.steps=8")
    write = files.write_atomically

    def fill(path, content):
        if path == getattr(plan.folder, name):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomically", fill)
        patch.setattr(run, "write_atomically", fill)
        with pytest.raises(RunError, match=r"cannot write to .*No space left.* run the same command again"):
            execute(plan)
    assert execute(plan)["total_steps"] == 8


def test_a_folder_that_became_read_only_is_named(digits, monkeypatch):
    """Its remedy was to free space, and its name that of the run folder, also for a file elsewhere."""
    plan = digits("training.steps=8")

    def refuse(path, content):
        raise OSError(errno.EROFS, "Read-only file system", "/elsewhere/cache")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomically", refuse)
        patch.setattr(run, "write_atomically", refuse)
        with pytest.raises(RunError, match=r"cannot write to /elsewhere/cache: .*Make it writable, and run"):
            execute(plan)


def test_checkpoints_load_without_pickled_code(finished_digits):
    plan = finished_digits()
    state = torch.load(plan.folder.checkpoint.last, weights_only=True)
    model = plan.build_model()
    model.load_state_dict(state["model"])
    assert state["step"] == plan.total_steps
