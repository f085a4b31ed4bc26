"""Find and read the three files of a text: plain text, one line a paragraph, or parquet files with a column `text`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitcycle.dataset.text import Lines
from bitcycle.errors import DataError

PATTERNS = ("ptb.{}.txt", "wiki.{}.tokens", "{}.txt")
"""Names of the files of a split, in which valid stands for the validation split."""


@dataclass(frozen=True)
class TextFile:
    """A file of plain text, or the parquet files of a split, whose lines can be gone through."""

    paths: tuple[Path, ...]

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            yield from (_parquet_lines if path.suffix == ".parquet" else _plain_lines)(path)


def find_text(folders: Sequence[Path]) -> Lines | None:
    """The three splits of the first folder that has all of them, if one has."""
    for folder in folders:
        splits = [find_split(folder, name) for name in ("train", "valid", "test")]
        if folder.is_dir() and all(splits):
            return Lines(*splits)  # type: ignore[arg-type]
    return None


def find_split(folder: Path, name: str) -> TextFile | None:
    """The file of a split (train, valid or test) in a folder."""
    for pattern in PATTERNS:
        if (path := folder / pattern.format(name)).is_file():
            return TextFile((path,))
    for stem in ("validation", "valid") if name == "valid" else (name,):
        files = sorted(path for path in folder.rglob("*.parquet") if path.name.startswith((f"{stem}-", f"{stem}.")))
        if files:
            return TextFile(tuple(files))
    return None


def _plain_lines(path: Path) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8") as stream:
            yield from stream
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}. Fetch the file again.") from error


def _parquet_lines(path: Path) -> Iterator[str]:
    import pyarrow.parquet as parquet

    try:
        column: Any = parquet.read_table(path, columns=["text"])["text"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"cannot read the column `text` of {path}: {error}. Fetch the file again.") from error
    for chunk in column.chunks:
        yield from chunk.to_pylist()
