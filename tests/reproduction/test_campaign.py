"""`make campaign`: the order of a plan, what is left out, interruptions, failures, and what is gathered."""

import json
import os
import signal
import threading
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from bitcycle.configuration import read_config
from bitcycle.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, RunError
from bitcycle.files import write_json
from bitcycle.model import build_seeded
from bitcycle.reproduction import campaign as campaign_module
from bitcycle.reproduction import gpu_day, reproduce
from bitcycle.reproduction.campaign import Campaign, Part, Summaries, only_campaign, read_plan, run, train
from bitcycle.settings import SettingError
from bitcycle.sweep.forkserver import PRIORITY_VARIABLE
from bitcycle.sweep.local import LocalPool
from bitcycle.threads import CHOSEN, THREADS
from bitcycle.training.run_folder import RunFolder
from tests.conftest import COMPOSER, ROOT, configure

SWEEP = """
hydra: {sweeper: {grids: [{dataset: digits, model: resnet8, training.steps: 4, schedule: [CR, LR, RR]}], trials: {smoke: 2}}}
"""
OTHER = """
hydra: {sweeper: {grids: [{dataset: digits, model: resnet8, training.steps: 4, schedule: [RTH, CR]}]}}
"""

TRAIN = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
schedule = next(a.split("=")[1] for a in sys.argv if a.startswith("schedule="))
with open("log.txt", "a") as log:
    log.write(schedule + "\\n")
time.sleep(0.2)
sys.exit({"LR": 1}.get(schedule, 0))
"""
"""A train.py that trains nothing and fails with one schedule."""


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweeps" / "paper").mkdir(parents=True)
    (tmp_path / "sweeps" / "paper" / "a.yaml").write_text(SWEEP)
    (tmp_path / "sweeps" / "paper" / "b.yaml").write_text(OTHER)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def compose(run):
    try:
        return read_config(COMPOSER(run))
    except SettingError as error:
        return str(error)


def campaign(root: Path, *parts: Part, recorded=()) -> Campaign:
    return Campaign(root, parts, "elsewhere/runs", compose, recorded)


def finish(folder: RunFolder, seconds: float = 10.0) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_status("done", 4, 4)
    write_json(folder.summary, {"final": 1, "seconds": seconds})


def test_a_plan_is_read_and_a_wrong_one_refused(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("parts: [{sweep: a/b, claim: c, only: {q: 3}}, {sweep: d/e, scale: smoke, seeds: 3}]")
    first, second = read_plan(path)
    assert (first.sweep, first.claim, first.scale, first.only) == ("a/b", "c", "mini", {"q": 3})
    assert (second.scale, second.seeds) == ("smoke", 3)
    for text in ("parts: [{sweep: a/b, colour: red}]", "parts: [{sweep: a, scale: big}]", "runs: 3"):
        path.write_text(text)
        with pytest.raises(SettingError, match="plan"):
            read_plan(path)


def test_a_plan_that_is_not_utf8_is_refused(tmp_path):
    """It ended in a traceback."""
    path = tmp_path / "plan.yaml"
    path.write_bytes("parts: [{sweep: a/b, claim: geprüft}]".encode("latin-1"))
    with pytest.raises(SettingError, match=r"plan=.*utf-8"):
        read_plan(path)


def test_a_campaign_without_jobs_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"--jobs=0: is too small\. Remedy: use 1 or more"):
        run(Namespace(jobs=0, threads=1), tmp_path)


@pytest.mark.parametrize("command", [reproduce, gpu_day])
def test_a_reproduction_without_workers_is_refused(command, tmp_path):
    """0 was the default without a word, and -2 one worker."""
    given = Namespace(workers=-2, runs_per_gpu=1, scale="smoke", hours=1.0, dry_run=True)
    with pytest.raises(SettingError, match=r"--workers=-2: is too small\. Remedy: use 1 or more"):
        command.run(given, tmp_path)


@pytest.mark.parametrize(("given", "users", "expected"), [(2, "5", "2"), (None, "5", "5"), (None, None, "1")])
def test_the_threads_of_a_run(given, users, expected, tmp_path, monkeypatch):
    """The option comes before the user's OMP_NUM_THREADS, and this before one thread."""
    monkeypatch.setenv(PRIORITY_VARIABLE, "idle")
    monkeypatch.setenv(THREADS, users or "1")
    monkeypatch.setenv(CHOSEN, "" if users else "1")
    chosen: list[str] = []
    monkeypatch.setattr(campaign_module, "train", lambda *_: chosen.append(os.environ[THREADS]) or EXIT_DONE)
    (tmp_path / "plan.yaml").write_text("parts: []")
    options = {"plan": tmp_path / "plan.yaml", "results_root": str(tmp_path), "summary": tmp_path / "s.csv"}
    more = {"jobs": 1, "figures": False, "dry_run": False, "priority": "idle"}
    assert run(Namespace(threads=given, **options, **more), ROOT) == EXIT_DONE
    assert chosen == [expected]


