"""Offline bundles: runs that continue on another machine and come back, as if they had stayed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile

import pytest

from bitcycle.errors import RunError
from bitcycle.sweep import offline_bundle as bundle
from bitcycle.training.run import execute
from bitcycle.training.run_folder import RunFolder, read_json
from tests.conftest import ROOT
from tests.training.test_resume import Crash, assert_equal, crash_at, result

SMALL = ("dataset=digits", "model=resnet8", "scale=smoke", "seed=0")


def opened(file, folder):
    with tarfile.open(file) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.fixture
def home(tmp_path):
    """A repository with its code and no runs."""
    root = tmp_path / "home"
    for name in bundle.CODE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        root.mkdir(exist_ok=True)
        copy(ROOT / name, root / name)
    return root


def test_a_run_that_was_cut_off_continues_elsewhere_and_comes_back(
    home, digits, finished_digits, monkeypatch, tmp_path
):
    """The whole way: a crash here, the rest of the run in the unpacked bundle, its results here; equal to an undisturbed run."""
    runs = home / bundle.RUNS
    cut = digits(f"results_root={runs}")
    with monkeypatch.context() as patch:
        crash_at(patch, 40, 30)
        with pytest.raises(Crash):
            execute(cut)
    (tmp_path / "data" / "nli" / "sick").mkdir(parents=True)
    bundle.pack(home, tmp_path / "bundle.tar", ["nli/sick"], tmp_path / "data")

    there = opened(tmp_path / "bundle.tar", tmp_path / "there")
    command = [sys.executable, "train.py", *SMALL]
    environment = {**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1", "BITCYCLE_COMMIT": "abc"}
    done = subprocess.run(command, cwd=there, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (there / "data" / "nli" / "sick").is_dir()

    packed(there / bundle.RUNS, there / "out.tar")
    name = str(cut.folder.path.relative_to(runs))
    [said] = bundle.unpack(there / "out.tar", runs).items()
    assert said[0] == name and said[1].startswith("done, step")
    assert "resuming after step 30" in cut.folder.log.read_text()
    assert_equal(result(cut.folder), result(finished_digits().folder))
    assert read_json(cut.folder.environment)["commit"] == "abc"
    assert bundle.unpack(there / "out.tar", runs) == {name: "is as far here"}


def status(root, state, step, name="smoke/a/seed=0"):
    folder = RunFolder(root / name)
    folder.path.mkdir(parents=True)
    folder.write_status(state, step, 100)
    if state == "done":
        folder.write(folder.summary, {"step": step})
    else:
        folder.checkpoint.save({"step": step})
    return folder


def packed(root, file):
    with tarfile.open(file, "w") as tar:
        tar.add(root, ".")
    return file


def test_of_finished_runs_only_the_names_are_packed(home, tmp_path):
    status(home / bundle.RUNS, "done", 100).metrics.write_text("{}")
    unfinished = status(home / bundle.RUNS, "failed", 3, "mini/b/seed=0")
    unfinished.checkpoint.save({"step": 4})
    (unfinished.path / ".lock").touch()
    bundle.pack(home, tmp_path / "bundle.tar", [], tmp_path)
    there = opened(tmp_path / "bundle.tar", tmp_path / "there")
    found = {str(path.relative_to(there / bundle.RUNS)) for path in (there / bundle.RUNS).rglob("*") if path.is_file()}
    assert found == {
        *("smoke/a/seed=0/status.json", "smoke/a/seed=0/summary.json"),
        *("mini/b/seed=0/status.json", "mini/b/seed=0/checkpoint/last.pt"),
    }
    assert not list(there.rglob("__pycache__"))


@pytest.mark.parametrize(
    ("ours", "theirs", "said", "step"),
    [
        (("failed", 10), ("failed", 20), "resumable, step 20", 20),
        (("failed", 20), ("failed", 10), "is as far here", 20),
        (("failed", 20), ("done", 100), "done, step 100", 100),
        (("done", 100), ("failed", 50), "is as far here", 100),
        (None, ("failed", 5), "resumable, step 5", 5),
    ],
)
def test_what_comes_back_replaces_what_is_less_far(tmp_path, ours, theirs, said, step):
    here, there = tmp_path / "here", tmp_path / "there"
    if ours:
        status(here, *ours)
    status(there, *theirs)
    assert bundle.unpack(packed(there, tmp_path / "out.tar"), here) == {"smoke/a/seed=0": said}
    assert RunFolder(here / "smoke/a/seed=0").read_status()["step"] == step
    assert [path.name for path in here.iterdir()] == ["smoke"]


def test_a_run_that_is_trained_here_is_not_replaced(tmp_path):
    status(tmp_path / "there", "done", 100)
    ours = status(tmp_path / "here", "failed", 10)
    with ours.lock(), pytest.raises(RunError, match=r"a process trains .*seed=0 here"):
        bundle.unpack(packed(tmp_path / "there", tmp_path / "out.tar"), tmp_path / "here")


def test_mistakes_are_said(tmp_path, home, capsys, monkeypatch):
    monkeypatch.chdir(home)
    target = str(tmp_path / "bundle.tar")
    for words, code, said in (
        (["pack", target, "--data", "cifar11"], 2, "cifar11: is not below .*--data-root|cifar11"),
        (["unpack", "results.tar"], 1, "Fetch it again"),
    ):
        assert bundle.main(words) == code
        assert re.search(said, capsys.readouterr().err)
    monkeypatch.chdir(tmp_path)
    assert bundle.main(["pack", target]) == 2
    assert "start this in the repository's root" in capsys.readouterr().err
