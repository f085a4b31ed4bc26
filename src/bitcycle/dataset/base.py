"""What every data set provides, whatever its kind: what it holds, known without reading it where that is possible."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import PickleError
from typing import Any, ClassVar, Generic, NamedTuple, Optional, TypeVar
from zipfile import BadZipFile

import torch
from torch import Tensor

from bitcycle.errors import DataError
from bitcycle.settings import MISSING, SettingError, Settings, setting
from bitcycle.shapes import Shape

logger = logging.getLogger(__name__)

S = TypeVar("S")

UNREADABLE = (OSError, ValueError, LookupError, TypeError, RuntimeError, EOFError, BadZipFile, PickleError)
"""What a library may raise that reads a damaged file."""


class DatasetInfo(NamedTuple):
    """What a data set asks of a network, and the sizes of its splits in samples.

    A sample is what the data set counts: an image, a graph's node, a token, a pair of sentences, a user's rating, an utterance.
    """

    shape: Shape
    train_samples: int
    test_samples: int


class Splits(NamedTuple, Generic[S]):
    """Samples to train on, to test on, and to choose by (None: there are none)."""

    train: S
    test: S
    validation: S | None = None


def permutation(samples: int, seed: int = 0) -> Tensor:
    """The numbers 0 .. samples-1 in an order that follows from the seed."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed))


def fixed_order(samples: int, count: int | None = None) -> Tensor:
    """The first `count` of 0 .. samples-1 in an order that is the same for every run; all, ascending, if there are no more."""
    return torch.arange(samples) if count is None or count >= samples else permutation(samples)[:count]


def first_samples(samples: Sequence[S], count: int | None) -> list[S]:
    """The first `count` samples in `fixed_order`."""
    return [samples[index] for index in fixed_order(len(samples), count).tolist()]


def validation_size(samples: int, share: float | None) -> int:
    """How many of `samples` training samples are held out: round(share * samples), at least one if share is above 0."""
    return max(1, round(share * samples)) if share else 0


def missing(name: str, folder: Path, put: str, more: str = "") -> DataError:
    """The error of a data set that is not on disk: what to put where, and what else may help."""
    return DataError(
        f"{name} is not in {folder}. Put {put} there, or point data_root= (or BITCYCLE_DATA) at the folder that holds it.{more}"
    )


def check_whole(name: str, origin: object, what: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Refuse anything but the whole data set.

    Raises:
        DataError: if the numbers of `what` that were found are not those expected.
    """
    if tuple(found) != tuple(expected):
        numbers, official = (", ".join(map(str, sizes)) for sizes in (found, expected))
        remedy = "Fetch it again, or point data_root= (or BITCYCLE_DATA) at the whole one"
        raise DataError(f"{origin} holds {numbers} {what}; the whole {name} has {official}. {remedy}.")


@dataclass
class DatasetOptions(Settings):
    """Options that every data set has; a kind of data (images, text, graphs, ...) derives a class with its own from this."""

    has_validation: ClassVar[bool] = False
    """Whether the data set comes with a split for choosing, so that nothing needs to be held out of the training data."""
    takes_all_if_fewer: ClassVar[bool] = False
    """Whether train_samples and test_samples may be more than there are, as `scale=smoke` asks for."""

    samples_of_one: ClassVar[int] = 1
    """Samples that train_samples and test_samples count as one: of a text, the tokens of a piece."""

    name: str = setting(MISSING, "the data set's name, as in dataset=NAME")
    train_samples: Optional[int] = setting(
        None,
        "training samples to use (images, nodes, pairs, ratings, utterances, pieces of 35 tokens), always the same; null: all",
        minimum=1,
    )
    test_samples: Optional[int] = setting(None, "number of samples to evaluate on; null: all", minimum=1)
    validation: Optional[float] = setting(
        None,
        "share of training samples held out for choosing, by the run's seed; null: 0.1 if a run chooses and has no such split",
        minimum=0,
        maximum=0.9,
    )

    def validate(self) -> None:
        if self.has_validation and self.validation:
            problem = f"{self.name} comes with a validation split"
            raise SettingError("validation", self.validation, problem, "leave it out")

    def full_info(self, data_root: Path) -> DatasetInfo:
        """What the whole data set holds; reads no data where the official one is of a known size.

        Raises:
            DataError: if its size has to be read and the data are missing.
        """
        raise NotImplementedError

    def info(self, data_root: Path) -> DatasetInfo:
        """What is used of the data set: `full_info` after train_samples, test_samples and validation.

        Raises:
            SettingError: for options that it cannot satisfy.
            DataError: as `full_info`.
        """
        return self.without_validation(self.limited(self.full_info(data_root)))

    def read(self, data_root: Path) -> Any:
        """The whole data set as it lies on disk, looked for where its module says.

        Raises:
            DataError: if the data are missing or cannot be read; says what to put where.
        """
        raise NotImplementedError

    def load(self, data_root: Path, seed: int) -> Any:
        """The data that are used, in splits; `seed` says which samples are held out for choosing.

        Raises:
            DataError: if the data are missing, cannot be read, or are not the whole data set.
        """
        raise NotImplementedError

    def limited(self, full: DatasetInfo) -> DatasetInfo:
        """`full` after train_samples and test_samples.

        Raises:
            SettingError: if there are not so many.
        """
        sizes, unit = {}, self.samples_of_one
        for option in ("train_samples", "test_samples"):
            wanted, most = getattr(self, option), getattr(full, option) // unit
            if wanted is not None and wanted > most and not self.takes_all_if_fewer:
                problem = f"{self.name} has only {most}" + (f" pieces of {unit} tokens" if unit > 1 else "")
                raise SettingError(option, wanted, problem, f"use at most {most}, or null for all")
            sizes[option] = getattr(full, option) if wanted is None else min(wanted, most) * unit
        return full._replace(**sizes)

    def without_validation(self, info: DatasetInfo) -> DatasetInfo:
        """`info` after the training samples that `validation` holds out.

        Raises:
            SettingError: if none is left.
        """
        kept = info.train_samples - validation_size(info.train_samples, self.validation)
        if kept <= 0:
            problem = f"leaves none of {info.train_samples} training samples"
            raise SettingError("validation", self.validation, problem, "hold out less, or 0 for none")
        return info._replace(train_samples=kept)
