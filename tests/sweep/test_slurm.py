"""Waiting for SLURM's jobs, records, and the launcher."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from bitcycle.errors import RunError
from bitcycle.files import write_json
from bitcycle.settings import SettingError
from bitcycle.signals import record_signals
from bitcycle.sweep.registry import SweepRun, mark
from bitcycle.sweep.slurm import (
    JobOutcome,
    QueueEntry,
    Waiter,
    jobs_in_queue,
    new_array,
    parse_queue,
    read_queue,
    states_in_queue,
    wait_for_jobs,
)
from bitcycle.sweep.status import mark_queue, sweeps_table
from hydra_plugins.bitcycle_plugins.slurm_launcher import SlurmLauncher
from tests.conftest import ROOT
from tests.slurm_cases import JobInSlurm, calls, fake


@pytest.fixture
def job(tmp_path):
    return JobInSlurm(tmp_path)


# Waiting.


@pytest.fixture(autouse=True)
def soon_lost(monkeypatch):
    monkeypatch.setattr("bitcycle.sweep.slurm.LOST_AFTER_SECONDS", 0.1)


@pytest.fixture
def array(tmp_path):
    return new_array(tmp_path, [tmp_path / f"run{number}" for number in range(3)], "test")


def queue_of(array, *states):
    return {
        (array[0].array.name, index): QueueEntry(f"17_{index}", state, "None")
        for index, state in enumerate(states)
        if state is not None
    }


def leave(array, index, code, reason=None):
    write_json(array[index].outcome_file, {"job": f"17_{index}", "code": code, "reason": reason, "timeouts": 0})


def waiter_of(array, *queues):
    """A waiter that gets one answer after the other; the last for ever. Exceptions are raised."""
    answers = list(queues)

    def read():
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Waiter(dict(enumerate(array)), 0.05, read)


def test_every_job_gets_its_own_exit_code(array):
    waiter = waiter_of(array, queue_of(array, "RUNNING", "COMPLETED", "CANCELLED"))
    leave(array, 0, 0)
    leave(array, 1, 3, "no data")
    codes = wait_for_jobs(waiter, [], [["a=0"], ["a=1"], ["a=2"], ["never=submitted"]])
    assert codes == [0, 3, 1, 1]


def test_a_stopped_job_that_waits_for_its_continuation_has_not_ended(array):
    running, requeued = queue_of(array, "RUNNING"), queue_of(array, "PENDING")
    waiter = waiter_of(array, running, queue_of(array, "COMPLETING"), requeued, running, queue_of(array, "COMPLETED"))
    waiter.waiting = {0: waiter.waiting[0]}
    leave(array, 0, None)
    for _ in range(4):
        assert waiter.look() == {}
        time.sleep(0.01)
    leave(array, 0, 0)
    assert waiter.look() == {0: JobOutcome(0, "")}


def test_a_job_that_vanished_is_given_up_after_a_while(array):
    waiter = waiter_of(array, queue_of(array, "TIMEOUT", None, None))
    array[1].run.mkdir()
    write_json(array[1].run / "status.json", {"state": "done"})
    write_json(array[1].run / "summary.json", {"metric": 1})
    assert waiter.look() == {}
    time.sleep(0.15)
    ended = waiter.look()
    assert [ended[index].code for index in range(3)] == [1, 0, 1]
    assert "TIMEOUT" in ended[0].reason
    assert "no longer lists it" in ended[2].reason
    assert waiter.waiting == {}


def test_a_controller_that_is_away_ends_nothing(array):
    waiter = waiter_of(array, RunError("squeue failed: Unable to contact slurm controller"))
    for _ in range(100):
        assert waiter.look() == {}
        time.sleep(0.01)
    assert waiter.describe() == "3 unknown"
    leave(array, 1, 0)
    assert waiter.look() == {1: JobOutcome(0, "")}


def test_a_signal_ends_the_waiting_and_not_the_jobs(array, caplog):
    waiter = waiter_of(array, queue_of(array, "PENDING", "PENDING", "RUNNING"))
    with record_signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        leave(array, 2, 0)
        caplog.set_level("INFO", "bitcycle")
        codes = wait_for_jobs(waiter, signals, [["a=0"], ["a=1"], ["a=2"]])
    assert codes == [75, 75, 75]


def test_a_job_that_slurm_killed_shows_what_slurm_wrote_to_its_log(array, caplog):
    """Of a job over its memory, `squeue` only says FAILED."""
    (array[0].array / "17_0_0_log.out").write_text("step 3\nslurmstepd: error: Exceeded job memory limit\n")
    waiter = waiter_of(array, queue_of(array, "FAILED"))
    waiter.waiting = {0: waiter.waiting[0]}
    assert wait_for_jobs(waiter, [], [["a=0"]]) == [1]
    assert "its state in SLURM is FAILED\n        step 3\n        slurmstepd: error: Exceeded job memory" in caplog.text


def test_how_jobs_are_is_said_in_words(array):
    name = array[0].array.name
    queue = parse_queue(f"17_0|{name}|PENDING|Resources\n17_1|{name}|RUNNING|None\n18_[2-9]|other|PENDING|Priority\n")
    waiter = waiter_of(array, queue)
    waiter.look()
    assert waiter.describe() == "1 pending (Resources), 1 running, 1 leaving"


# Records, and the launcher with commands that only look like SLURM's.


def test_jobs_are_found_again_by_their_run(tmp_path, array):
    runs = [job.run for job in array]
    queue = queue_of(array, "RUNNING", "PENDING", "FAILED")
    assert jobs_in_queue(tmp_path, runs, lambda: queue) == {job.run: job for job in array[:2]}
    leave(array, 0, 0)
    leave(array, 1, None)
    assert jobs_in_queue(tmp_path, runs, lambda: queue) == {array[1].run: array[1]}


def test_the_log_of_a_job_is_its_own(tmp_path, array):
    assert array[1].log == array[1].array
    (array[1].array / "17_0_0_log.out").touch()
    assert array[1].log == array[1].array
    (array[1].array / "17_1_0_log.out").touch()
    assert array[1].log.name == "17_1_0_log.out"
    [job] = new_array(tmp_path, [tmp_path / "alone"], "test")
    (job.array / "18_0_log.out").touch()
    assert job.log.name == "18_0_log.out"


def test_runs_in_the_queue_say_so(tmp_path):
    runs = [SweepRun({}, str(tmp_path / "a")), SweepRun({}, None, "wrong"), SweepRun({}, str(tmp_path / "b"))]
    runs[2].folder.path.mkdir()
    runs[2].folder.write_status("done", 4, 4)
    runs[2].folder.summary.write_text('{"final": 1}')
    assert [run.state for run in mark(runs, {run.path for run in runs if run.path}, "queued")] == [
        "queued",
        "wrong",
        "done",
    ]


def queue_says(tmp_path, monkeypatch, script):
    fake(tmp_path / "bin", "squeue", script)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def test_status_shows_what_waits_and_runs_in_slurm(tmp_path, array, monkeypatch):
    """These runs were called missing."""
    lines = [f"17_{job}|{array[0].array.name}|{state}|None" for job, state in enumerate(("RUNNING", "PENDING"))]
    queue_says(tmp_path, monkeypatch, f"cat <<END\n{chr(10).join(lines)}\nEND")
    monkeypatch.chdir(tmp_path)
    runs = [SweepRun({}, name) for name in ("run0", "run1", "run2")] + [SweepRun({}, None, "wrong")]
    queue = states_in_queue(Path(), [run.folder.path for run in runs[:3]])
    assert queue == {Path("run0"): "running", Path("run1"): "queued"}
    marked = mark_queue(runs, queue)
    assert [run.state for run in marked] == ["running", "queued", "missing", "wrong"]
    columns = sweeps_table([("mine", marked)], "", 1).columns
    assert {str(each.header): next(iter(each.cells)) for each in columns if each.header in ("running", "queued")} == {
        "running": "1",
        "queued": "1",
    }


@pytest.mark.parametrize(
    ("script", "said"), [("echo no controller >&2; exit 1", "no controller"), ("sleep 60", "has not answered for 0 s")]
)
def test_status_does_not_wait_for_a_queue_that_does_not_answer(script, said, tmp_path, array, monkeypatch, caplog):
    queue_says(tmp_path, monkeypatch, script)
    monkeypatch.setattr("bitcycle.sweep.slurm.GLANCE_SECONDS", 0.2)
    began = time.monotonic()
    assert states_in_queue(tmp_path, [job.run for job in array]) == {}
    assert time.monotonic() - began < 10
    assert said in caplog.text


def test_status_asks_no_queue_that_is_not_there_or_has_no_jobs(tmp_path, array, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert states_in_queue(tmp_path, [array[0].run]) == {}
    fake(tmp_path / "bin", "squeue", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert states_in_queue(tmp_path, [tmp_path / "never submitted"]) == {}
    assert not caplog.messages and not calls(tmp_path / "bin", "squeue")


SUBMIT = 'n=$(wc -l < "$0.calls"); cp "$1" "$0.script.$n"; echo "Submitted batch job 1$n"'


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A cluster that takes every job and never runs one."""
    commands = tmp_path / "bin"
    show = """
for script in "$(dirname "$0")"/sbatch.script.*; do
    [ -e "$script" ] || continue
    for task in 0 1 2; do echo "1${script##*.}_$task|$(sed -n "s/.*job-name=//p" "$script")|PENDING|Resources"; done
done"""
    fake(commands, "sbatch", SUBMIT)
    fake(commands, "squeue", show)
    fake(commands, "srun", "exit 1")
    fake(commands, "scancel", "exit 0")
    fake(commands, "scontrol", "echo 'MaxArraySize            = 3'")
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    return commands


