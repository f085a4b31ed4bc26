"""Penn Treebank, the preparation of Mikolov et al. 2011: 10,000 kinds of words, lower case, without punctuation.

The text is licensed by the Linguistic Data Consortium and is never downloaded: it must be on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bitcycle.dataset.text import Lines, TextDatasetOptions, TextSize
from bitcycle.dataset.text_files import find_text
from bitcycle.errors import DataError

SIZE = TextSize(train=929_589, validation=73_760, test=82_430, vocabulary=10_000)


@dataclass
class PennTreebank(TextDatasetOptions):
    """Options of Penn Treebank."""

    name: str = "ptb"

    @property
    def size(self) -> TextSize:
        return SIZE

    def read_lines(self, data_root: Path) -> Lines:
        folders = [data_root / name for name in ("ptb", "penn", "penn-treebank", "ptb/data")]
        found = find_text(folders)
        if found is None:
            raise DataError(
                f"ptb is not in {folders[0]}. Penn Treebank is licensed by the Linguistic Data Consortium (LDC99T42) and not "
                "downloaded: put ptb.train.txt, ptb.valid.txt and ptb.test.txt (Mikolov's preparation of 10,000 words) there, "
                "or point data_root= (or BITCYCLE_DATA) at the folder that holds ptb/. dataset=wikitext2_small is a small free "
                "text."
            )
        return found
