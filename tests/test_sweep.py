"""Sweeps: what a list of grids expands to, which of its runs are missing, and how several are run side by side."""

from __future__ import annotations

import json
import multiprocessing.forkserver
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from bitcycle.errors import EXIT_INTERRUPTED
from bitcycle.settings import SettingError
from bitcycle.sweep import Sweep, command_line, expand, read_sweep, substitute
from bitcycle.sweep.composition import Composer
from bitcycle.sweep.execution import count_states, reason, report, runs_to_launch, sweep_table, worst
from bitcycle.sweep.forkserver import Forked
from bitcycle.sweep.item import with_regime
from bitcycle.sweep.local import LocalPool, start_interpreter
from bitcycle.sweep.sweep_index import index_runs
from bitcycle.training.run_folder import RunFolder
from tests.conftest import configure, hydra_config, run_train

SMALL = ("dataset=digits", "model=resnet8", "scale=smoke", "training.steps=4", "training.evaluation_steps=4")


# Expansion: plain values in, plain values out.


def test_a_grid_is_the_product_of_its_lists_and_grids_follow_each_other():
    runs = expand([{"model": ["a", "b"], "q": [8, 6]}, {"model": "c"}], {})
    assert runs == [
        *({"model": model, "q": q} for model in ("a", "b") for q in ("8", "6")),
        {"model": "c"},
    ]


def test_an_entry_that_is_a_mapping_sets_several_settings_and_its_key_is_a_label():
    grid = {"method": [{"schedule": "CR", "schedule.cycles": 8}, {}], "model": "a"}
    assert expand([grid], {}) == [{"schedule": "CR", "schedule.cycles": "8", "model": "a"}, {"model": "a"}]


def test_a_later_key_of_a_grid_wins_and_the_command_line_wins_over_all():
    assert expand([{"a": {"q": 1}, "q": 2}], {}) == [{"q": "2"}]
    assert expand([{"q": [1, 2], "model": "a"}], {"q": "3"}) == [{"q": "3", "model": "a"}]


def test_no_grid_is_one_run_and_an_empty_list_is_refused():
    assert expand([], {"seed": "1"}) == [{"seed": "1"}]
    with pytest.raises(SettingError, match="no values to sweep over"):
        expand([{"model": []}], {})


def test_values_are_written_as_on_the_command_line():
    grid = {"a": None, "b": True, "c": "[3,4]", "d": 1e-5, "e": [[3, 4]]}
    assert expand([grid], {}) == [{"a": "null", "b": "true", "c": "[3,4]", "d": "1e-05", "e": "[3,4]"}]


def test_replacements_name_values_as_they_are_written_in_yaml():
    run = {"training.epochs": "2.5", "schedule.cycles": "32", "rate": "1e-05", "model": "a"}
    found = substitute(
        run, {"training.epochs": {2.5: 1}, "schedule.cycles": {32: None}, "rate": {1e-5: 0.1}, "model": {"b": "c"}}
    )
    assert found == {"training.epochs": "1", "schedule.cycles": "null", "rate": "0.1", "model": "a"}
    assert substitute({}, {"model": {"a": "b"}, "q": 3}) == {"q": "3"}  # a mapping adds nothing, a value is set for all


def test_a_path_with_an_equals_sign_is_quoted_once():
    (argument,) = command_line({"model.initial_weights": "runs/seed=0"})
    assert argument == "model.initial_weights='runs/seed=0'"
    assert command_line({"model.initial_weights": "'runs/seed=0'"}) == [argument]


# Scales and seeds.

SWEEP = Sweep(
    grids=[{"model": ["resnet74", "resnet152"]}],
    trials={"paper": 2, "mini": 3},
    at_scale={"mini": {"model": {"resnet152": "resnet20", "resnet74": "resnet20"}}},
)


def test_the_first_seed_of_all_comes_before_the_second_of_any():
    assert [(run["model"], run["seed"]) for run in SWEEP.expand()] == [
        *(("resnet74", "0"), ("resnet152", "0"), ("resnet74", "1"), ("resnet152", "1")),
    ]


