"""Text as one long sequence of numbered tokens: words between spaces, and <eos> at the end of each line.

Words are numbered by the training file alone, in the order of their first occurrence, or by how often they occur; words of the
other files that it lacks become <unk>. Official files have been prepared so that there are none.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from bitcycle.dataset.base import DatasetInfo, DatasetOptions, check_whole
from bitcycle.settings import SettingError, setting
from bitcycle.shapes import TokenShape

END, UNKNOWN = "<eos>", "<unk>"
PIECE = 35
"""Tokens that train_samples and test_samples count as one sample; the papers' time steps on Penn Treebank."""


class TextSize(NamedTuple):
    """Tokens of the three files, <eos> included, and different ones in the training file."""

    train: int
    validation: int
    test: int
    vocabulary: int


class Text(NamedTuple):
    """Three splits as token numbers, int64 [tokens], and the tokens by number."""

    train: Tensor
    validation: Tensor
    test: Tensor
    vocabulary: tuple[str, ...]

    @property
    def size(self) -> TextSize:
        """How many tokens there are."""
        return TextSize(len(self.train), len(self.validation), len(self.test), len(self.vocabulary))


class Lines(NamedTuple):
    """The lines of the three files."""

    train: Iterable[str]
    validation: Iterable[str]
    test: Iterable[str]


def number_tokens(lines: Lines, by_frequency: bool = False) -> Text:
    """The tokens of three files as numbers.

    >>> text = number_tokens(Lines(["a b a"], ["b c"], ["a"]))
    >>> text.vocabulary, text.train.tolist(), text.validation.tolist()
    (('a', 'b', '<eos>', '<unk>'), [0, 1, 0, 2], [1, 3, 2])

    Args:
        lines: of the files.
        by_frequency: number 0 is the most frequent token of the training file, equal ones in the order of occurrence; else the
            first token is.
    """
    numbers: dict[str, int] = {}
    train = array("i")
    for line in lines.train:
        train.extend(numbers.setdefault(word, len(numbers)) for word in (*line.split(), END))
    numbers.setdefault(UNKNOWN, len(numbers))
    unknown = numbers[UNKNOWN]

    def known(lines: Iterable[str]) -> Tensor:
        tokens = array("i")
        for line in lines:
            tokens.extend(numbers.get(word, unknown) for word in (*line.split(), END))
        return _tensor(tokens)

    text = Text(_tensor(train), known(lines.validation), known(lines.test), tuple(numbers))
    return _by_frequency(text) if by_frequency else text


def _tensor(tokens: array[int]) -> Tensor:
    return torch.frombuffer(tokens, dtype=torch.int32).long() if tokens else torch.zeros(0, dtype=torch.int64)


def _by_frequency(text: Text) -> Text:
    order = text.train.bincount(minlength=len(text.vocabulary)).argsort(descending=True, stable=True)
    renumbered = torch.empty_like(order)
    renumbered[order] = torch.arange(len(order))
    vocabulary = tuple(text.vocabulary[number] for number in order.tolist())
    return Text(renumbered[text.train], renumbered[text.validation], renumbered[text.test], vocabulary)


@dataclass
class TextDatasetOptions(DatasetOptions):
    """Options that every data set for language modelling has."""

    has_validation = True

    train_samples: Optional[int] = setting(
        None, f"train on the first so many pieces of {PIECE} tokens only; null: all", minimum=1
    )
    test_samples: Optional[int] = setting(
        None, f"evaluate on the first so many pieces of {PIECE} tokens only; null: all", minimum=1
    )
    order: str = setting(
        "occurrence",
        "numbers of the tokens: by their first occurrence in the training file, or by frequency, which adaptive softmax needs",
        choices=("occurrence", "frequency"),
    )

    @property
    def size(self) -> TextSize:
        """Sizes of the official data set."""
        raise NotImplementedError

    def read_lines(self, data_root: Path) -> Lines:
        """The lines of the three files.

        Raises:
            DataError: if they are missing or cannot be read; says what to put where.
        """
        raise NotImplementedError

    def info(self, data_root: Path) -> DatasetInfo:
        """Sizes after train_samples and test_samples, in tokens; the vocabulary is always the whole one."""
        size = self.size
        for option, available in (("train_samples", size.train), ("test_samples", size.test)):
            wanted = getattr(self, option)
            if wanted is not None and wanted * PIECE > available:
                problem = f"{self.name} has only {available // PIECE} pieces of {PIECE} tokens"
                raise SettingError(option, wanted, problem, f"use at most {available // PIECE}, or null for all")
        return DatasetInfo(
            TokenShape(size.vocabulary), _kept(size.train, self.train_samples), _kept(size.test, self.test_samples)
        )

    def load(self, data_root: Path) -> Text:
        """The tokens that are used.

        Raises:
            DataError: if they are missing, or are not those of the official data set.
        """
        text = number_tokens(self.read_lines(data_root), self.order == "frequency")
        what = "training, validation and test tokens and kinds of them"
        check_whole(self.name, f"what is below {data_root}", what, text.size, self.size)
        train, test = self.train_samples, self.test_samples
        parts = [part[: _kept(len(part), limit)] for part, limit in zip(text[:3], (train, test, test), strict=True)]
        return Text(parts[0], parts[1], parts[2], text.vocabulary)


def _kept(tokens: int, pieces: int | None) -> int:
    return tokens if pieces is None else min(tokens, pieces * PIECE)