def launcher(results, **parameters):
    given = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/hydra/launcher/slurm.yaml"))
    given = {key: value for key, value in given.items() if not key.startswith("_")}
    found = SlurmLauncher(**given | {"cpus_per_task": 2, "poll_seconds": 0.1, "gpus_per_node": None} | parameters)
    source = SimpleNamespace(provider="main", path=str(ROOT / "conf"))
    config = SimpleNamespace(
        results_root=str(results), hydra=SimpleNamespace(runtime=SimpleNamespace(config_sources=[source]))
    )
    found.setup(hydra_context=None, task_function=None, config=config)
    return found


class Impatient(list):
    """Signals: one comes after some looks at them."""

    def __len__(self):
        self.looks = getattr(self, "looks", 0) + 1
        return int(self.looks > 4)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(
        "hydra_plugins.bitcycle_plugins.slurm_launcher.record_signals", lambda: nullcontext(Impatient())
    )


def test_what_is_in_the_queue_is_not_submitted_again(slurm, tmp_path, impatient):
    results, runs = tmp_path / "results", [[f"seed={number}"] for number in range(5)]
    folders = [results / "smoke" / "a" / run[0] for run in runs]
    first = launcher(
        results, array_parallelism=6, setup=["module load nothing"], additional_parameters={"constraint": "a100"}
    )
    assert first.launch_into(runs[:4], folders[:4]) == [75] * 4
    assert len(calls(slurm, "sbatch")) == 2
    script = (slurm / "sbatch.script.1").read_text()
    for option in ("array=0-1%2", "requeue", "signal=USR1@120", "constraint=a100"):
        assert f"#SBATCH --{option}\n" in script
    assert "\nmodule load nothing\n" in script
    assert "--cpus-per-task=2 " in script.splitlines()[-1] and "kill-on-bad-exit" not in script
    second = launcher(results)
    assert second.queued(folders) == set(folders[:4])
    assert second.launch_into(runs, folders) == [75] * 5
    assert len(calls(slurm, "sbatch")) == 3


