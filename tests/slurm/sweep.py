"""A sweep on a real SLURM whose jobs are stopped in the middle, and whose waiting is too, gives what an undisturbed one gives."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, run_train, train_command
from tests.pair import exit_codes, fork_training

pytestmark = pytest.mark.skipif("BITCYCLE_SCRATCH_CLUSTER" not in os.environ, reason="make test-slurm")

RUN = (
    *("dataset=digits", "model=resnet8", "scale=smoke", "seed=0", "training.batch_size=16", "training.threads=1"),
    *("training.steps=100", "training.evaluation_steps=100", "training.checkpoint_seconds=0.3"),
)
SCHEDULES = ("static", "CR", "RTH")
SLURM = (
    *("hydra/launcher=slurm", "hydra.launcher.gpus_per_node=null", "hydra.launcher.mem_gb=null"),
    *("hydra.launcher.cpus_per_task=1", "hydra.launcher.timeout_min=30", "hydra.launcher.poll_seconds=1"),
)
PATIENCE = 600.0


def wait_for(condition, process):
    """The first result of `condition` that is true."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def runs_in_the_middle(results):
    """Run folders with a checkpoint, of runs that are not done."""
    for path in results.glob("smoke/*/seed=*/checkpoint/last.pt"):
        folder = path.parent.parent
        if json.loads((folder / "status.json").read_text())["state"] == "running":
            yield folder


def job_of(results, folder):
    """The id of the job of a run."""
    for array in results.glob(".slurm/*/array.json"):
        runs = json.loads(array.read_text())["runs"]
        if str(folder) in runs:
            return json.loads((array.parent / f"{runs.index(str(folder))}.json").read_text())["job"]
    raise AssertionError(folder)


def scontrol(*arguments):
    return subprocess.run(["scontrol", *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


def arrays(results):
    return sorted(path.parent.name for path in results.glob(".slurm/*/array.json"))


def finished(results):
    """(metrics, final weights) of every run."""
    found = {}
    for summary in sorted(results.glob("smoke/*/seed=*/summary.json")):
        state = torch.load(summary.parent / "checkpoint" / "last.pt", weights_only=True)
        found[str(summary.parent.relative_to(results))] = (summary.parent / "metrics.jsonl").read_text(), state["model"]
    return found


def test_a_disturbed_sweep_equals_an_undisturbed_one(tmp_path):
    undisturbed, results = tmp_path / "local", tmp_path / "slurm"
    command = ("-m", *RUN, f"schedule={','.join(SCHEDULES)}", *SLURM, f"results_root={results}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        train_command(*command), cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        # One job is put back by SLURM, as in preemption; another is warned, as before the end of its time.
        first = wait_for(lambda: next(runs_in_the_middle(results), None), process)
        put_back = job_of(results, first)
        scontrol("requeue", put_back)
        other = lambda: next((run for run in runs_in_the_middle(results) if run != first), None)  # noqa: E731
        second = wait_for(other, process)
        warned = job_of(results, second)
        subprocess.run(["scancel", "--signal=USR1", warned], check=True, timeout=60)
        # Whoever waits goes away; the jobs do not.
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 75, said
    assert "stay in SLURM" in said
    submitted = arrays(results)
    assert len(submitted) == 2  # as the cluster takes two jobs in one at most

    again = run_train(*command, timeout=PATIENCE)
    assert again.returncode == 0, again.stderr
    # on a busy machine the jobs may have ended before this command looked
    assert "in SLURM already" in again.stderr or "3 runs: 3 done" in again.stderr
    assert arrays(results) == submitted
    for job, run in ((put_back, first), (warned, second)):
        assert "Restarts=1 " in scontrol("show", "job", "--oneliner", job)
        assert "resuming after step" in (run / "log.txt").read_text()

    done = run_train(*command, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "3 runs: 3 done" in done.stderr
    assert arrays(results) == submitted

    for schedule in SCHEDULES:
        local = run_train(*RUN, f"schedule={schedule}", f"results_root={undisturbed}", timeout=PATIENCE)
        assert local.returncode == 0, local.stderr
    assert_equal(finished(results), finished(undisturbed), len(SCHEDULES))


def assert_equal(found, expected, runs):
    """The same metrics and weights of that many runs."""
    assert len(expected) == runs
    assert found.keys() == expected.keys()
    for name, (metrics, weights) in expected.items():
        assert found[name][0] == metrics, name
        assert all(torch.equal(found[name][1][key], value) for key, value in weights.items()), name


TWO_TASKS = ("-m", *RUN, "schedule=RTH", *SLURM, "hydra.launcher.tasks_per_node=2")


def test_a_run_in_two_tasks_is_stopped_and_goes_on(tmp_path):
    """One task a process: a warning to all of them puts the job into the queue again, once, and it goes on exactly."""
    results, undisturbed = tmp_path / "results", tmp_path / "undisturbed"
    command = train_command(*TWO_TASKS, f"results_root={results}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE)
    run = wait_for(lambda: next(runs_in_the_middle(results), None), process)
    job = job_of(results, run)
    subprocess.run(["scancel", "--signal=USR1", job], check=True, timeout=60)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "Restarts=1 " in scontrol("show", "job", "--oneliner", job)
    log = (run / "log.txt").read_text()
    assert "resuming after step" in log and log.count("2 processes share each batch") == 2
    assert exit_codes(fork_training(tmp_path / "log", *RUN, "schedule=RTH", f"results_root={undisturbed}")) == [0, 0]
    assert_equal(finished(results), finished(undisturbed), 1)


def test_a_task_that_fails_ends_the_job(tmp_path):
    command = train_command(*TWO_TASKS, "training.steps=100000", f"results_root={tmp_path}")
    process = subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE)
    run = wait_for(lambda: next(runs_in_the_middle(tmp_path), None), process)
    killed = kill_process(1, str(tmp_path))
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, errors
    assert killed and "process" in errors
    assert "Restarts=0 " in scontrol("show", "job", "--oneliner", job_of(tmp_path, run))


def kill_process(rank, word):
    """Kill the process of a run that has a rank and a word on its command line, as a lack of memory does."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments, variables = (entry / "cmdline").read_text(), (entry / "environ").read_text()
        except OSError:
            continue
        if word in arguments and "train.py" in arguments and f"SLURM_PROCID={rank}\0" in variables:
            os.kill(int(entry.name), signal.SIGKILL)
            return True
    return False
