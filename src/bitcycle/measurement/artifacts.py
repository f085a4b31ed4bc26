"""The files of results that analyses leave in run folders, and what was collected of them: results/summary/analyses."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitcycle.csv_files import write_csv
from bitcycle.training.checkpoint import write_atomically
from bitcycle.training.run_folder import RunFolder

Row = dict[str, Any]
ANALYSES = "analyses"
"""Folder of the collected results, beside runs.csv."""
HEADER = "# "
CLEAN = "none"
"""What rows of a test of robustness call the data as they are."""


@dataclass(frozen=True)
class Result:
    """What the file of an analysis says.

    Attributes:
        header: kind, options, runs, units, done, columns, facts, made_with.
        rows: of the units that are done, as text.
    """

    header: Row = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every unit is done."""
        return bool(self.header) and self.header["done"] == self.header["units"]

    @property
    def options(self) -> Row:
        """Options of the analysis."""
        return dict(self.header["options"])

    def numbers(self, column: str) -> list[float]:
        """A column of numbers."""
        return [float(row[column]) for row in self.rows]


def read_result(path: Path) -> Result:
    """The content of a file of results; empty if there is none, or it is none of ours."""
    if not path.exists():
        return Result()
    first, _, rest = path.read_text().partition("\n")
    try:
        header = json.loads(first.removeprefix(HEADER))
    except json.JSONDecodeError:
        return Result()
    return Result(header, list(csv.DictReader(io.StringIO(rest))))


def write_result(path: Path, result: Result) -> None:
    """Write a file of results whole or not at all."""
    write_csv(path, result.header["columns"], result.rows, f"{HEADER}{json.dumps(result.header, sort_keys=True)}\n")


def copy_results(folder: RunFolder, row: Mapping[str, Any], target: Path) -> list[Path]:
    """Copy the complete results of a run folder to the folder `target`; returns the copies.

    Args:
        folder: of a finished run.
        row: its row in runs.csv, which names the copies: SCALE-HASH-SEED-KIND-DIGEST.csv.
        target: where to.
    """
    copies = []
    for path in sorted(folder.analyses.glob("*.csv")):
        if read_result(path).complete:
            target.mkdir(parents=True, exist_ok=True)
            copies.append(target / f"{run_name(row)}-{path.name}")
            write_atomically(copies[-1], lambda stream, path=path: stream.write(path.read_bytes()))
    return copies


def run_name(row: Mapping[str, Any]) -> str:
    """What the files of a run begin with, from its row in runs.csv.

    >>> run_name({"scale": "mini", "hash": "0123456789", "seed": 2})
    'mini-0123456789-2'
    """
    return f"{row['scale']}-{row['hash']}-{row['seed']}"


def collected(folder: Path, row: Mapping[str, Any]) -> list[Result]:
    """The results of a run that were collected in a folder; those of several runs are with the last of these."""
    return [read_result(path) for path in sorted(folder.glob(f"{run_name(row)}-*.csv"))]
