"""Threads and how they wait: chosen by commands before PyTorch is imported, never by `import bitcycle`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext

import pytest

from bitcycle import threads
from bitcycle.benchmark import contention
from bitcycle.threads import (
    CHOSEN,
    POLICY,
    SCHEDULERS,
    SHARE,
    THREADS,
    WAITING,
    allowed_cores,
    announced,
    choose_threads,
    memory_limit,
    quota_cores,
    runs_beside,
    share_of,
    users_threads,
)
from tests.slurm_cases import JobInSlurm

LIMITS = {"busy": 2.6, "at_once": 3.5}
"""Largest times of a step relative to one alone: beside as many busy processes as cores a fair share is 2, of three runs 3."""
LEAST_SPINNING = 0.95
"""Smallest time of a step alone with OpenMP's own waiting, relative to one with that of commands: what these may lose."""
VARIABLES = (THREADS, CHOSEN, SHARE, POLICY, *WAITING, *SCHEDULERS)
REPORT = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(threads, "quota_cores", lambda: None)
    monkeypatch.setattr(threads, "visible_cores", lambda: 8)


def environment_after(code: str, **given: str) -> dict[str, str]:
    before = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-c", f"{code}; {REPORT}"]
    done = subprocess.run(command, env=before | given, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_library_changes_no_variable():
    code = "import bitcycle, torch; bitcycle.quantize_model(torch.nn.Linear(2, 2), float_layers=[])"
    after = environment_after(code)
    assert not set(VARIABLES) & set(after)


def test_the_command_chooses_before_pytorch_is_imported():
    code = (
        "import sys; from bitcycle import cli; assert 'torch' not in sys.modules; sys.argv[1:] = ['nothing'];"
        " code = cli.main(); assert code == 2 and 'torch' not in sys.modules"
    )
    after = environment_after(code)
    assert {name: after[name] for name in WAITING} == WAITING


@pytest.mark.parametrize("variable", [THREADS, *WAITING])
def test_a_value_of_the_user_wins(variable, monkeypatch):
    monkeypatch.setenv(variable, "7")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "2")
    choose_threads()
    assert os.environ[variable] == "7"
    assert share_of(2) == ({} if variable == THREADS else {THREADS: "1", SHARE: "1"})


def test_a_waiting_policy_of_the_user_wins(monkeypatch):
    monkeypatch.setenv(POLICY, "passive")
    choose_threads()
    assert not set(WAITING) & set(os.environ)


@pytest.mark.parametrize("variable", SCHEDULERS)
def test_never_more_threads_than_a_scheduler_allows(variable, monkeypatch):
    monkeypatch.setenv(variable, "3")
    choose_threads()
    assert os.environ[THREADS] == "3"
    assert share_of(2) == {THREADS: "1", SHARE: "1"}, "several runs share what the scheduler allows"


def test_without_a_limit_the_number_is_left_to_pytorch():
    choose_threads()
    assert THREADS not in os.environ, "it counts physical cores"
    assert share_of(1) == {}
    assert share_of(3) == {THREADS: "2", SHARE: "2"}
    assert share_of(20) == {THREADS: "1", SHARE: "1"}


def test_a_number_that_another_command_chose_is_chosen_anew(monkeypatch):
    """A job of SLURM has the variables of the command that submitted it, maybe from a machine with fewer cores."""
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "2")
    choose_threads()
    assert os.environ[THREADS] == "2" and users_threads() is None
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    choose_threads()
    assert os.environ[THREADS] == "4" and share_of(2) == {THREADS: "2", SHARE: "2"}
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    choose_threads()
    assert THREADS not in os.environ and CHOSEN not in os.environ


def test_a_share_is_not_chosen_anew_by_the_run_that_got_it(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    choose_threads()
    for name, value in share_of(2).items():
        monkeypatch.setenv(name, value)
    choose_threads()
    assert os.environ[THREADS] == "2"


ANNOUNCE = (
    "from bitcycle.threads import announced; context = announced(); context.__enter__(); print(flush=True); input()"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@contextmanager
def another(code: str = ANNOUNCE):
    process = subprocess.Popen([sys.executable, "-c", code], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="affinities of other processes are Linux's")
def test_runs_on_the_same_cores_are_counted(folder, monkeypatch):
    with announced():
        assert runs_beside() == 0, "none but this one"
        with another() as first, another():
            assert runs_beside() == 2
            first.communicate("\n")
            assert runs_beside() == 1
            monkeypatch.setenv("SLURM_CPUS_PER_TASK", "2")
            assert runs_beside() == 0, "a job has cores of its own"
            monkeypatch.delenv("SLURM_CPUS_PER_TASK")
        assert runs_beside() == 0, "it was killed"


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="affinities are Linux's")
def test_runs_on_other_cores_are_not_counted(folder):
    first, *_ = own = os.sched_getaffinity(0)
    with another(f"import os; os.sched_setaffinity(0, {{{first}}}); {ANNOUNCE}"):
        assert runs_beside() == 1
        os.sched_setaffinity(0, own - {first})
        try:
            assert runs_beside() == 0
        finally:
            os.sched_setaffinity(0, own)


@pytest.mark.skipif(sys.platform != "linux", reason="affinities of other processes are Linux's")
def test_runs_that_leave_the_cores_to_others_are_not_counted(folder):
    with another(f"import os; os.nice(1); {ANNOUNCE}"), another():
        assert runs_beside() == 1, "a campaign at low priority gives way"


def test_announcing_needs_no_folder(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with announced():
        assert runs_beside() == 0


@pytest.mark.parametrize("module", ["bitcycle.benchmark", "bitcycle.sweep.status"])
def test_a_module_run_by_its_name_is_a_command(module, tmp_path):
    """A module that is run imports PyTorch when it begins, here one that reports the variables."""
    (tmp_path / "torch.py").write_text(f"{REPORT}; import os; os._exit(0)")
    before = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment = before | {"PYTHONPATH": str(tmp_path), "SLURM_CPUS_PER_TASK": "1"}
    command = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
    cores = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    done = subprocess.run([sys.executable, "-u", "-m", module], env=environment, capture_output=True, text=True)
    after = json.loads(done.stdout.splitlines()[-1])
    assert {name: after.get(name) for name in WAITING} == WAITING
    assert after.get(THREADS) == ("1" if cores > 1 else None)


def test_a_module_of_another_package_is_not_a_command(monkeypatch):
    for words in (["python", "-m", "other.tool"], ["python", "-m", "bitcycle_tools"], ["python", "tool.py"]):
        monkeypatch.setattr(sys, "orig_argv", words)
        monkeypatch.setattr(sys, "argv", ["-m"])
        assert not threads.runs_a_module()
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "bitcycle.reproduction.campaign"])
    assert threads.runs_a_module()
    monkeypatch.setattr(sys, "argv", ["tool.py", "bitcycle"])
    assert not threads.runs_a_module(), "the package is imported later than its module is located"


