"""What every data set of sentence pairs has: three splits of text, and one sequence of tokens for each pair."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Optional

import pyarrow.parquet as parquet
import torch
from torch import Tensor

from bitcycle.dataset.base import DatasetInfo, DatasetOptions
from bitcycle.dataset.tokens import TokenizerSetup, encode, find_tokenizer
from bitcycle.errors import DataError
from bitcycle.settings import SettingError, setting
from bitcycle.shapes import SentencePairShape

CLASSES = ("entailment", "neutral", "contradiction")
SPLITS = ("train", "validation", "test")


class Pairs(NamedTuple):
    """Sentence pairs as text; labels are 0 entailment, 1 neutral, 2 contradiction."""

    premises: list[str]
    hypotheses: list[str]
    labels: list[int]


class TokenPairs(NamedTuple):
    """Sentence pairs as `[CLS] premise [SEP] hypothesis [SEP]` and padding, of the same length each.

    Attributes:
        ids: [N, T] int32, token numbers; 0 is padding.
        segments: [N, T] uint8, 1 for the hypothesis and the [SEP] after it.
        lengths: [N], tokens that are no padding.
        labels: [N].
    """

    ids: Tensor
    segments: Tensor
    lengths: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> TokenPairs:
        """The same on a device."""
        return TokenPairs(*(part.to(device) for part in self))


@dataclass
class SentencePairOptions(DatasetOptions):
    """Options that every data set of sentence pairs has."""

    has_validation: ClassVar[bool] = True

    length: int = setting(
        128, "tokens of a pair; longer ones are cut, shorter ones padded (Better Schedules' code: 128)", minimum=8
    )
    tokenizer: Optional[str] = setting(
        None,
        "folder of a published tokenizer (tokenizer.json, or vocab.txt), absolute or below data_root; null: WordPiece trained on"
        " the training sentences",
    )
    vocabulary: int = setting(8000, "numbers of tokens that the network has embeddings for, at most", minimum=100)
    lowercase: bool = setting(False, "a tokenizer that is trained, or read from vocab.txt, ignores case and accents")

    def full_sizes(self, data_root: Path) -> tuple[int, int]:
        """Pairs of the whole training and test split."""
        raise NotImplementedError

    def read(self, data_root: Path, split: str) -> Pairs:
        """All pairs of a split.

        Raises:
            DataError: if the data are missing or cannot be read.
        """
        raise NotImplementedError

    def info(self, data_root: Path) -> DatasetInfo:
        if self.validation:
            problem = f"{self.name} comes with validation data"
            raise SettingError("validation", self.validation, problem, "use null, or 0 for no validation")
        sizes = []
        full = self.full_sizes(data_root)
        for option, available in zip(("train_samples", "test_samples"), full):
            wanted = getattr(self, option)
            if wanted is not None and wanted > available:
                remedy = f"use at most {available}, or null for all"
                raise SettingError(option, wanted, f"{self.name} has only {available}", remedy)
            sizes.append(wanted or available)
        return DatasetInfo(SentencePairShape(self.vocabulary, self.length, len(CLASSES)), *sizes)

    def load(self, data_root: Path) -> dict[str, TokenPairs]:
        """The splits that are used, as tokens: train, test, and unless switched off validation.

        Raises:
            DataError: if data or tokenizer are missing or do not fit.
        """
        pairs = {
            split: self.read(data_root, split) for split in SPLITS if split != "validation" or self.validation != 0
        }
        self._check(pairs, data_root)
        setup = TokenizerSetup(
            folder=None if self.tokenizer is None else data_root / self.tokenizer,
            vocabulary=self.vocabulary,
            lowercase=self.lowercase,
        )
        tokenizer = find_tokenizer(setup, pairs["train"].premises + pairs["train"].hypotheses)
        limits = {"train": self.train_samples, "validation": self.test_samples, "test": self.test_samples}
        return {
            split: TokenPairs(*encode(tokenizer, chosen.premises, chosen.hypotheses, self.length), _labels(chosen))
            for split, chosen in ((split, _first(found, limits[split])) for split, found in pairs.items())
        }

    def _check(self, pairs: dict[str, Pairs], data_root: Path) -> None:
        sizes = len(pairs["train"].labels), len(pairs["test"].labels)
        expected = self.full_sizes(data_root)
        if sizes != expected:
            raise DataError(
                f"{self.name} as found has {sizes[0]} training and {sizes[1]} test pairs instead of {expected[0]} and "
                f"{expected[1]}. Fetch it again, or use dataset=sentence_pairs for pairs of your own."
            )
        for split, found in pairs.items():
            if not found.labels or not 0 <= min(found.labels) <= max(found.labels) < len(CLASSES):
                raise DataError(
                    f"the {split} split of {self.name} has no pairs, or labels other than 0 to {len(CLASSES) - 1} "
                    f"({', '.join(CLASSES)}). Remove pairs without label, and number the labels in this order."
                )


def _labels(pairs: Pairs) -> Tensor:
    return torch.tensor(pairs.labels)


def _first(pairs: Pairs, count: int | None) -> Pairs:
    """The first `count` pairs of an order that is random but the same for every run."""
    if count is None or count >= len(pairs.labels):
        return pairs
    order = torch.randperm(len(pairs.labels), generator=torch.Generator().manual_seed(0))[:count].tolist()
    return Pairs(*([column[index] for index in order] for column in pairs))


def split_files(folder: Path, split: str) -> list[Path]:
    """The parquet files of a split: those named after it, as train-00000-of-00001.parquet, or in a folder of its name."""
    names = (f"{split}-", f"{split}.")
    return [
        path for path in sorted(folder.rglob("*.parquet")) if path.name.startswith(names) or path.parent.name == split
    ]


def read_pairs(files: list[Path]) -> Pairs:
    """Pairs of parquet files with the columns premise, hypothesis and label.

    Raises:
        DataError: if one cannot be read or lacks a column.
    """
    pairs = Pairs([], [], [])
    for file in files:
        try:
            table = parquet.read_table(file, columns=["premise", "hypothesis", "label"])
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"cannot read premise, hypothesis and label from {file}: {error}. Fetch it again."
            ) from error
        for column, name in zip(pairs, ("premise", "hypothesis", "label")):
            column += table[name].to_pylist()
    if any(value is None for column in pairs for value in column):
        raise DataError(f"{files[0].parent} has pairs that lack a sentence or a label. Remove them.")
    return pairs


def count_pairs(files: list[Path]) -> int:
    """How many pairs parquet files hold, from what they say at their end.

    Raises:
        DataError: if one cannot be read.
    """
    try:
        return sum(parquet.read_metadata(file).num_rows for file in files)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {files[0].parent}: {error}. Fetch it again.") from error