@pytest.mark.parametrize(("at_once", "named"), [(1, True), (2, False)])
def test_more_arrays_than_jobs_at_once_are_named(at_once, named, slurm, tmp_path, impatient, caplog):
    """Each array runs at least one job, so that the limit was exceeded without a word."""
    runs = [[f"seed={number}"] for number in range(4)]
    launcher(tmp_path, array_parallelism=at_once, array_size=2).launch_into(runs, [tmp_path / run[0] for run in runs])
    assert ("2 arrays of at most 2 runs run up to 2 at once, more than" in caplog.text) == named


def test_a_run_that_is_asked_for_twice_is_one_job(slurm, tmp_path, impatient):
    """A sweeper that optimizes repeats itself; of two jobs of a run, one finds the other's lock and fails."""
    runs = [["seed=0"], ["seed=1"], ["seed=0"]]
    assert launcher(tmp_path).launch_into(runs, [tmp_path / run[0] for run in runs]) == [75] * 3
    assert "#SBATCH --array=0-1%" in (slurm / "sbatch.script.1").read_text()


def test_two_sweeps_at_the_same_moment_submit_a_run_once(slurm, tmp_path, impatient):
    """Both looked into the queue before either had submitted; the second job then failed at the lock of the run."""
    fake(slurm, "sbatch", f"sleep 0.5\n{SUBMIT}")
    with ThreadPoolExecutor() as shells:
        sweeps = [shells.submit(launcher(tmp_path).launch_into, [["seed=0"]], [tmp_path / "seed=0"]) for _ in range(2)]
    assert [sweep.result() for sweep in sweeps] == [[75], [75]]
    assert len(calls(slurm, "sbatch")) == 1


