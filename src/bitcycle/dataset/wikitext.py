"""WikiText-2 and WikiText-103 (Merity et al. 2016), and a small text made from the former's two small files.

wikitext2_small is a stand-in: it trains on the official validation file of WikiText-2; the first half of the articles of the
official test file validates, the second one tests. Its perplexities are comparable with nothing published.
"""

from __future__ import annotations

import logging
import shutil
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from bitcycle.dataset.text import Lines, TextDatasetOptions, TextSize
from bitcycle.dataset.text_files import find_split, find_text
from bitcycle.errors import DataError

logger = logging.getLogger(__name__)

SIZES = {
    "wikitext2": TextSize(train=2_088_628, validation=217_646, test=245_569, vocabulary=33_278),
    "wikitext103": TextSize(train=103_227_021, validation=217_646, test=245_569, vocabulary=267_735),
    "wikitext2_small": TextSize(train=217_646, validation=123_449, test=122_120, vocabulary=13_777),
}
HUB = "https://huggingface.co/datasets/Salesforce/wikitext/resolve/main"
SHARDS = {"wikitext2": ("wikitext-2-v1", 1), "wikitext103": ("wikitext-103-v1", 2)}
"""Folder on the hub, and number of files of the training split."""
SMALL_VALIDATION_LINES = 2226
"""Lines of WikiText-2's test file that validate in wikitext2_small; an article begins after them."""


@dataclass
class WikiText(TextDatasetOptions):
    """Options of WikiText-2 and WikiText-103."""

    name: str = "wikitext2"

    @property
    def size(self) -> TextSize:
        return SIZES[self.name]

    def _folders(self, data_root: Path) -> list[Path]:
        number = self.name.removeprefix("wikitext")
        return [data_root / name for name in (self.name, f"wikitext-{number}", f"wikitext-{number}-v1")]

    def read_lines(self, data_root: Path) -> Lines:
        folders = self._folders(data_root)
        found = find_text(folders)
        if found is None:
            self._download(folders[0])
            found = find_text(folders)
        assert found is not None, "all files were downloaded"
        return found

    def _download(self, folder: Path) -> None:
        """Fetch the parquet files of the hub; there is no other official source any more."""
        name, shards = SHARDS[self.name]
        files = [f"train-{i:05d}-of-{shards:05d}" for i in range(shards)]
        logger.info("%s is not under %s; downloading it from %s", self.name, folder.parent, HUB)
        try:
            for file in (*files, "validation-00000-of-00001", "test-00000-of-00001"):
                _fetch(f"{HUB}/{name}/{file}.parquet", folder / f"{file}.parquet")
        except OSError as error:
            raise DataError(
                f"{self.name} is not whole in {folder} and cannot be downloaded ({error}). Put wiki.train.tokens, "
                f"wiki.valid.tokens and wiki.test.tokens there (or train.txt, valid.txt and test.txt, or the hub's "
                f"Salesforce/wikitext {name} parquet files), or point data_root= (or BITCYCLE_DATA) at the folder that holds it."
            ) from error


def _fetch(address: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    try:
        with urllib.request.urlopen(address, timeout=20) as response, open(part, "wb") as stream:
            shutil.copyfileobj(response, stream)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()


@dataclass
class WikiTextSmall(TextDatasetOptions):
    """Options of the small stand-in for WikiText-2."""

    name: str = "wikitext2_small"

    @property
    def size(self) -> TextSize:
        return SIZES[self.name]

    def read_lines(self, data_root: Path) -> Lines:
        folders = [data_root / name for name in (self.name, "wikitext2-small")]
        found = find_text(folders) or self._made_of(WikiText()._folders(data_root))
        if found is None:
            raise DataError(
                f"wikitext2_small is not in {folders[0]}. Put train.txt, valid.txt and test.txt there, or the official files "
                f"of which it is made into {data_root / 'wikitext2'} (wiki.valid.tokens and "
                "wiki.test.tokens), or point data_root= (or BITCYCLE_DATA) at the folder that holds one of them."
            )
        return found

    def _made_of(self, folders: list[Path]) -> Lines | None:
        """The small text from the two small official files, if a folder has them."""
        for folder in folders:
            train, rest = find_split(folder, "valid"), find_split(folder, "test")
            if train is not None and rest is not None:
                lines = list(rest)
                return Lines(train, lines[:SMALL_VALIDATION_LINES], lines[SMALL_VALIDATION_LINES:])
        return None