def test_a_job_leaves_the_number_to_its_run(tmp_path, monkeypatch):
    """Its variable would count as the user's choice, and neither affinity nor a container's quota would limit it."""
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "64")
    job = JobInSlurm(tmp_path)
    assert job.start('test -z "$OMP_NUM_THREADS"').wait(60) == 0


def test_an_allocation_beyond_the_affinity_does_not_count(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "64")
    assert allowed_cores() == 8


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"a/b/cpu.max": "150000 100000"}, 2),
        ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ({"cpu.max": "50000 100000"}, 1),
        ({"a/b/cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/c/d/cpu.cfs_quota_us": "250000", "cpu/c/d/cpu.cfs_period_us": "100000"}, 3),
        (
            {
                "cpu/c/d/cpu.cfs_quota_us": "900000",
                "cpu/c/d/cpu.cfs_period_us": "100000",
                "cpu/c/cpu.cfs_quota_us": "50000",
                "cpu/c/cpu.cfs_period_us": "50000",
            },
            1,
        ),
        ({"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_the_quota_of_a_container(files, cores, tmp_path):
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    (tmp_path / "own").write_text("1:name=systemd:/x\n4:cpu,cpuacct:/c/d\n0::/a/b\n")
    assert quota_cores(tmp_path / "fs", tmp_path / "own") == cores


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"a/b/memory.max": "8000\n"}, 8000),
        ({"a/memory.max": "7000\n", "a/b/memory.max": "max\n"}, 7000),
        ({"memory.max": "max\n"}, None),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/c/memory.limit_in_bytes": "6000\n"}, 6000),
        ({}, None),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_the_memory_of_a_container(files, limit, tmp_path):
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    (tmp_path / "own").write_text("1:name=systemd:/x\n5:memory:/c\n0::/a/b\n")
    assert memory_limit(tmp_path / "fs", tmp_path / "own") == limit


def test_the_benchmark_measures_runs_beside_others(monkeypatch):
    """Ratios are those of a round, and what other programs used is what the run alone did not."""
    calls: list[int] = []
    started: list[int] = []
    durations = iter([0.010, 0.009, 0.022, 0.031, 0.018, 0.020, 0.050, 0.064])  # the second round begins with waiting
    used = iter([0.0, 7.0, 10.0, 13.0, 20.0, 25.0, 30.0, 33.0])

    @contextmanager
    def runs(name, number, waiting=None):
        started.append(number)
        yield list(range(number))

    def steps(runs, seconds):
        calls.append(len(runs))
        step = next(durations)
        return [(step * slower, 3.0) for slower in (1.0, 0.9, 0.8)[: len(runs)]]

    clock = iter(range(0, 100, 2))
    monkeypatch.setattr(contention, "_runs", runs)
    monkeypatch.setattr(contention, "_steps", steps)
    monkeypatch.setattr(contention, "_busy", lambda number: nullcontext())
    monkeypatch.setattr(contention, "_cpu_seconds", lambda: next(used))
    monkeypatch.setattr(contention.time, "perf_counter", lambda: next(clock))
    found = contention.measure_contention(["resnet8"], rounds=2, seconds=0)["networks"]["resnet8"]
    assert calls == [1, 1, 1, 3] * 2
    assert started == [1, 1, 3], "runs that start together share the cores, one alone has them all"
    ratios = [round(found[name]["ratio"], 6) for name in ("alone", "spinning", "busy", "at_once")]
    assert ratios == [1.0, 0.9, 2.35, 3.15]
    assert found["alone"]["ms"] == 15
    assert found["others"] == 0.5


@pytest.mark.slow
def test_a_step_beside_others_takes_a_fair_share(monkeypatch):
    monkeypatch.undo()
    choose_threads()
    found = contention.measure_contention(["resnet8"], rounds=5, seconds=1)["networks"]["resnet8"]
    assert found["alone"]["ms"] > 0
    if found["others"] > 0.2:
        pytest.skip(f"other programs use {found['others']} cores")
    assert all(found[name]["ratio"] <= limit for name, limit in LIMITS.items()), found
    assert found["spinning"]["ratio"] >= LEAST_SPINNING, found