def test_a_run_on_several_gpus_is_as_many_tasks(slurm, tmp_path, impatient):
    launcher(tmp_path, gpus_per_node=4, nodes=2).launch_into([["seed=0"]], [tmp_path / "seed=0"])
    script = (slurm / "sbatch.script.1").read_text()
    for option in ("nodes=2", "gpus-per-node=4", "ntasks-per-node=4"):
        assert f"#SBATCH --{option}\n" in script
    assert "--kill-on-bad-exit=1 " in script.splitlines()[-1]


def test_options_of_srun_are_added(slurm, tmp_path, impatient):
    """A parameter of hydra-submitit-launcher; it ended the sweep with a TypeError."""
    launcher(tmp_path, srun_args=["--mpi=none"], gpus_per_node=2).launch_into([["seed=0"]], [tmp_path / "seed=0"])
    command = (slurm / "sbatch.script.1").read_text().splitlines()[-1]
    assert "--cpus-per-task=2 --kill-on-bad-exit=1 --mpi=none " in command


def test_arrays_that_slurm_refuses_leave_the_others_alone(slurm, tmp_path, impatient):
    fake(
        slurm,
        "sbatch",
        f'[ $(wc -l < {slurm}/sbatch.calls) = 1 ] || {{ echo "too many jobs" >&2; exit 1; }}; echo "Submitted batch job 11"',
    )
    runs = [[f"seed={number}"] for number in range(6)]
    codes = launcher(tmp_path).launch_into(runs, [tmp_path / run[0] for run in runs])
    assert codes == [75] * 3 + [1] * 3


def test_what_is_wrong_is_said(slurm, tmp_path):
    with pytest.raises(SettingError, match="partition"):
        launcher(tmp_path, partitoin="gpu").launch_into([["seed=0"]], [tmp_path / "seed=0"])
    fake(slurm, "sbatch", 'echo "Invalid partition name specified" >&2; exit 1')
    with pytest.raises(RunError, match="Invalid partition name"):
        launcher(tmp_path).launch_into([["seed=0"]], [tmp_path / "seed=0"])
    assert not list(tmp_path.glob(".slurm/*/"))


def test_jobs_that_slurm_took_although_sbatch_failed_are_cancelled(slurm, tmp_path, impatient):
    """The answer was lost on its way: the jobs were forgotten, and the next command submitted the run once more."""
    fake(slurm, "sbatch", f"{SUBMIT} > /dev/null; echo 'Socket timed out on send/recv operation' >&2; exit 1")
    fake(slurm, "scancel", f"rm {slurm}/sbatch.script.1")
    with pytest.raises(RunError, match="Socket timed out"):
        launcher(tmp_path).launch_into([["seed=0"]], [tmp_path / "seed=0"])
    (name,) = calls(slurm, "scancel")
    assert name.startswith("--name=bitcycle-") and not list(tmp_path.glob(".slurm/*/"))
    fake(slurm, "sbatch", SUBMIT)
    assert launcher(tmp_path).launch_into([["seed=0"]], [tmp_path / "seed=0"]) == [75]