def test_a_folder_as_summary_is_refused_before_anything_runs(tmp_path):
    """Instead of an IsADirectoryError, which is no error of the user's configuration."""
    given = Namespace(plan=None, results_root=str(tmp_path), summary=tmp_path, jobs=1, threads=None, dry_run=True)
    with pytest.raises(SettingError, match=rf"--summary={tmp_path}: is a folder. Remedy: name a file, such as "):
        run(given, ROOT)


def test_the_plan_of_this_repository_is_a_plan():
    for plan in ("campaign", "evidence"):
        assert all(part.expand(ROOT, "runs") for part in read_plan(ROOT / "sweeps" / f"{plan}.yaml"))


def test_a_part_chooses_runs_settings_and_seeds(root):
    runs = Part("paper/a", "", "smoke", {"quantizer": ["sbm", "dorefa"]}, {"schedule": ["CR", "RR"]}, 1).expand(
        root, "r"
    )
    assert {(run["schedule"], run["quantizer"], run["seed"]) for run in runs} == {
        *((schedule, quantizer, "0") for schedule in ("CR", "RR") for quantizer in ("sbm", "dorefa"))
    }
    assert {run["results_root"] for run in runs} == {"r"}


@pytest.mark.parametrize(
    ("only", "words"),
    [
        ({"schedule": ["CR", "RRR"]}, "only.schedule=RRR: is a value of no run of paper/a .* did you mean 'RR'"),
        ({"schedul": "CR"}, "only=schedul: is no setting of the runs of paper/a. .* did you mean 'schedule'"),
        ({"schedule": "CR", "seed": [0, 2]}, "only.seed=2: .* use one of: 0, 1"),
        ({"schedule": "CR", "model": "resnet9"}, "only.model=resnet9: is a value of no run of paper/a .* 'resnet8'"),
    ],
)
def test_a_part_that_chooses_what_no_run_has_is_refused(root, only, words):
    """It chose fewer runs, or none, and the campaign was done without them."""
    with pytest.raises(SettingError, match=words):
        Part("paper/a", scale="smoke", only=only).expand(root, "r")


def test_a_part_whose_values_exist_but_in_different_runs_says_which_do_not_meet(root):
    """It named the value and proposed the same value instead."""
    grids = "{model: resnet8, schedule: CR}, {model: resnet20, schedule: RR}"
    (root / "sweeps" / "paper" / "a.yaml").write_text(f"hydra: {{sweeper: {{grids: [{grids}]}}}}")
    words = r"only.model=resnet20: .* no run of paper/a .* with the rest of `only`. .* combine it with schedule=RR"
    with pytest.raises(SettingError, match=words):
        Part("paper/a", only={"schedule": "CR", "model": ["resnet8", "resnet20"]}).expand(root, "r")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"overrides": {"scale": "mini"}}, "overrides.scale=mini: is not replaced here, in the entry of paper/a"),
        ({"overrides": {"results_root": "r"}}, "overrides.results_root=r: .* Remedy: use --results-root"),
        ({"overrides": {"seed": [7, 8]}, "seeds": 3}, "seeds=3: has no effect: paper/a or `overrides` set .* to 7, 8"),
        (
            {"seeds": 0},
            "seeds=0: is not a number of seeds, in the entry of paper/a. Remedy: write a whole number from 1",
        ),
        ({"seeds": "two"}, "seeds=two: is not a number of seeds"),
        ({"only": ["CR"]}, "only=.'CR'.: is not a mapping, in the entry of paper/a"),
        ({"overrides": None}, "overrides=null: is not a mapping"),
    ],
)
def test_a_part_with_what_would_have_no_effect_is_refused(root, fields, words):
    """Scale and seeds were ignored, no seeds were no runs, and other types ended with a traceback."""
    with pytest.raises(SettingError, match=words):
        Part("paper/a", **{"scale": "smoke", **fields}).expand(root, "r")