def test_runs_that_a_scale_makes_equal_are_one():
    assert [(run["model"], run["seed"]) for run in SWEEP.expand("mini")] == [("resnet20", str(k)) for k in range(3)]


def test_the_command_line_wins_over_scales_and_seeds():
    fixed = {"model": "resnet8", "seed": "7"}
    assert SWEEP.expand("mini", fixed) == [fixed]


def test_a_grid_can_have_seeds_of_its_own():
    sweep = Sweep(grids=[{"quantizer": "none", "seed": 0}, {"quantizer": "sbm"}], trials={"paper": 2})
    assert [(run["quantizer"], run["seed"]) for run in sweep.expand()] == [("none", "0"), ("sbm", "0"), ("sbm", "1")]


def test_an_unknown_scale_is_refused():
    with pytest.raises(SettingError, match="did you mean 'mini'"):
        SWEEP.expand("min")


@pytest.mark.parametrize(
    "text", ["runs: 3", "hydra: {sweeper: {colour: red}}", "hydra: {sweeper: 3}", "a: [", "hydra:"]
)
def test_a_file_that_is_no_sweep_is_refused(tmp_path, text):
    path = tmp_path / "sweep.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingError, match=r"see sweeps/README\.md for the form of a sweep"):
        read_sweep(path)