def test_jobs_that_cannot_be_cancelled_are_found_by_the_next_command(slurm, tmp_path, impatient):
    fake(slurm, "sbatch", f"{SUBMIT} > /dev/null; echo 'Socket timed out on send/recv operation' >&2; exit 1")
    fake(slurm, "scancel", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(
        RunError, match=r"Socket timed out.*Unable to contact.*may be in its queue: scancel --name=bitcycle-"
    ):
        launcher(tmp_path).launch_into([["seed=0"]], [tmp_path / "seed=0"])
    assert launcher(tmp_path).queued([tmp_path / "seed=0"]) == {tmp_path / "seed=0"}
    fake(slurm, "scancel", "echo 'scancel: error: No active jobs match ALL job filters' >&2; exit 1")
    fake(slurm, "sbatch", 'echo "Invalid partition name specified" >&2; exit 1')
    with pytest.raises(RunError, match=r"Invalid partition name specified$"):
        launcher(tmp_path).launch_into([["seed=1"]], [tmp_path / "seed=1"])


@pytest.mark.parametrize(
    ("parameter", "value", "words"),
    [
        (
            "array_size",
            -1,
            "is not a number of 1 or more. Remedy: write a number, or null",
        ),  # no job was submitted, in silence
        ("array_size", 0, "is not a number of 1 or more"),
        ("array_parallelism", None, "is not a number of 1 or more. Remedy: write a number"),
        ("poll_seconds", "often", "is not a number of 0 or more"),  # noticed after the submission
        ("gpus_per_node", "a100:2", "is not a number of 0 or more"),
        ("setup", "module load cuda", r"is not a list. Remedy: write hydra.launcher.setup=\['module load cuda'\]"),
        ("srun_args", "--mpi=none", r"is not a list. Remedy: write hydra.launcher.srun_args=\['--mpi=none'\]"),
        ("name", "cpt/table6", "does not name a folder and its jobs. Remedy: use letters"),  # submitted twice
        ("name", "a|b", "does not name a folder"),
        ("name", None, "does not name a folder"),
        ("timeout_min", 2, r"leaves no time to train.* 120 s .*lower hydra.launcher.signal_delay_s"),
    ],
)
def test_parameters_that_cannot_be_meant_are_refused(parameter, value, words, slurm, tmp_path, impatient):
    with pytest.raises(SettingError, match=f"hydra.launcher.{parameter}.*{words}"):
        launcher(tmp_path, **{parameter: value}).launch_into([["seed=0"]], [tmp_path / "seed=0"])
    assert calls(slurm, "sbatch") == []


def test_other_options_of_sbatch_can_be_typed(slurm, command):
    words = (
        *("-m", "hydra/launcher=slurm", "hydra.launcher.additional_parameters={constraint:a100,mail-type:END}"),
        *("hydra.launcher.gpus_per_node=null", "dataset=digits", "model=resnet8", "scale=smoke"),
    )
    fake(slurm, "sbatch", 'cp "$1" "$0.script"; echo "no partition" >&2; exit 1')
    code, _, err = command(*words)
    assert code == 1 and err.count("no partition") == 1  # submitit had printed it, too
    script = (slurm / "sbatch.script").read_text()
    assert "#SBATCH --constraint=a100\n" in script and "#SBATCH --mail-type=END\n" in script


def test_a_folder_that_cannot_be_written_is_named(slurm, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot write to .*file.*Set results_root to a writable folder"):
        launcher(tmp_path / "file").launch_into([["seed=0"]], [tmp_path / "seed=0"])


def test_a_machine_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="hydra/launcher=local"):
        read_queue()
    assert launcher(tmp_path).queued([tmp_path / "seed=0"]) == set()  # nothing submitted, nothing to ask


def test_jobs_are_found_again_through_a_link(tmp_path):
    """The same run was submitted twice if results_root was a link the second time."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    array = new_array(tmp_path / "real", [tmp_path / "real" / "seed=0"], "test")
    found = jobs_in_queue(tmp_path / "link", [tmp_path / "link" / "seed=0"], lambda: queue_of(array, "RUNNING"))
    assert list(found.values()) == array