def test_some_of_the_seeds_of_a_part_can_be_chosen(root):
    runs = Part("paper/a", scale="smoke", only={"seed": [1, 3]}, seeds=4).expand(root, "r")
    assert {run["seed"] for run in runs} == {"1", "3"}
    with pytest.raises(SettingError, match="seeds=2: has no effect: board/methods"):
        Part("board/methods", seeds=2).expand(ROOT, "r")


def test_runs_come_in_the_order_of_the_plan_shared_ones_once_and_failed_ones_last(root):
    planned = campaign(root, Part("paper/b", scale="smoke"), Part("paper/a", scale="smoke"))
    assert len(planned.distinct()) == 7
    first, second = planned.distinct()[:2]
    first.folder.path.mkdir(parents=True)
    first.folder.write_status("failed", 1, 4, "no memory")
    finish(second.folder)
    again = campaign(root, Part("paper/b", scale="smoke"), Part("paper/a", scale="smoke"))
    order = []
    while (run := again.next()) is not None:
        order.append(run)
        again.ended(run, EXIT_DONE)
    assert order == [*planned.distinct()[2:], first]


def test_what_the_summary_holds_is_not_trained_again(root):
    planned = campaign(root, Part("paper/b", scale="smoke")).distinct()
    rows = [{"scale": "smoke", "hash": planned[0].key[1], "seed": "0"}]
    again = campaign(root, Part("paper/b", scale="smoke"), recorded=rows)
    assert again.next() is not None and again.next().path == planned[1].path
    assert again.progress(workers=1).startswith("1 of 2 runs done")


def test_the_time_left_is_that_of_runs_of_the_same_kind(root):
    planned = campaign(root, Part("paper/a", scale="smoke"))
    finish(planned.distinct()[0].folder, seconds=60)
    again = campaign(root, Part("paper/a", scale="smoke"))
    assert again.progress(workers=2) == "1 of 6 runs done; time left: 0:02:30"  # five runs of a minute, two at a time
    assert "never measured" in planned.progress(workers=2)


def test_the_time_left_of_a_kind_that_is_not_finished_here_is_that_of_recorded_runs(root):
    config = campaign(root, Part("paper/b", scale="smoke")).distinct()[0].config
    settings = {"training": {"steps": 2 * config.training.steps, "batch_size": config.training.batch_size}}
    row = {"scale": "smoke", "hash": "0", "seed": "0", "seconds": "120.0", "settings": json.dumps(settings)}
    row |= {"model": "resnet8", "dataset": "digits", "quantizer": "sbm", "schedule": "static"}
    planned = campaign(root, Part("paper/a", scale="smoke"), recorded=[row])
    assert planned.progress(workers=2) == "0 of 6 runs done; time left: 0:03:00"  # six runs of a minute, two at a time
    assert list(planned.table(workers=2).columns[-2].cells) == ["0:03:00"] * 2
    finish(planned.distinct()[0].folder, seconds=6)  # this machine is faster, which tells more
    assert campaign(root, Part("paper/a", scale="smoke"), recorded=[row]).progress(2).endswith("time left: 0:00:15")


def test_a_failure_stops_no_other_run_and_is_listed(root, caplog):
    planned = campaign(root, Part("paper/a", scale="smoke", seeds=1))
    asked = []
    assert train(planned, LocalPool(1, method="spawn"), lambda: asked.append(len(planned.done))) == EXIT_FAILED
    assert (root / "log.txt").read_text().split() == ["CR", "LR", "RR"]
    assert asked == [1, 1, 2]
    assert [line for line in planned.failures() if "exit code 1" in line and "LR" in line]


