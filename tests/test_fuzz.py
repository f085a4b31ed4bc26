"""The fuzzer itself."""

import csv
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import fuzz
from tests.conftest import ROOT


def test_goes_on_from_its_record(tmp_path, monkeypatch):
    """Recorded runs count and are not tried again, unless their row has been deleted."""
    record = tmp_path / "fuzz.csv"

    def numbers(kills):
        monkeypatch.setattr(sys, "argv", ["fuzz", "--kills", str(kills), "--record", str(record)])
        assert fuzz.main() == 0
        return [case.number for case in fuzz.read_record(record)]

    def killed_twice(number, seed, folder):
        return fuzz.Case(number, "drawn", "classification", "CR", "sbm", seed, kills=2, resumed=1)

    monkeypatch.setattr(fuzz, "fuzz_run", killed_twice)
    monkeypatch.setattr(fuzz, "ProcessPoolExecutor", lambda jobs, mp_context: ThreadPoolExecutor(jobs))
    monkeypatch.setattr(fuzz, "preload", lambda: None)
    monkeypatch.setattr(fuzz, "MAKERS", {})
    assert numbers(5) == [0, 1, 2]
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(lines[:2] + lines[3:]))
    assert numbers(8) == [0, 2, 1, 3]
    assert numbers(8) == [0, 2, 1, 3]


@pytest.mark.slow
def test_a_few_kills(tmp_path):
    command = [sys.executable, "-m", "tests.fuzz", "--kills", "3", "--record", str(tmp_path / "fuzz.csv")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    with open(tmp_path / "fuzz.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert sum(int(row["kills"]) for row in rows) >= 3
    assert {row["outcome"] for row in rows} == {"equal"}
