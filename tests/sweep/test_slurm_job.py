"""What a job in SLURM does with signals and exit codes."""

import os
import signal

import pytest

from tests.slurm_cases import JobInSlurm

# What a job does.


STOPS = 'trap "exit 75" TERM USR1; touch started; while :; do sleep 0.05; done'


DEAF = 'trap "" TERM USR1; touch started; while :; do sleep 0.05; done'


@pytest.fixture
def job(tmp_path):
    return JobInSlurm(tmp_path)


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_a_job_leaves_the_exit_code_of_its_run(job, code):
    assert job.start(f"exit {code}").wait(60) == code
    assert job.outcome == (code, None, 0)
    assert job.requeued == []


def test_the_first_of_several_tasks_speaks_for_the_run(job, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert job.start("exit 0").wait(60) == job.stopped(STOPS, signal.SIGUSR1) == 0  # else srun would end the first one
    assert not (job.folder / "2.json").exists() and job.requeued == []
    assert job.start("exit 3").wait(60) == 3
    assert job.outcome == (3, "process 1: exit code 3", 0)


def test_the_first_task_keeps_the_failure_of_one_that_was_faster(job, monkeypatch):
    """It began with an outcome of its own, and the job then counted as stopped by SLURM."""
    job.say("RUNNING")
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_PROCID", "1")
        assert job.start("exit 3").wait(60) == 3
    assert job.stopped(STOPS, signal.SIGTERM) == 3
    assert job.outcome == (3, "process 1: exit code 3", 0) and job.requeued == []
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # requeued by its user
    job.say("COMPLETING")
    assert job.stopped(STOPS, signal.SIGTERM) == 75
    assert job.outcome == (None, None, 0)


def test_a_task_that_another_one_ended_is_not_requeued(job, monkeypatch):
    """A failed task makes srun send SIGTERM to the first, whose job is still RUNNING."""
    job.say("RUNNING")
    fails = f'echo \'{{"code": 3, "reason": "process 1", "job": "7_2", "timeouts": 0}}\' > {job.folder}/2.json'
    assert job.stopped(f"{fails}; {STOPS}", signal.SIGTERM) == 3
    assert job.outcome == (3, "process 1", 0)
    assert job.start(f"{fails}; exit 1").wait(60) == 3
    assert job.requeued == []


def test_a_run_that_is_killed_has_failed(job):
    assert job.start("kill -KILL $$").wait(60) == 1
    assert job.outcome == (1, "killed by SIGKILL, possibly out of memory", 0)


def test_a_job_that_slurm_takes_back_leaves_no_exit_code(job):
    assert job.stopped(STOPS, signal.SIGTERM) == 75
    assert job.outcome == (None, None, 0)
    assert job.requeued == []


def test_a_job_in_its_time_of_grace_requeues_itself(job):
    job.say("RUNNING")
    assert job.stopped(STOPS, signal.SIGTERM) == 75
    assert job.outcome == (None, None, 0)
    assert job.requeued == ["requeue 7_2"]  # 9 could mean the whole array


def test_a_job_goes_on_after_its_time_limit_as_often_as_allowed(job):
    assert job.stopped(STOPS, signal.SIGUSR1) == 75
    assert job.outcome == (None, None, 1)
    assert job.requeued == ["requeue 7_2"]
    assert job.stopped(STOPS, signal.SIGUSR1) == 75
    assert job.outcome == (75, "reached its time limit 2 times", 2)
    assert job.requeued == ["requeue 7_2"]


def test_a_run_that_finishes_while_it_is_asked_to_stop_is_done(job):
    finishes = STOPS.replace("exit 75", "exit 0")
    assert job.stopped(finishes, signal.SIGUSR1) == 0
    assert job.outcome == (0, None, 0)


def test_a_requeue_that_is_refused_is_no_loss(job):
    job.say("RUNNING", requeue='echo "no such luck" >&2; exit 1')
    assert job.stopped(STOPS, signal.SIGTERM) == 75
    assert job.outcome == (75, "stopped, and SLURM does not requeue it: scontrol failed: no such luck", 0)


def test_a_job_whose_controller_was_away_goes_on(job):
    """A restart of slurmctld longer than the attempts to requeue ended the job with exit code 75."""
    job.say("RUNNING", requeue=f"[ -e {job.folder}/back ] || {{ echo no contact >&2; exit 1; }}")
    scontrol = job.folder / "bin" / "scontrol"
    scontrol.write_text(scontrol.read_text().replace("show)", f"show) touch {job.folder}/back;"))
    assert job.stopped(STOPS, signal.SIGUSR1) == 75
    assert job.outcome == (None, None, 1)


def test_a_run_that_does_not_stop_goes_on_from_its_last_checkpoint(job):
    process_code = job.stopped(DEAF + " & echo $! > pid; wait", signal.SIGUSR1, warning_seconds=0.4)
    try:
        assert process_code == 75
        assert job.outcome == (None, None, 1)
        assert job.requeued == ["requeue 7_2"]
    finally:
        os.kill(int((job.folder / "pid").read_text()), signal.SIGKILL)
