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
from tests.accelerator.covering import PARTS, RECORD, rows, trained
from tests.accelerator.pretended import start
from tests.settings import RESUME, run_of

COLUMNS = ("case", "error", "same", "steady", "waits")


def row_of(case: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """The record of an outcome: its error in one line, and the lines that waited."""
    error = (found["error"] or "").split("\n")[0]
    waits = "; ".join(sorted(found.get("found", {})))
    facts = {"same": found.get("same", ""), "steady": found.get("steady", ""), "waits": waits}
    return {"case": case, "error": error, **facts}


def row_of_pair(case: str, found: str | dict[str, int]) -> dict[str, Any]:
    """The same of a row of `covering`, which is not resumed."""
    return row_of(case, {"error": found} if isinstance(found, str) else {"error": "", "found": found})


def main(words: list[str]) -> None:
    """Run the chosen rows one after another."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    pairs = {row.name: row for part in range(PARTS) for row in rows(part)}
    recorded = {row["case"]: row for row in read_csv(RECORD, missing_ok=True)}
    start()
    for case in [*RESUME, *pairs]:
        if words and not any(word in case for word in words):
            continue
        if case in pairs:
            recorded[case] = row_of_pair(case, trained(pairs[case]))
        else:
            with tempfile.TemporaryDirectory() as folder:
                recorded[case] = row_of(case, outcome(run_of(case), Path(folder)))
        write_csv(RECORD, list(COLUMNS), [recorded[name] for name in [*RESUME, *pairs] if name in recorded])


if __name__ == "__main__":
    main(sys.argv[1:])
