"""Texts by name: Penn Treebank, WikiText-2 and WikiText-103, a small proxy of the latter, and text of your own.

A text is three files of plain text, one paragraph a line, or parquet files in the layout of the hub's `Salesforce/wikitext`.

Penn Treebank is the preparation of Mikolov et al. 2011: 10,000 kinds of words, lower case, without punctuation. It is licensed by
the Linguistic Data Consortium (LDC99T42) and never downloaded. WikiText: Merity et al. 2016. wikitext2_small trains on the
validation file of WikiText-2; the first half of the articles of the test file validates, the second one tests: its perplexities
are comparable with nothing published.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bitcycle.dataset.base import missing
from bitcycle.dataset.hub import columns, has_parquet, load_hub
from bitcycle.dataset.text import Lines, TextDatasetOptions, TextSize, number_tokens
from bitcycle.errors import DataError
from bitcycle.settings import MISSING, setting

PATTERNS = ("ptb.{}.txt", "wiki.{}.tokens", "{}.txt")
"""Names of the files of a split: train, valid or test."""
SIZES = {
    "ptb": TextSize(train=929_589, validation=73_760, test=82_430, vocabulary=10_000),
    "wikitext2": TextSize(train=2_088_628, validation=217_646, test=245_569, vocabulary=33_278),
    "wikitext103": TextSize(train=103_227_021, validation=217_646, test=245_569, vocabulary=267_735),
    "wikitext2_small": TextSize(train=217_646, validation=123_449, test=122_120, vocabulary=13_777),
}
HUB = "Salesforce/wikitext"
SMALL_VALIDATION_LINES = 2226
"""Lines of WikiText-2's test file that validate in wikitext2_small; an article begins after them."""


class PlainText:
    """The lines of a file, read each time they are gone through."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[str]:
        try:
            with open(self.path, encoding="utf-8") as stream:
                yield from stream
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {self.path}: {error}. Fetch the file again.") from error


def find_text(folders: Sequence[Path], splits: Sequence[str] = ("train", "valid", "test")) -> list[PlainText] | None:
    """The files of plain text of all `splits` in the first folder that has them, if one has."""
    for folder in folders:
        names = ([folder / pattern.format(split) for pattern in PATTERNS] for split in splits)
        found = [next((path for path in paths if path.is_file()), None) for paths in names]
        if all(found):
            return [PlainText(path) for path in found if path is not None]
    return None


def hub_text(where: Path | str, subset: str | None, remedy: str) -> Lines:
    """The lines of a text in the hub's layout, a column `text` in three splits.

    Raises:
        DataError: if it cannot be loaded or lacks a split.
    """
    splits = load_hub(where, remedy, subset)
    if absent := {"train", "validation", "test"} - set(splits):
        raise DataError(f"{where} lacks the splits {', '.join(sorted(absent))}. {remedy}")
    return Lines(*(columns(splits[split], ["text"], where)[0] for split in ("train", "validation", "test")))


@dataclass
class OfficialText(TextDatasetOptions):
    """Options of a text whose sizes are known."""

    @property
    def size(self) -> TextSize:
        return SIZES[self.name]


@dataclass
class PennTreebank(OfficialText):
    """Options of Penn Treebank."""

    name: str = "ptb"

    def read_lines(self, data_root: Path) -> Lines:
        folders = [data_root / name for name in ("ptb", "penn", "penn-treebank", "ptb/data")]
        if found := find_text(folders):
            return Lines(*found)
        put = "ptb.train.txt, ptb.valid.txt and ptb.test.txt (Mikolov's preparation; licensed, so not downloaded)"
        raise missing(self.name, folders[0], put, " dataset=wikitext2_small is a small free text.")


@dataclass
class WikiText(OfficialText):
    """Options of WikiText-2 and WikiText-103."""

    name: str = "wikitext2"

    def read_lines(self, data_root: Path) -> Lines:
        subset = f"wikitext-{self.name.removeprefix('wikitext')}-v1"
        folders = [data_root / name for name in (self.name, subset.removesuffix("-v1"), subset)]
        if found := find_text(folders):
            return Lines(*found)
        folder = next((folder for folder in (*folders, data_root / HUB / subset) if has_parquet(folder)), None)
        put = f"wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, or the parquet files of the hub's {HUB} {subset},"
        return hub_text(folder or HUB, None if folder else subset, str(missing(self.name, folders[0], put)))


@dataclass
class WikiTextSmall(OfficialText):
    """Options of the small proxy of WikiText-2."""

    name: str = "wikitext2_small"

    def read_lines(self, data_root: Path) -> Lines:
        folders = [data_root / name for name in (self.name, "wikitext2-small")]
        if found := find_text(folders):
            return Lines(*found)
        official = [data_root / name for name in ("wikitext2", "wikitext-2", "wikitext-2-v1")]
        if made_of := find_text(official, ("valid", "test")):
            rest = list(made_of[1])
            return Lines(made_of[0], rest[:SMALL_VALIDATION_LINES], rest[SMALL_VALIDATION_LINES:])
        put = f"train.txt, valid.txt and test.txt, or WikiText-2's wiki.valid.tokens and wiki.test.tokens into {official[0]},"
        raise missing(self.name, folders[0], put)


@dataclass
class OwnText(TextDatasetOptions):
    """Options of text of your own; its sizes are read from the files."""

    name: str = "text"
    path: str = setting(
        MISSING, "folder with train.txt, valid.txt and test.txt, one paragraph a line, words between spaces"
    )

    @property
    def size(self) -> TextSize:
        return _size(tuple((text.path, text.path.stat().st_mtime_ns) for text in self._files()))

    def read_lines(self, data_root: Path) -> Lines:
        return Lines(*self._files())

    def _files(self) -> list[PlainText]:
        path = Path(self.path).expanduser()
        if found := find_text([path]):
            return found
        problem = "has no train.txt, valid.txt and test.txt" if path.is_dir() else "is not a folder"
        raise DataError(
            f"dataset.path={path} {problem}; put the three files there, one paragraph a line, words between spaces"
        )


@functools.lru_cache(maxsize=1)
def _size(files: tuple[tuple[Path, int], ...]) -> TextSize:
    """Sizes of files with their times of change; read once in a process as long as they do not change."""
    return number_tokens(Lines(*(PlainText(path) for path, _ in files))).size
