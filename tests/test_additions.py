"""CONTRIBUTING.md's worked diff of a schedule, applied to a copy of the code: it trains."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

from tests.conftest import ROOT


def test_a_schedule_is_added_in_two_files(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("conf", "sweeps", "train.py"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    diff = re.search(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[1]
    _, new, content, registry, lines = re.split(r"^\+\+\+ b/(.*)\n", diff, flags=re.MULTILINE)
    (tmp_path / new).write_text("".join(line[1:] + "\n" for line in content.splitlines()))
    first, _, preset = (line[1:] for line in lines.strip().splitlines())
    text = (
        (tmp_path / registry).read_text().replace("from typing import Any\n", f"from typing import Any\n{first}\n", 1)
    )
    (tmp_path / registry).write_text(text.replace("registry(\n    {\n", f"registry(\n    {{\n{preset}\n", 1))
    settings = ["dataset=digits", "model=resnet8", "scale=smoke", "schedule=halving", "training.steps=8"]
    done = subprocess.run(
        [sys.executable, "train.py", *settings, "training.log_steps=1", f"results_root={tmp_path}/runs"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (metrics,) = (tmp_path / "runs").rglob("metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    bits = [record["precision"][0] for record in records if record["kind"] == "train"]
    assert bits == [8, 8, 8, 8, 3, 3, 3, 3]
