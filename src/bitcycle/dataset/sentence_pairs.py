"""What every data set of sentence pairs has: three splits of text, and one sequence of tokens for each pair."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Optional

import torch
from torch import Tensor

from bitcycle.dataset.base import DatasetInfo, DatasetOptions, check_whole, fixed_order
from bitcycle.dataset.hub import columns
from bitcycle.dataset.tokens import TokenizerSetup, encode, find_tokenizer
from bitcycle.errors import DataError
from bitcycle.settings import setting
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
        shape = SentencePairShape(self.vocabulary, self.length, len(CLASSES))
        return self.limited(DatasetInfo(shape, *self.full_sizes(data_root)))

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
        tokens = {}
        for split, whole in pairs.items():
            limit = self.train_samples if split == "train" else self.test_samples
            chosen = fixed_order(len(whole.labels), limit).tolist()
            premises, hypotheses, labels = ([column[index] for index in chosen] for column in whole)
            tokens[split] = TokenPairs(*encode(tokenizer, premises, hypotheses, self.length), torch.tensor(labels))
        return tokens

    def _check(self, pairs: dict[str, Pairs], data_root: Path) -> None:
        sizes = len(pairs["train"].labels), len(pairs["test"].labels)
        check_whole(
            self.name, f"what is below {data_root}", "training and test pairs", sizes, self.full_sizes(data_root)
        )
        for split, found in pairs.items():
            if not found.labels or not 0 <= min(found.labels) <= max(found.labels) < len(CLASSES):
                raise DataError(
                    f"the {split} split of {self.name} has no pairs, or labels other than 0 to {len(CLASSES) - 1} "
                    f"({', '.join(CLASSES)}). Remove pairs without label, and number the labels in this order."
                )


def read_pairs(splits: dict[str, Any], split: str, origin: object) -> Pairs:
    """Pairs of a split that `datasets` has loaded, with the columns premise, hypothesis and label.

    Raises:
        DataError: if there is no such split, or it lacks a column or a value.
    """
    if split not in splits:
        raise DataError(f"{origin} has the splits {', '.join(splits)}, not {split}. Complete it.")
    pairs = Pairs(*columns(splits[split], ("premise", "hypothesis", "label"), origin))
    if any(value is None for column in pairs for value in column):
        raise DataError(f"the {split} split of {origin} has pairs that lack a sentence or a label. Remove them.")
    return pairs
