"""Does one sentence follow from the other? XNLI, SICK, and pairs of your own.

XNLI: 392,702 training pairs (MultiNLI, translated), 2,490 validation and 5,010 test pairs in each of 15 languages; Conneau et al.
2018. Looked for as the hub's `facebook/xnli`, a folder with parquet files for each language; else `datasets` gets it from there.
SICK: 4,439 + 495 + 4,906 English pairs; Marelli et al. 2014. A small proxy for XNLI; its numbers say nothing of XNLI's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from bitcycle.dataset.base import missing
from bitcycle.dataset.hub import has_parquet, load_hub
from bitcycle.dataset.sentence_pairs import Pairs, SentencePairOptions, read_pairs
from bitcycle.errors import DataError
from bitcycle.settings import MISSING, setting

LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
MULTILINGUAL_TOKENS = 119_547
"""Tokens of bert-base-multilingual-cased."""
HUB = "facebook/xnli"


@dataclass
class Xnli(SentencePairOptions):
    """Options of XNLI. Tokens are those of multilingual BERT, whose files have to be there."""

    name: str = "xnli"
    language: str = setting("de", "language of validation and test (released code: de)", choices=LANGUAGES)
    train_language: str = setting("de", "language of the training pairs (released code: de)", choices=LANGUAGES)
    tokenizer: Optional[str] = setting(
        "bert-base-multilingual-cased",
        "folder of a published tokenizer (tokenizer.json, or vocab.txt), absolute or below data_root; null: WordPiece trained on"
        " the training sentences",
    )
    vocabulary: int = setting(
        MULTILINGUAL_TOKENS, "numbers of tokens that the network has embeddings for, at most", minimum=100
    )

    def full_sizes(self, data_root: Path) -> tuple[int, int]:
        return 392_702, 5_010

    def read(self, data_root: Path, split: str) -> Pairs:
        language = self.train_language if split == "train" else self.language
        folders = [data_root / name / language for name in ("xnli", HUB, "nli/xnli")]
        folder = next((folder for folder in folders if has_parquet(folder)), None)
        put = "the parquet files of this language of the hub's facebook/xnli"
        remedy = str(missing(f"xnli in {language}", folders[0], put, " dataset=sick is a small proxy."))
        splits = load_hub(folder or HUB, remedy, None if folder else language)
        return read_pairs(splits, split, f"{folder or HUB}")


@dataclass
class SentencePairFolder(SentencePairOptions):
    """Options of sentence pairs of your own: a folder with train-*.parquet, validation-*.parquet and test-*.parquet."""

    name: str = "sentence_pairs"
    path: str = setting(MISSING, "the folder with the parquet files, absolute or below data_root")

    @property
    def remedy(self) -> str:
        """What to do where there are no files."""
        return (
            "give a folder with train-*.parquet, validation-*.parquet and test-*.parquet (premise, hypothesis, label)"
        )

    def full_sizes(self, data_root: Path) -> tuple[int, int]:
        splits = self._splits(data_root)
        return splits["train"].num_rows, splits["test"].num_rows

    def read(self, data_root: Path, split: str) -> Pairs:
        return read_pairs(self._splits(data_root), split, self.path)

    def _splits(self, data_root: Path) -> dict[str, Any]:
        folder = data_root / self.path
        splits = load_hub(folder, f"Remedy: {self.remedy}.") if has_parquet(folder) else {}
        if absent := [split for split in ("train", "validation", "test") if split not in splits]:
            raise DataError(f"there is no {absent[0]} split in {folder}: {self.remedy}.")
        return splits


@dataclass
class Sick(SentencePairFolder):
    """Options of SICK. With its own vocabulary the longest pair has 61 tokens."""

    name: str = "sick"
    path: str = setting("nli/sick", "the folder with the parquet files, absolute or below data_root")
    length: int = setting(64, "tokens of a pair; longer ones are cut, shorter ones padded", minimum=8)
    vocabulary: int = setting(4000, "numbers of tokens that the network has embeddings for, at most", minimum=100)
    lowercase: bool = setting(True, "a tokenizer that is trained, or read from vocab.txt, ignores case and accents")

    @property
    def remedy(self) -> str:
        return (
            "get SICK (Marelli et al. 2014, zenodo.org/records/2787612) and put its own train, trial and test sets there as "
            "train-*.parquet, validation-*.parquet and test-*.parquet with the columns premise, hypothesis and label (0 "
            "entailment, 1 neutral, 2 contradiction), or set dataset.path or data_root"
        )

    def full_sizes(self, data_root: Path) -> tuple[int, int]:
        return 4_439, 4_906
