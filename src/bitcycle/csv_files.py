"""Tables as CSV files: UTF-8, a header line, Unix line endings, written atomically."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bitcycle.files import write_atomically


def as_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A table as text; missing cells are empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], first: str = "") -> None:
    """Write a table, creating its folder. `first` is a line before the header. Raises OSError if it cannot be written; an
    existing file is then unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda stream: stream.write((first + as_csv(columns, rows)).encode()))


def read_csv(path: Path, missing_ok: bool = False) -> list[dict[str, str]]:
    """The rows of a table; with `missing_ok`, an empty list if there is no file. Raises FileNotFoundError if there is no file."""
    if missing_ok and not path.exists():
        return []
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))
