"""Parcels: runs that go on on another machine and come back, as if they had stayed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time

import pytest

from bitcycle.errors import EXIT_INTERRUPTED, RunError
from bitcycle.settings import SettingError
from bitcycle.sweep import parcel
from bitcycle.training.run import execute
from bitcycle.training.run_folder import RunFolder, read_json
from tests.conftest import ROOT
from tests.test_resume import Crash, assert_equal, crash_at, result

SMALL = "dataset=digits model=resnet8 scale=smoke"


def open_parcel(parts, folder):
    folder.mkdir()
    whole = folder.parent / "whole.tar"
    whole.write_bytes(b"".join(part.read_bytes() for part in parts))
    with tarfile.open(whole) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.fixture
def home(tmp_path):
    """A repository with its code and no runs."""
    root = tmp_path / "home"
    for name in parcel.CODE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        root.mkdir(exist_ok=True)
        copy(ROOT / name, root / name)
    return root


def test_a_run_that_was_cut_off_goes_on_elsewhere_and_comes_back(home, digits, finished_digits, monkeypatch, tmp_path):
    """The whole way: a crash here, the rest of the run in the unpacked parcel, its results here; equal to an undisturbed run."""
    runs = home / parcel.RUNS
    cut = digits(f"results_root={runs}")
    with monkeypatch.context() as patch:
        crash_at(patch, 40, 30)
        with pytest.raises(Crash):
            execute(cut)
    (tmp_path / "data" / "nli" / "sick").mkdir(parents=True)
    parts = parcel.pack(home, tmp_path / "parcel", [f"{SMALL} seed=0"], ["nli/sick"], tmp_path / "data", part_mib=0.5)
    assert len(parts) > 1

    there = open_parcel(parts, tmp_path / "there")
    command = [sys.executable, "-m", "bitcycle.sweep.parcel", "run", "--minutes", "10", "--out", "out", "--weights"]
    environment = {**os.environ, "PYTHONPATH": str(there / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=there, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (there / "data" / "nli" / "sick").is_dir()
    (there / "results" / "runs").rename(there / "elsewhere")  # what follows reads the parts alone

    name = str(cut.folder.path.relative_to(runs))
    assert parcel.unpack(list((there / "out").iterdir()), runs) == {name: "finished"}
    assert cut.folder.state() == "done"
    assert "resuming after step 30" in cut.folder.log.read_text()
    assert_equal(result(cut.folder), result(finished_digits().folder))
    environment = read_json(cut.folder.environment)
    assert environment["commit"] == parcel.commit()
    assert parcel.unpack(list((there / "out").iterdir()), runs) == {name: "is finished here"}


def test_finished_runs_are_named_only_and_others_need_their_scale(home, digits, finished_digits, tmp_path):
    runs = home / parcel.RUNS
    done = finished_digits()
    shutil.copytree(done.folder.path, runs / "smoke" / "finished" / "seed=0")
    for scale in ("smoke", "mini"):
        unfinished = RunFolder(runs / scale / "unfinished" / "seed=0")
        unfinished.path.mkdir(parents=True)
        unfinished.write_status("failed", 3, 10)
        unfinished.checkpoint.save({"step": 3})
        unfinished.checkpoint.save({"step": 4})
    there = open_parcel(parcel.pack(home, tmp_path / "parcel", [SMALL], [], tmp_path, part_mib=15), tmp_path / "there")
    found = {str(path.relative_to(there / parcel.RUNS)) for path in (there / parcel.RUNS).rglob("*") if path.is_file()}
    assert found == {
        "smoke/finished/seed=0/status.json",
        "smoke/finished/seed=0/summary.json",
        "smoke/unfinished/seed=0/status.json",
        "smoke/unfinished/seed=0/checkpoint/last.pt",
    }
    assert not list(there.rglob("__pycache__"))
    parts = parcel.write_results(there, tmp_path / "out", 15, weights=False, known={"smoke/finished/seed=0"})
    assert parcel.unpack(parts, tmp_path / "back") == {"smoke/unfinished/seed=0": "resumable, step 3"}


def status(root, state, step, name="smoke/a/seed=0"):
    folder = RunFolder(root / name)
    folder.path.mkdir(parents=True)
    folder.write_status(state, step, 100)
    if state == "done":
        folder.write(folder.summary, {"step": step})
    else:
        folder.checkpoint.save({"step": step})
    return folder


@pytest.mark.parametrize(
    ("ours", "theirs", "said", "step"),
    [
        (("failed", 10), ("failed", 20), "resumable, step 20", 20),
        (("failed", 20), ("failed", 10), "is as far here (step 20)", 20),
        (("failed", 20), ("done", 100), "finished", 100),
        (("done", 100), ("failed", 50), "is finished here", 100),
        (None, ("failed", 5), "resumable, step 5", 5),
    ],
)
def test_what_comes_back_replaces_what_is_less_far(tmp_path, ours, theirs, said, step):
    here, there = tmp_path / "here", tmp_path / "there"
    if ours:
        status(here, *ours)
    status(there / parcel.RUNS, *theirs)
    status(there / parcel.RUNS, *theirs, name="smoke/a/seed=1")  # beside it, new here
    parts = parcel.write_results(there, tmp_path / "out", 15, weights=False, known=set())
    assert parcel.unpack(parts, here)["smoke/a/seed=0"] == said
    assert RunFolder(here / "smoke/a/seed=0").read_status()["step"] == step
    assert RunFolder(here / "smoke/a/seed=1").read_status()["step"] == theirs[1]
    assert [path.name for path in here.iterdir()] == ["smoke"]


def test_a_run_that_is_trained_here_is_not_replaced(tmp_path):
    status(tmp_path / "there" / parcel.RUNS, "done", 100)
    parts = parcel.write_results(tmp_path / "there", tmp_path / "out", 15, weights=False, known=set())
    ours = status(tmp_path / "here", "failed", 10)
    with ours.lock(), pytest.raises(RunError, match=r"a process trains .*seed=0 here"):
        parcel.unpack(parts, tmp_path / "here")


def test_a_part_that_is_missing_is_said(tmp_path):
    status(tmp_path / "there" / parcel.RUNS, "failed", 10)
    parts = parcel.write_results(tmp_path / "there", tmp_path / "out", 0.002, weights=False, known=set())
    assert len(parts) > 2
    whole = tmp_path / "results.tar"
    whole.write_bytes(b"")
    for wrong in (parts[:-1], parts[1:], [parts[0], *parts[:-1]], [whole]):
        with pytest.raises(RunError, match="not all parts of one parcel"):
            parcel.unpack(wrong, tmp_path / "here")
    parts[0].write_bytes(parts[0].read_bytes()[:1000])
    with pytest.raises(RunError, match="Fetch the parts again"):
        parcel.unpack(parts, tmp_path / "here")
    assert list((tmp_path / "here").iterdir()) == []


def test_fewer_parts_leave_no_old_ones(tmp_path):
    for size, count in ((5000, 3), (10, 1)):

        def write(tar, size=size):
            (tmp_path / "file").write_bytes(os.urandom(size))
            tar.add(tmp_path / "file", "file")

        parcel.write_parts(tmp_path / "out", "x.tar", write, part_mib=4096 / 2**20 if size > 10 else 1)
        assert len(list((tmp_path / "out").iterdir())) == count


PATIENT = (
    "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print('up', flush=True); time.sleep(60)"
)


@pytest.mark.parametrize(("script", "grace"), [(PATIENT, 30.0), (PATIENT.replace("sys.exit(75)", "0"), 0.5)])
def test_time_is_kept(tmp_path, monkeypatch, script, grace):
    """Asked to stop, a job ends as it likes; one that does not is killed. Both may go on later."""
    monkeypatch.setattr(parcel, "GRACE_SECONDS", grace)
    begin = time.monotonic()
    assert parcel.until(begin + 1, [sys.executable, "-c", script], tmp_path, dict(os.environ)) == EXIT_INTERRUPTED
    assert time.monotonic() - begin < 20


def test_packages_of_the_machine_are_found(tmp_path, monkeypatch):
    """Where they lie in a folder that PYTHONPATH names, as on a machine without network, the code comes before them."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere/site")
    (tmp_path / parcel.JOBS).write_text('{"jobs": [["seed=0"]], "commit": "abc", "done": []}')
    asked = {}
    monkeypatch.setattr(parcel, "until", lambda deadline, command, folder, environment: asked.update(environment) or 0)
    assert parcel.run(tmp_path, 60, tmp_path / "out", 15) == 0
    assert asked["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "src"), "/elsewhere/site"]
    assert asked["BITCYCLE_COMMIT"] == "abc"


def test_mistakes_are_said(tmp_path, home, capsys, monkeypatch):
    monkeypatch.chdir(home)
    with pytest.raises(SettingError, match="--job"):
        parcel.pack(home, tmp_path, [], [], tmp_path, 15)
    assert parcel.main(["pack", str(tmp_path / "p"), "--job", SMALL, "--data", "cifar11"]) == 2
    assert re.search(r"cifar11: is not below .*--data-root", capsys.readouterr().err)
    assert parcel.main(["pack", str(tmp_path / "p"), "--job", SMALL, "--part-mib", "0"]) == 2
    assert parcel.main(["run", "--minutes", "9", "--out", str(tmp_path)]) == 2
    assert "parcel.json" in capsys.readouterr().err
    (home / parcel.JOBS).write_text('{"jobs": [], "commit": null, "done": []}')
    assert parcel.main(["run", "--minutes", "1", "--out", str(tmp_path)]) == 2
    assert "leaves no time to train" in capsys.readouterr().err
    assert parcel.main(["unpack", "results.tar.01-of-01"]) == 1
    assert "is not there. Give the results.tar" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    for words in (["pack", str(tmp_path / "p"), "--job", SMALL], ["unpack", "results.tar.01-of-01"]):
        assert parcel.main(words) == 2
        assert "start this in the repository's root" in capsys.readouterr().err