def test_a_sweep_file_is_read(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text("hydra: {sweeper: {title: t, runs: 2, grids: [{seed: [0, 1]}], at_scale: {smoke: {a: {3: 4}}}}}")
    found = read_sweep(path)
    assert (found.title, found.runs, found.grids) == ("t", 2, [{"seed": [0, 1]}])
    assert substitute({"a": "3"}, found.at_scale["smoke"]) == {"a": "4"}


# Composition.


def test_composing_in_two_steps_is_composing_in_one():
    asked = []

    def ask(arguments):
        asked.append(arguments)
        return hydra_config(arguments)

    composer = Composer(ask)
    runs = [
        {"schedule": "CR", "schedule.cycles": cycles, "training.steps": "null", "training.epochs": "2", "seed": "1"}
        for cycles in ("2", "4")
    ]
    runs.append({"schedule": "CR", "quantizer.depthwise_bits": "[8,16]", "results_root": "a/b=c"})
    runs.append({"schedule": "CR", "quantizer": "dorefa", "schedule.q_min": "4"})
    for run in runs:
        found = composer(run)
        assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(hydra_config(command_line(run)))
    assert asked == [[], ["schedule=CR"], ["quantizer=dorefa"]]  # not one for each combination


# Inventory.


def stock(runs, tmp_path):
    def checked(run):
        try:
            return configure(*SMALL, *command_line(run), f"results_root={tmp_path}/runs")
        except SettingError as error:
            return str(error)

    return index_runs(runs, checked)


def test_runs_that_compute_the_same_are_one_and_wrong_ones_are_kept(tmp_path):
    runs = [
        {"schedule": "static", "schedule.q_min": "3"},
        {"schedule": "static", "schedule.q_min": "5"},
        {"schedule": "static", "schedule.q_min": "3", "seed": "1"},
        {"schedule": "RTH", "schedule.cycles": "3"},
    ]
    found = stock(runs, tmp_path)
    assert [run.state for run in found] == ["missing", "missing", "wrong"]
    assert [run.overrides for run in found] == [runs[0], runs[2], runs[3]]
    assert found[0].folder.path.parent == found[1].folder.path.parent
    assert "odd number of cycles" in found[2].problem
    assert count_states([run.state for run in found]) == "3 runs: 2 missing, 1 wrong"


def test_states_follow_the_folders(tmp_path):
    runs = [{"seed": str(seed)} for seed in range(5)]
    folders = [run.folder for run in stock(runs, tmp_path)]
    for folder in folders[:4]:
        folder.path.mkdir(parents=True)
    folders[0].write_status("done", 4, 4)
    folders[0].summary.write_text('{"final": 1}')
    folders[1].write_status("failed", 1, 4, "no memory")
    folders[2].checkpoint.last.parent.mkdir()
    folders[2].checkpoint.last.touch()
    found = stock(runs, tmp_path)
    with folders[3].lock():
        states = [run.state for run in found]
        launched = runs_to_launch(found)
    assert states == ["done", "failed", "resumable", "running", "missing"]
    assert reason(found[1]) == "no memory"
    assert launched == [found[1], found[2], found[4]]
    assert count_states(states) == "5 runs: 1 done, 1 running, 1 resumable, 1 failed, 1 missing"


def test_a_report_names_wrong_runs_and_is_json_if_asked(tmp_path, capsys):
    found = stock([{"seed": "0"}, {"schedule": "RTH", "schedule.cycles": "3"}], tmp_path)
    assert report(found, Sweep(title="a title"), "json") == [2]
    out, err = capsys.readouterr()
    good, wrong = json.loads(out)
    assert good["state"] == "missing" and good["run_dir"] == str(found[0].folder.path) and good["problem"] is None
    assert wrong["state"] == "wrong" and "cycles" in wrong["problem"]
    assert "a title: 2 runs" in err and "wrong configuration: schedule.cycles=3" in err


def test_the_table_shows_what_sets_runs_apart_and_what_they_cost(tmp_path):
    found = stock([{"schedule": "static", "seed": "0"}, {"schedule": "CR", "seed": "0"}], tmp_path)
    table = sweep_table(found, "title")
    assert [str(column.header) for column in table.columns] == [
        "#",
        "schedule",
        "state",
        "steps",
        "GBitOps",
        "of static",
    ]
    assert next(iter(table.columns[5].cells)) == "1.000"


def test_the_worst_exit_code_is_reported():
    assert worst([0, 1, 0]) == 1 and worst([1, 3]) == 3 and worst([3, 2]) == 2 and worst([2, 75]) == 75
    assert worst([-9]) == worst([139]) == 1 and worst([]) == 0


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
    assert LocalPool(workers).run(commands) == [0, 1, 3, 2, -9]
    assert len(list(tmp_path.iterdir())) == 4


def test_no_more_commands_than_workers_at_a_time(tmp_path, script):
    code = f"""
import os, pathlib, time
here = pathlib.Path({str(tmp_path)!r}) / str(os.getpid())
here.touch(); time.sleep(0.3); count = len(list(here.parent.iterdir())); here.unlink()
raise SystemExit(count)
"""
    assert max(LocalPool(2).run([script(code)] * 5)) == 2


def test_gpus_are_dealt_out_in_turn(script):
    code = "import os; raise SystemExit(10 + int(os.environ['CUDA_VISIBLE_DEVICES']))"
    assert set(LocalPool(4, gpus=2).run([script(f"import time; time.sleep(1); {code}")] * 4)) == {10, 11}


# Forked.


def test_a_forked_run_keeps_its_exit_code_and_none_stops_another(script, tmp_path):
    codes = ["raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)", "import os; os._exit(5)", "1 / 0", "pass"]
    for workers in (1, 3):
        assert LocalPool(workers, start=Forked).run([script(code) for code in codes]) == [3, -9, 5, 1, 0]


def ended(run: Forked) -> int:
    deadline = time.monotonic() + 60
    while (code := run.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert code is not None
    return code


@pytest.fixture
def fresh_fork_server():
    """The fork server of sweeps, as a process has one only: that of the tests' own commands, which imports less, ends before."""
    server = multiprocessing.forkserver._forkserver
    before = server._preload_modules
    server._stop()
    server.set_forkserver_preload(["bitcycle.sweep.preload"])
    yield
    server._stop()
    server.set_forkserver_preload(before)


def test_a_forked_run_is_as_if_python_had_started_it(script, tmp_path, fresh_fork_server):
    code = """
import atexit, json, os, sys, torch
import beside
atexit.register(lambda: print("at exit"))
print(json.dumps([__name__, sys.argv[1:], os.environ["COLOUR"], torch.get_num_threads(), os.getsid(0) == os.getpid()]))
print(sys.stdin.read(), "imported" if "sklearn.datasets" in sys.modules else "", file=sys.stderr)
torch.ones(300, 300) @ torch.ones(300, 300)
"""
    command = script(code, "a=1", "b")
    (Path(command[0]).parent / "beside.py").touch()
    environment = {"COLOUR": "red", "OMP_NUM_THREADS": "2"}
    assert ended(Forked(command, tmp_path / "output", environment)) == 0
    facts, *others = (tmp_path / "output").read_text().splitlines()
    assert json.loads(facts) == ["__main__", ["a=1", "b"], "red", 2, True]
    assert others == [" imported", "at exit"]


@pytest.mark.parametrize("forked", [False, True])
def test_a_signal_stops_all_runs_gracefully_and_begins_no_others(tmp_path, script, forked):
    code = f"""
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
(pathlib.Path({str(tmp_path)!r}) / str(os.getpid())).touch()
time.sleep(60)
"""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}

    def interrupt():
        deadline = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    pool = LocalPool(2, start=Forked if forked else start_interpreter)
    assert pool.run([script(code)] * 3) == [EXIT_INTERRUPTED] * 3
    assert pool.stopped_by == signal.SIGINT
    assert len(list(tmp_path.iterdir())) == 2  # the third was not begun
    assert {number: signal.getsignal(number) for number in handlers} == handlers


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
    sweep = "import sys, pathlib; from bitcycle.sweep.forkserver import Forked\n"
    sweep += f"run = Forked({stopping!r}, pathlib.Path({str(tmp_path / 'output')!r}), {{}})\nsys.stdin.read()"
    killed = subprocess.Popen([sys.executable, "-c", sweep], stdin=subprocess.PIPE)
    wait_for(tmp_path / "started")
    killed.kill()
    killed.wait()
    wait_for(tmp_path / "stopped")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.exists()


# From the command line.


def sweep(tmp_path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run_train("-m", *SMALL, f"results_root={tmp_path}/runs", *overrides)


def test_a_failing_run_stops_no_other_and_gives_the_exit_code(tmp_path):
    planned = stock([{"seed": "0"}], tmp_path)[0].folder
    planned.path.parent.mkdir(parents=True)
    planned.path.touch()  # a file where the folder of the first run should be
    done = sweep(tmp_path, "seed=0,1")
    assert done.returncode == 1, done.stderr
    assert re.search(r"failed .*\bseed=0\b.* \(exit code 1\)", done.stderr), done.stderr
    assert RunFolder(planned.path.parent / "seed=1").state() == "done"


def test_a_sweep_file_runs_at_the_scale_that_is_asked_for(tmp_path):
    done = run_train("-m", "+sweeps=cpt/table6", "scale=smoke", "dry_run=json", f"results_root={tmp_path}/runs")
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)
    assert {run["overrides"]["dataset"] for run in runs} == {"digits"}
    assert {run["overrides"]["schedule.cycles"] for run in runs} == {"4"}
    assert not (tmp_path / "runs").exists()


def test_a_scale_can_leave_runs_out_and_name_a_regime():
    grid = {"dataset": ["cifar10", "imagenet"], "model": "resnet74", "schedule.q_min": "4"}
    at_scale = {"mini": {"regime": "interpolating", "leave_out": {"dataset": "imagenet"}, "model": "resnet14"}}
    runs = Sweep(grids=[grid], at_scale=at_scale).expand("mini")
    regime = with_regime({"regime": "interpolating"})
    assert [run["dataset"] for run in runs] == [regime["dataset"]["cifar10"]]
    assert runs[0]["model"] == "resnet14"  # what stands beside the regime goes before it
    assert runs[0]["training.steps"] == str(regime["training.steps"])
    with pytest.raises(SettingError, match=r"sweeps/regimes\.yaml"):
        with_regime({"regime": "interpolatin"})
