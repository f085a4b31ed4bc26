"""Tables as CSV files: UTF-8, a line of headings, ends of lines as on Unix, written whole or not at all."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bitcycle.training.checkpoint import write_atomically


def as_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A table as text; cells that a row does not have are empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], first: str = "") -> None:
    """Write a table; its folder is made.

    Args:
        path: the file.
        columns: headings.
        rows: heading -> cell.
        first: a line before the headings.

    Raises:
        OSError: if it cannot be written; an old file is then still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda stream: stream.write((first + as_csv(columns, rows)).encode()))


def read_csv(path: Path, missing_ok: bool = False) -> list[dict[str, str]]:
    """The rows of a table; with `missing_ok` none if there is no file.

    Raises:
        FileNotFoundError: if there is no file.
    """
    if missing_ok and not path.exists():
        return []
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))
