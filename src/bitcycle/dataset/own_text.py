"""Text of your own: a folder with train.txt, valid.txt and test.txt."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from bitcycle.dataset.text import Lines, TextDatasetOptions, TextSize, number_tokens
from bitcycle.dataset.text_files import find_text
from bitcycle.errors import DataError
from bitcycle.settings import MISSING, setting


@functools.lru_cache(maxsize=1)
def _sizes(path: Path, changed: int) -> TextSize:
    """Sizes of a folder's files; read once in a process as long as they do not change."""
    return number_tokens(_find(path)).size


def _find(path: Path) -> Lines:
    found = find_text([path])
    if found is None:
        problem = "has no train.txt, valid.txt and test.txt" if path.is_dir() else "is not a folder"
        raise DataError(
            f"dataset.path={path} {problem}; put the three files there, one paragraph a line, words between spaces"
        )
    return found


@dataclass
class OwnText(TextDatasetOptions):
    """Options of text of your own; its sizes are read from the files."""

    name: str = "text"
    path: str = setting(
        MISSING, "folder with train.txt, valid.txt and test.txt, one paragraph a line, words between spaces"
    )

    @property
    def size(self) -> TextSize:
        path = Path(self.path).expanduser()
        files = _find(path)
        changed = max(file.stat().st_mtime_ns for split in files for file in split.paths)  # type: ignore[attr-defined]
        return _sizes(path, changed)

    def read_lines(self, data_root: Path) -> Lines:
        return _find(Path(self.path).expanduser())
