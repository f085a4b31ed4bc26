"""Runs side by side on one machine, forked or not, and sweeps from the command line."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from multiprocessing import forkserver
from pathlib import Path

import pytest

from bitcycle.errors import EXIT_INTERRUPTED
from bitcycle.settings import SettingError
from bitcycle.sweep import local
from bitcycle.sweep.forkserver import start
from bitcycle.sweep.local import LocalPool
from bitcycle.sweep.registry import Sweep
from bitcycle.training.run_folder import RunFolder
from tests.conftest import run_train
from tests.sweep_cases import SMALL, stock

# Running side by side.


@pytest.fixture
def script(tmp_path_factory):
    """Code as a script with its arguments."""

    def write(code: str, *arguments: str) -> list[str]:
        path = tmp_path_factory.mktemp("scripts") / "script.py"
        path.write_text(code)
        return [str(path), *arguments]

    return write


@pytest.mark.parametrize("workers", [1, 2])
def test_every_command_is_run_and_keeps_its_exit_code(workers, tmp_path, script):
    write = "import pathlib, sys; pathlib.Path({!r}).touch(); sys.exit({})"
    commands = [script(write.format(str(tmp_path / str(code)), code)) for code in (0, 1, 3, 2)]
    commands.append(script("import os; os.kill(os.getpid(), 9)"))
    assert LocalPool(workers, method="spawn").run(commands) == [0, 1, 3, 2, -9]
    assert len(list(tmp_path.iterdir())) == 4


def test_no_more_commands_than_workers_at_a_time(tmp_path, script):
    code = f"""
import os, pathlib, time
here = pathlib.Path({str(tmp_path)!r}) / str(os.getpid())
here.touch(); time.sleep(0.3); count = len(list(here.parent.iterdir())); here.unlink()
raise SystemExit(count)
"""
    assert max(LocalPool(2, method="spawn").run([script(code)] * 5)) == 2


def test_no_more_runs_than_the_memory_of_a_container_allows(monkeypatch):
    """It was that of the machine: with many cores, more runs began than fit, and the kernel killed some."""
    monkeypatch.setattr(local, "allowed_cores", lambda: 64)
    monkeypatch.setattr(local, "memory_limit", lambda: 2 * local.MEMORY_OF_A_RUN)
    assert local.useful_workers() == 2


def test_gpus_are_dealt_out_in_turn(script):
    code = "import os; raise SystemExit(10 + int(os.environ['CUDA_VISIBLE_DEVICES']))"
    assert set(LocalPool(4, gpus=2).run([script(f"import time; time.sleep(1); {code}")] * 4)) == {10, 11}


def test_gpus_are_dealt_out_among_the_visible_ones(script, monkeypatch):
    """With CUDA_VISIBLE_DEVICES=2,3, runs were started on the GPUs 0 and 1, which others may use."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    code = "import os; raise SystemExit(10 + int(os.environ['CUDA_VISIBLE_DEVICES']))"
    assert set(LocalPool(2, gpus=2).run([script(f"import time; time.sleep(1); {code}")] * 2)) == {12, 13}


