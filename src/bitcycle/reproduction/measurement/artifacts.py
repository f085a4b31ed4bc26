"""Result files that analyses write to run folders, and their collected copies in results/summary/analyses."""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitcycle.files import write_bytes, write_csv
from bitcycle.training.run_folder import RunFolder

Row = dict[str, Any]
IDENTITY = ("scale", "hash", "seed")
"""Fields that identify a run in its summary and in runs.csv."""
ANALYSES = "analyses"
"""Folder of the collected results, next to runs.csv."""
HEADER = "# "
CLEAN = "none"
"""Name of the unchanged data in the rows of a robustness test."""


@dataclass(frozen=True)
class Result:
    """Content of a result file: its header (kind, options, runs, units, done, columns, facts, made_with), and the rows of the
    units that are done, as text."""

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

    def is_of(self, kind: str, options: Mapping[str, Any]) -> bool:
        """Whether it is of a kind with these options; one that is missing, as it was added later, had its value."""
        if self.header.get("kind") != kind:
            return False
        return all(self.options.get(name, value) == value for name, value in options.items())

    def numbers(self, column: str) -> list[float]:
        """The values of a numeric column."""
        return [float(row[column]) for row in self.rows]


def read_result(path: Path) -> Result:
    """Read a result file; empty if it does not exist or is not a result file."""
    try:
        first, _, rest = path.read_text(encoding="utf-8").partition("\n")
        header = json.loads(first.removeprefix(HEADER))
    except (FileNotFoundError, ValueError):
        return Result()
    return Result(header, list(csv.DictReader(io.StringIO(rest))))


def write_result(path: Path, result: Result) -> None:
    """Write a result file atomically."""
    write_csv(path, result.header["columns"], result.rows, f"{HEADER}{json.dumps(result.header, sort_keys=True)}\n")


def copy_results(folder: RunFolder, row: Mapping[str, Any], target: Path) -> None:
    """Copy the complete results of a finished run, given its row in runs.csv, to the folder `target` as
    SCALE-HASH-SEED-KIND-DIGEST.csv."""
    for path in sorted(folder.analyses.glob("*.csv")):
        if read_result(path).complete:
            write_bytes(target / f"{run_name(row)}-{path.name}", path.read_bytes())


def run_name(row: Mapping[str, Any]) -> str:
    """Prefix of the file names of a run, from its row in runs.csv.

    >>> run_name({"scale": "mini", "hash": "0123456789", "seed": 2})
    'mini-0123456789-2'
    """
    return "-".join(str(row[name]) for name in IDENTITY)


def collected(folder: Path, row: Mapping[str, Any]) -> list[Result]:
    """The collected results of a run; a result about several runs belongs to the last of them."""
    return [read_result(path) for path in sorted(folder.glob(f"{run_name(row)}-*.csv"))]
