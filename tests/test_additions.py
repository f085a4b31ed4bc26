"""The worked diffs of docs/adding.md, applied together to a copy of the code: what they add is found, trained and judged."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bitcycle.reproduction.analysis.claims import read_claims
from bitcycle.reproduction.analysis.contrast import Pool
from bitcycle.reproduction.analysis.verdict import judge
from tests.conftest import ROOT

COPIED = (
    "src",
    "conf",
    "sweeps",
    "results/published",
    "results/summary",
    "results/manifest",
    "train.py",
    "tests/settings.py",
)
DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "adding.md").read_text(), re.DOTALL)


def files_of(diff: str) -> list[tuple[str, list[str]]]:
    """Path and lines of each file of a diff."""
    _, *parts = re.split(r"^\+\+\+ b/(.*)\n", diff, flags=re.MULTILINE)
    return [(path, lines.splitlines()) for path, lines in zip(parts[::2], parts[1::2])]


def apply(path: Path, lines: list[str]) -> None:
    """Lines with + follow those without, which are looked for in their order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.read_text().splitlines() if path.exists() else []
    place = 0
    for line in lines:
        if line.startswith("+"):
            old.insert(place, line[1:])
        else:
            place = old.index(line[1:], place)
        place += 1
    path.write_text("\n".join(old) + "\n")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The code with all additions."""
    folder = tmp_path_factory.mktemp("added")
    for name in COPIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.egg-info"))
        else:
            shutil.copy(ROOT / name, folder / name)
    for diff in DIFFS:
        for path, lines in files_of(diff):
            apply(folder / path, lines)
    return folder


DOCTEST_AND_TRAIN = """
import doctest, runpy
from bitcycle.quantizer import pot
assert not doctest.testmod(pot).failed
runpy.run_path("train.py", run_name="__main__")
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_so_many_files_are_touched():
    kinds = ("schedule", "quantizer", "model", "dataset", "cost model", "item", "claim")
    assert dict(zip(kinds, (len(files_of(diff)) for diff in DIFFS), strict=True)) == {
        "schedule": 2,
        "quantizer": 3,
        "model": 2,
        "dataset": 2,
        "cost model": 2,
        "item": 3,
        "claim": 1,
    }


def test_what_is_added_trains(copy):
    chosen = ("dataset=bars", "model=perceptron", "quantizer=pot", "schedule=halving", "hardware=serial")
    settings = ("scale=smoke", "training.steps=8", "training.log_steps=1", "training.evaluation_steps=8")
    run(copy, "-c", DOCTEST_AND_TRAIN, *chosen, *settings, f"results_root={copy}/runs")
    (metrics,) = (copy / "runs").rglob("metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["precision"][0] for record in records if record["kind"] == "train"] == [8, 8, 8, 8, 3, 3, 3, 3]
    cost = json.loads(metrics.with_name("summary.json").read_text())["cost"]["total"]
    assert cost["latency_s"] == pytest.approx(cost["gbitops"] / 1000)


def test_what_is_added_is_judged(copy):
    rows = [
        row
        for row in judge(read_claims(copy / "results" / "published"), {}, Pool([]))
        if row.claim_id == "cpt/table9-c1"
    ]
    assert [row.verdict for row in rows] == ["not tested at this scale"]
    assert "higher" in rows[0].predicate