def test_runs_that_name_a_gpu_see_all_of_them(script, monkeypatch):
    """A run with training.device=cuda:1 saw one GPU, cuda:0, and failed."""
    monkeypatch.setattr(local.torch.accelerator, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pool = LocalPool.on({"cuda:1", "cuda:3"}, most=10)
    assert (pool.workers, pool.method) == (2, "spawn")
    assert pool.run([script("import os; raise SystemExit('CUDA_VISIBLE_DEVICES' in os.environ)")]) == [0]
    dealt = LocalPool.on({"auto"}, most=10, runs_per_gpu=2)
    assert (dealt.workers, dealt.gpus) == (8, 4) and LocalPool.on({"auto"}, most=3).workers == 3


def test_runs_on_the_cpu_beside_gpus_are_as_many_as_cores(monkeypatch):
    """There were as many as GPUs."""
    monkeypatch.setattr(local.torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(local, "allowed_cores", lambda: 3)
    monkeypatch.setattr(local, "memory_limit", lambda: None)
    pool = LocalPool.on({"cpu"}, most=10)
    assert pool.gpus == 0 and pool.workers == local.useful_workers(gpus=0) > 1


def test_what_another_process_begins_at_the_same_moment_comes_last(tmp_path, script):
    """It was called failed, and the sweep ended with 1 although every run was trained."""
    code = (
        "import pathlib, sys; done = pathlib.Path(sys.argv[1]); code = not done.exists(); done.touch(); sys.exit(code)"
    )
    taken = iter([False, True, False])  # when it is begun, when it has failed, and after the other run
    commands = [script(code, str(tmp_path / "first")), script("pass")]
    assert LocalPool(1, method="spawn").run(commands, lambda number: number == 0 and next(taken, False)) == [0, 0]


@pytest.mark.parametrize(("failures", "code"), [(1, 0), (3, 1)])
def test_what_another_process_has_finished_meanwhile_has_not_failed(failures, code, tmp_path, script):
    """Its lock had refused this sweep's process. A run that fails again fails after its end, as with its picture."""
    text = "import pathlib, sys; log = pathlib.Path(sys.argv[1]); log.open('a').write('.'); sys.exit(log.stat().st_size <= "
    command = script(f"{text}{failures})", str(tmp_path / "log"))
    assert LocalPool(1, method="spawn").run([command], is_done=lambda number: True) == [code]
    assert (tmp_path / "log").read_text() == ".."


# Forked.


def test_a_forked_run_keeps_its_exit_code_and_none_stops_another(script, tmp_path):
    codes = ["raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)", "import os; os._exit(5)", "1 / 0", "pass"]
    for workers in (1, 3):
        assert LocalPool(workers, method="forkserver").run([script(code) for code in codes]) == [3, -9, 5, 1, 0]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_run_is_as_if_python_had_started_it(method, script, tmp_path):
    code = """
import atexit, json, multiprocessing, os, sys, torch
import beside
atexit.register(lambda: print("at exit"))
print(json.dumps([__name__, sys.argv[1:], os.environ["COLOUR"], torch.get_num_threads(), os.getsid(0) == os.getpid()]))
print(multiprocessing.get_start_method() == multiprocessing.get_all_start_methods()[0])
print(sys.stdin.read(), "imported" if "sklearn.datasets" in sys.modules else "", file=sys.stderr)
torch.ones(300, 300) @ torch.ones(300, 300)
"""
    command = script(code, "a=1", "b")
    (Path(command[0]).parent / "beside.py").touch()
    environment = {"COLOUR": "red", "OMP_NUM_THREADS": "2"}
    run = start(command, tmp_path / "output", environment, method)
    run.join(180)
    assert run.exitcode == 0
    facts, is_started_alike, *others = (tmp_path / "output").read_text().splitlines()
    assert json.loads(facts) == ["__main__", ["a=1", "b"], "red", 2, True]
    assert is_started_alike == "True"
    assert others == [" imported" if method == "forkserver" else " ", "at exit"]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_signal_stops_all_runs_gracefully_and_begins_no_others(tmp_path, script, method):
    code = f"""
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
(pathlib.Path({str(tmp_path)!r}) / str(os.getpid())).touch()
time.sleep(60)
"""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}

    def interrupt():
        deadline = time.monotonic() + 120
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    pool = LocalPool(2, method=method)
    assert pool.run([script(code)] * 3) == [EXIT_INTERRUPTED] * 3
    assert pool.stopped_by == signal.SIGINT
    assert len(list(tmp_path.iterdir())) == 2  # the third was not begun
    assert {number: signal.getsignal(number) for number in handlers} == handlers


@pytest.mark.skipif(sys.platform != "linux", reason="runs are forked on Linux only")
def test_a_signal_to_every_process_of_a_job_is_no_failure(tmp_path, script):
    """As from SLURM, or systemd: it ended the fork server too, and all runs counted as failed while they saved checkpoints."""
    code = f"""
import os, pathlib, signal, sys, time
def stop(*_):
    time.sleep(1)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
(pathlib.Path({str(tmp_path)!r}) / str(os.getpid())).touch()
time.sleep(60)
"""

    def interrupt():
        deadline = time.monotonic() + 120
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    assert LocalPool(2, method="forkserver").run([script(code)] * 2) == [EXIT_INTERRUPTED] * 2


def test_a_run_that_is_just_forked_gets_its_signals(script, tmp_path):
    """The fork server blocks them."""
    run = start(script("import time; time.sleep(60)"), tmp_path / "output", {}, "forkserver")
    os.kill(run.pid, signal.SIGTERM)
    run.join(60)
    assert run.exitcode == -signal.SIGTERM


def test_when_a_sweep_is_killed_its_runs_save_a_checkpoint_and_stop(script, tmp_path):
    stopping = script(f"""
import pathlib, signal, sys, time
def stop(*_):
    pathlib.Path({str(tmp_path / "stopped")!r}).touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
pathlib.Path({str(tmp_path / "started")!r}).touch()
time.sleep(60)
""")
    sweep = "import sys, pathlib; from bitcycle.sweep import forkserver\nforkserver.PRELOAD = []  # which the run does not need\n"
    output = str(tmp_path / "output")
    sweep += f"run = forkserver.start({stopping!r}, pathlib.Path({output!r}), {{}}, 'forkserver')\nsys.stdin.read()"
    killed = subprocess.Popen([sys.executable, "-c", sweep], stdin=subprocess.PIPE)
    wait_for(tmp_path / "started")
    killed.kill()
    killed.wait()
    wait_for(tmp_path / "stopped")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 180
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.exists()


# From the command line.


def test_a_failing_run_stops_no_other_and_gives_the_exit_code(command, tmp_path):
    planned = stock([{"seed": "0"}], tmp_path)[0].folder
    planned.path.parent.mkdir(parents=True)
    planned.path.touch()  # a file where the folder of the first run should be
    code, _, errors = command("-m", *SMALL, "seed=0,1")
    assert code == 1, errors
    assert re.search(r"failed .*\bseed=0\b.* \(exit code 1\)", errors), errors
    assert RunFolder(planned.path.parent / "seed=1").state() == "done"


def test_runs_of_another_process_come_last_and_are_waited_for(command, tmp_path):
    """They were left out with exit code 0, or with 1 if the other process began them during the sweep."""
    first, second = [run.folder for run in stock([{"seed": "0"}, {"seed": "1"}], tmp_path)]
    other = ExitStack()
    other.enter_context(first.lock())

    def stop_when_the_other_run_is_done():
        deadline = time.monotonic() + 180
        while second.state() != "done" and time.monotonic() < deadline:
            time.sleep(0.05)
        other.close()

    threading.Thread(target=stop_when_the_other_run_is_done).start()
    code, _, errors = command("-m", *SMALL, "seed=0,1")
    assert code == 0, errors
    assert f"comes last, as another process is training it: {first.path}" in errors
    assert first.state() == second.state() == "done"


def test_a_run_that_is_skipped_has_to_be_run_again(command, tmp_path):
    """The exit code was 0 although the run was not done, where the launcher does not wait for others."""
    other = stock([{"seed": "0"}], tmp_path)[0].folder
    with other.lock():
        code, _, errors = command("-m", "hydra/launcher=basic", *SMALL, "seed=0")
    assert f"skipped, as another process is training it: {other.path}" in errors
    assert code == EXIT_INTERRUPTED, errors


def test_runs_that_wait_for_weights_of_their_own_sweep_are_trained_by_the_same_command(tmp_path):
    """They were left out with exit code 2, and the command had to be repeated."""
    where = (f"results_root={tmp_path}/runs", "logging.group=a_setting_of_no_cell")
    done = run_train("-m", "+sweeps=hlhlp/table2", "scale=smoke", *where)
    assert done.returncode == 0, done.stderr
    assert "waiting for another run: model.initial_weights=" in done.stderr
    assert [path.parent.parent.name.split("-")[3] for path in sorted(tmp_path.rglob("summary.json"))] == [
        "static",
        "hlhlp",
    ]


def test_a_sweep_file_runs_at_the_scale_that_is_asked_for(tmp_path):
    overrides = ("-m", "+sweeps=cpt/table6", "scale=smoke", "dry_run=json", f"results_root={tmp_path}/runs")
    done = run_train(*overrides, launches=False)
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)
    assert {run["overrides"]["dataset"] for run in runs} == {"digits"}
    assert {run["overrides"]["schedule.cycles"] for run in runs} == {"4"}
    assert not (tmp_path / "runs").exists()


