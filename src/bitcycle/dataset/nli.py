"""Does one sentence follow from the other? XNLI, SICK, and pairs of your own.

XNLI: 392,702 training pairs (MultiNLI, translated), 2,490 validation and 5,010 test pairs in each of 15 languages; Conneau et al.
2018. Looked for as the hub's `facebook/xnli`: a folder for each language with train-*.parquet, validation-* and test-*.
SICK: 4,439 + 495 + 4,906 English pairs; Marelli et al. 2014. A small stand-in for XNLI; its numbers say nothing of XNLI's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from bitcycle.dataset.fetch import fetch
from bitcycle.dataset.sentence_pairs import Pairs, SentencePairOptions, count_pairs, read_pairs, split_files
from bitcycle.errors import DataError
from bitcycle.settings import MISSING, setting

XNLI_SIZES, SICK_SIZES = (392_702, 5_010), (4_439, 4_906)
LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
MULTILINGUAL_TOKENS = 119_547
"""Tokens of bert-base-multilingual-cased."""
HUB = "https://huggingface.co/datasets/facebook/xnli/resolve/main"


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
        return XNLI_SIZES

    def read(self, data_root: Path, split: str) -> Pairs:
        language = self.train_language if split == "train" else self.language
        for folder in (data_root / "xnli", data_root / "facebook" / "xnli", data_root / "nli" / "xnli"):
            if files := split_files(folder / language, split):
                return read_pairs(files)
        name = f"{language}/{split}-00000-of-00001.parquet"
        remedy = (
            f"Put the hub's facebook/xnli there (a folder {language} with train-*.parquet, validation-*.parquet and "
            "test-*.parquet), or point data_root= (or BITCYCLE_DATA) at the folder that holds it. dataset=sick is a small "
            "stand-in."
        )
        return read_pairs([fetch(f"{HUB}/{name}", data_root / "xnli" / name, remedy)])


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
        return count_pairs(self._files(data_root, "train")), count_pairs(self._files(data_root, "test"))

    def read(self, data_root: Path, split: str) -> Pairs:
        return read_pairs(self._files(data_root, split))

    def _files(self, data_root: Path, split: str) -> list[Path]:
        folder = data_root / self.path
        if files := split_files(folder, split):
            return files
        raise DataError(f"there is no {split} split in {folder}: {self.remedy}.")


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
        return SICK_SIZES
