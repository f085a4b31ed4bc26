"""Record what each row of the settings does on the pretended accelerator: `python -m tests.accelerator.record [WORD ...]`.

Words choose the rows whose names contain one of them; rows of an earlier record are replaced.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bitcycle.files import read_csv, write_csv
from tests.accelerator.case import outcome
from tests.conftest import ROOT
from tests.settings import RESUME, run_of

RECORD = ROOT / "results" / "summary" / "accelerator.csv"
COLUMNS = ("case", "error", "same", "steady", "waits")


def row_of(case: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """The record of an outcome: its error in one line, and the lines that waited."""
    error = (found["error"] or "").split("\n")[0]
    waits = "; ".join(sorted(found.get("found", {})))
    return {
        "case": case,
        "error": error,
        "same": found.get("same", ""),
        "steady": found.get("steady", 0),
        "waits": waits,
    }


def main(words: list[str]) -> None:
    """Run the chosen rows one after another."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    rows = {row["case"]: row for row in read_csv(RECORD)} if RECORD.exists() else {}
    for case in RESUME:
        if words and not any(word in case for word in words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows[case] = row_of(case, outcome(run_of(case), Path(folder)))
        write_csv(RECORD, list(COLUMNS), [rows[name] for name in RESUME if name in rows])


if __name__ == "__main__":
    main(sys.argv[1:])