def test_a_regime_can_depend_on_the_dataset_of_the_paper():
    grid = {"dataset": ["cifar10", "imagenet", "ptb", "voc"], "model": "resnet74"}
    regimes = {"cifar10": "interpolating", "imagenet": "underfitting", "ptb": {"model": "gru", "training.steps": 9}}
    images, more_images, text, other = Sweep(grids=[grid], at_scale={"mini": {"regime": regimes, "seed": 3}}).expand(
        "mini"
    )
    assert images["dataset"] == more_images["dataset"] == "cifar10_16"
    assert int(more_images["dataset.train_samples"]) > int(images["dataset.train_samples"])
    assert (text["model"], text["training.steps"]) == ("gru", "9")
    assert other == {"dataset": "voc", "model": "resnet74", "seed": "3"} and text["seed"] == "3"


def test_a_scale_can_name_a_regime():
    grid = {"dataset": "cifar10", "model": "resnet74", "schedule.q_min": "4"}
    at_scale = {"mini": {"regime": "interpolating", "model": "resnet14"}}
    runs = Sweep(grids=[grid], at_scale=at_scale).expand("mini")
    regime = Sweep(at_scale={"mini": {"regime": "interpolating"}}).replacements("mini")
    assert [run["dataset"] for run in runs] == [regime["dataset"]["cifar10"]]
    assert runs[0]["model"] == "resnet14"  # what stands beside the regime goes before it
    assert runs[0]["training.steps"] == str(regime["training.steps"])
    with pytest.raises(SettingError, match=r"sweeps/regimes\.yaml"):
        Sweep(at_scale={"mini": {"regime": "interpolatin"}}).expand("mini")
