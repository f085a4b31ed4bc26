"""The fuzzer itself."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_a_few_kills(tmp_path):
    command = [sys.executable, "-m", "tests.fuzz", "--kills", "3", "--record", str(tmp_path / "fuzz.csv")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    with open(tmp_path / "fuzz.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert sum(int(row["kills"]) for row in rows) >= 3
    assert {row["outcome"] for row in rows} == {"equal"}