def test_a_run_that_dies_before_it_begins_is_not_given_the_reason_of_an_earlier_failure(root):
    first = next(run for run in campaign(root, Part("paper/a", scale="smoke", seeds=1)).distinct() if "LR" in run.path)
    first.folder.path.mkdir(parents=True)
    first.folder.write_status("failed", 1, 4, "the disk was full")
    planned = campaign(root, Part("paper/a", scale="smoke", seeds=1))
    assert train(planned, LocalPool(1, method="spawn")) == EXIT_FAILED
    assert list(planned.failures()) == [f"failed: exit code 1 [{first.path}]"]


def test_a_signal_stops_the_runs_and_begins_no_others(root):
    def interrupt() -> None:
        while not (root / "log.txt").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    assert train(campaign(root, Part("paper/a", scale="smoke")), LocalPool(1, method="spawn")) == EXIT_INTERRUPTED
    assert len((root / "log.txt").read_text().split()) == 1


def test_a_run_that_begins_from_another_follows_it(root):
    first = campaign(root, Part("paper/b", scale="smoke")).distinct()[0]
    (root / "sweeps/paper/c.yaml").write_text(
        "hydra: {sweeper: {grids: [{dataset: digits, model: resnet8, training.steps: 4, "
        f"model.initial_weights: {first.path}}}]}}}}"
    )
    planned = campaign(root, Part("paper/c", scale="smoke"), Part("paper/b", scale="smoke"))
    assert planned.distinct()[0].path is None
    assert planned.next() == first
    assert [line for line in planned.failures() if "no such file or folder" in line and "1 runs" in line]
    row = {"scale": "smoke", "hash": first.key[1], "seed": first.key[2]}
    again = campaign(root, Part("paper/b", scale="smoke"), Part("paper/c", scale="smoke"), recorded=[row])
    assert again.next() == first, "it is recorded, and its weights are not here: the run that begins from it never came"
    finish(first.folder)
    weights_of(first.folder)
    planned.ended(first, EXIT_DONE)
    assert not list(planned.failures())
    assert planned.next() == planned.distinct()[0] != first  # the plan's order


def test_a_run_whose_weights_another_process_has_just_finished_is_trained(root):
    """It was left out, with exit code 0."""
    first = campaign(root, Part("paper/b", scale="smoke", only={"schedule": "RTH"})).distinct()[0]
    (root / "sweeps/paper/c.yaml").write_text(
        "hydra: {sweeper: {grids: [{dataset: digits, model: resnet8, training.steps: 4, schedule: CR, "
        f"model.initial_weights: {first.path}}}]}}}}"
    )
    parts = Part("paper/b", scale="smoke", only={"schedule": "RTH"}), Part("paper/c", scale="smoke")
    planned = campaign(root, *parts)
    finish(first.folder)
    weights_of(first.folder)
    assert train(planned, LocalPool(1, method="spawn")) == EXIT_DONE
    assert (root / "log.txt").read_text().split() == ["CR"]


def test_a_run_finds_the_weights_of_another_below_the_folder_of_this_campaign(root):
    """Six trainings of hlhlp/appD were called wrong, since their float network was not in results/runs."""
    first = campaign(root, Part("paper/b", scale="smoke")).distinct()[0]
    below = first.path.removeprefix("elsewhere/runs/")
    (root / "sweeps/paper/c.yaml").write_text(
        "hydra: {sweeper: {grids: [{dataset: digits, model: resnet8, training.steps: 4, "
        f"model.initial_weights: results/runs/{below}}}]}}}}"
    )
    finish(first.folder)
    weights_of(first.folder)
    assert campaign(root, Part("paper/c", scale="smoke")).distinct()[0].path is not None


def weights_of(folder: RunFolder) -> None:
    config = configure("dataset=digits", "model=resnet8")
    model = build_seeded(config.model, config.dataset.info(config.data_folder).shape, 0)
    folder.checkpoint.last.parent.mkdir(parents=True)
    torch.save({"model": model.state_dict()}, folder.checkpoint.last)


def test_a_run_in_another_process_is_waited_for(root, monkeypatch):
    first, second = campaign(root, Part("paper/b", scale="smoke")).distinct()
    finish(second.folder)
    planned = campaign(root, Part("paper/b", scale="smoke"))
    lock = first.folder.lock()
    lock.__enter__()
    threading.Timer(0.5, lambda: (finish(first.folder), lock.__exit__(None, None, None))).start()
    assert train(planned, LocalPool(1, method="spawn")) == EXIT_DONE
    assert planned.done == {first.path, second.path}
    assert not (root / "log.txt").exists()


def test_a_run_in_another_process_is_waited_for_until_the_time_is_over(root):
    """A day with a GPU went on for as long as the other process trained."""
    first, second = campaign(root, Part("paper/b", scale="smoke")).distinct()
    finish(second.folder)
    planned, pool = campaign(root, Part("paper/b", scale="smoke")), LocalPool(1, method="spawn")
    other = ExitStack()
    other.enter_context(first.folder.lock())
    timer = threading.Timer(20, other.close)
    timer.start()
    pool.until = time.monotonic() + 1
    assert train(planned, pool) == EXIT_INTERRUPTED
    assert first.folder.is_in_use()
    timer.cancel()
    other.close()


def test_a_run_that_another_process_began_at_the_same_moment_has_not_failed(root):
    """It was reported as failed, and the campaign as well, although the other process finished the run."""
    planned = campaign(root, Part("paper/b", scale="smoke", only={"schedule": "CR"}))
    (run,) = planned.distinct()
    lock = run.folder.lock()

    def begin() -> None:
        """As a sweep that starts while this campaign's process is loading its libraries."""
        while not (root / "log.txt").exists():
            time.sleep(0.02)
        lock.__enter__()
        threading.Timer(1.5, lambda: (finish(run.folder), lock.__exit__(None, None, None))).start()

    (root / "train.py").write_text(TRAIN.replace('{"LR": 1}', '{"CR": 1}').replace("0.2", "0.5"))
    threading.Thread(target=begin).start()
    assert train(planned, LocalPool(1, method="spawn")) == EXIT_DONE
    assert planned.done == {run.path} and not list(planned.failures())


def test_two_campaigns_in_one_folder_are_refused(tmp_path):
    with only_campaign(tmp_path), pytest.raises(RunError, match="already running in"), only_campaign(tmp_path):
        pass


def test_finished_runs_are_gathered_once(finished_digits, tmp_path, monkeypatch):
    plan = finished_digits()
    run = campaign_of(plan.folder)
    summaries = Summaries(tmp_path / "summary" / "runs.csv")
    summaries.refresh(run)
    assert plan.hash in summaries.summary.read_text()
    summaries.summary.unlink()
    summaries.refresh(run)  # a moment ago
    assert not summaries.summary.exists()
    summaries.refresh(run, at_once=True)
    assert plan.hash in summaries.summary.read_text()


def campaign_of(folder: RunFolder):
    """As far as gathering needs it."""
    from types import SimpleNamespace

    from bitcycle.sweep.registry import SweepRun

    run = SweepRun({}, str(folder.path))
    return SimpleNamespace(distinct=lambda: [run], done={run.path})


@pytest.mark.parametrize("folder", ["a,b", "a (b)", "it's", "[a]", "{a}"])
def test_a_folder_that_hydra_would_read_as_something_else_is_refused(folder, tmp_path):
    """Every run failed, or was trained in a folder named `ChoiceSweep(...)`."""
    given = Namespace(plan=None, jobs=1, threads=1, priority="idle", dry_run=True, summary=tmp_path / "runs.csv")
    given.results_root = str(tmp_path / folder)
    with pytest.raises(SettingError, match=r"--results-root=.*Hydra's syntax"):
        run(given, ROOT)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    words = r"file/runs: .*Give a writable folder as --results-root"
    with pytest.raises(RunError, match=words), only_campaign(tmp_path / "file" / "runs"):
        pass
