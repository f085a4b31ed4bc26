"""Base class of all datasets: options, sizes (known without reading the data where possible) and splits."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Optional, TypeVar

import torch
from torch import Tensor

from bitcycle.errors import DataError
from bitcycle.settings import MISSING, SettingError, Settings, setting

logger = logging.getLogger(__name__)

S = TypeVar("S")


class DatasetInfo(NamedTuple):
    """Shape of the data, one of `bitcycle.shapes`, and sizes of the splits in samples: images, nodes of a graph, tokens,
    sentence pairs, ratings, or utterances."""

    shape: Any
    train_samples: int
    test_samples: int


class Splits(NamedTuple, Generic[S]):
    """Training, test and validation samples (None: no validation split)."""

    train: S
    test: S
    validation: S | None = None

    @property
    def evaluated(self) -> dict[str, S]:
        """The splits that are evaluated, by name."""
        return {"test": self.test} | ({} if self.validation is None else {"validation": self.validation})


def permutation(samples: int, seed: int = 0) -> Tensor:
    """A permutation of 0 .. samples-1 that depends only on the seed."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed))


def fixed_order(samples: int, count: int | None = None, seed: int = 0) -> Tensor:
    """The first `count` of a permutation of 0 .. samples-1 that depends on `seed` alone; all in order if there are no more."""
    return torch.arange(samples) if count is None or count >= samples else permutation(samples, seed)[:count]


def first_samples(samples: Sequence[S], count: int | None) -> list[S]:
    """The first `count` samples in `fixed_order`."""
    return [samples[index] for index in fixed_order(len(samples), count).tolist()]


def validation_size(samples: int, share: float | None) -> int:
    """Number of held-out training samples: round(share * samples), at least one if share is above 0."""
    return max(1, round(share * samples)) if share else 0


def missing(name: str, folder: Path, put: str, more: str = "") -> DataError:
    """Return the error for a dataset that is not on disk: what to put where, and alternatives."""
    return DataError(
        f"{name} is not in {folder}. Put {put} there, or set data_root= (or BITCYCLE_DATA) to its folder.{more}"
    )


def check_whole(name: str, origin: object, what: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Reject an incomplete dataset. Raises DataError if the numbers of `what` are not as expected."""
    if tuple(found) != tuple(expected):
        numbers, official = (", ".join(map(str, sizes)) for sizes in (found, expected))
        remedy = "Download it again, or set data_root= (or BITCYCLE_DATA) to the complete dataset"
        raise DataError(f"{origin} has {numbers} {what}; the complete {name} has {official}. {remedy}.")


@dataclass
class DatasetOptions(Settings):
    """Options of all datasets; each type of data (images, text, graphs, ...) has a subclass."""

    has_validation: ClassVar[bool] = False
    """Whether the dataset has a validation split, so that no training data need to be held out."""
    takes_all_if_fewer: ClassVar[bool] = False
    """Whether train_samples and test_samples may exceed the size of the dataset, as with `scale=smoke`."""

    samples_of_one: ClassVar[int] = 1
    """Samples per unit of train_samples and test_samples: for text, the tokens of a piece."""

    name: str = setting(MISSING, "the dataset's name, as in dataset=NAME")
    train_samples: Optional[int] = setting(
        None,
        "training samples to use (images, nodes, pairs, ratings, utterances, pieces of 35 tokens), fixed; null: all",
        minimum=1,
    )
    test_samples: Optional[int] = setting(None, "test samples to use; null: all", minimum=1)
    validation: Optional[float] = setting(
        None,
        "fraction of training samples held out for validation, by seed; null: 0.1 if needed and there is no split",
        minimum=0,
        maximum=0.9,
    )

    @property
    def validates(self) -> bool:
        """Whether a run has validation data, of a split of its own or held out."""
        return self.has_validation or bool(self.validation)

    def validate(self) -> None:
        if self.has_validation and self.validation:
            problem = f"{self.name} has a validation split"
            raise SettingError("validation", self.validation, problem, "omit it")

    @staticmethod
    def located(data_root: Path, path: str) -> Path:
        """`path` below data_root, or itself if it is absolute; ~ is the home folder."""
        return data_root / Path(path).expanduser()

    def place(self, data_root: Path) -> Path | None:
        """Where the data lie, as a rule below data_root; None if they do not. Reads no data and downloads nothing."""
        raise NotImplementedError

    def absent(self, data_root: Path) -> DataError:
        """The error for data that are not there: what to put where."""
        raise NotImplementedError

    def full_info(self, data_root: Path) -> DatasetInfo:
        """Shape and sizes of the whole dataset. Raises DataError if they must be read and the data are missing."""
        raise NotImplementedError

    def info(self, data_root: Path) -> DatasetInfo:
        """`full_info` after train_samples, test_samples and validation. Raises SettingError if the dataset has too few."""
        return self.without_validation(self.limited(self.full_info(data_root)))

    def read(self, data_root: Path) -> Any:
        """Read the whole dataset from disk. Raises DataError if the data are missing or unreadable."""
        raise NotImplementedError

    def remark(self, data_root: Path) -> str:
        """How the stored data differ from the official ones, in words that follow their name; empty if they are not known to."""
        return ""

    def load(self, data_root: Path, seed: int) -> Any:
        """Read the splits to use; `seed` determines the samples held out for validation, and the images with `draw=by_seed`.
        Raises DataError as `read`."""
        raise NotImplementedError

    def limited(self, full: DatasetInfo) -> DatasetInfo:
        """`full` after train_samples and test_samples. Raises SettingError if the dataset has fewer."""
        sizes, unit = {}, self.samples_of_one
        for option in ("train_samples", "test_samples"):
            wanted, most = getattr(self, option), getattr(full, option) // unit
            if wanted is not None and wanted > most and not self.takes_all_if_fewer:
                problem = f"{self.name} has only {most}" + (f" pieces of {unit} tokens" if unit > 1 else "")
                raise SettingError(option, wanted, problem, f"use at most {most}, or null for all")
            sizes[option] = getattr(full, option) if wanted is None else min(wanted, most) * unit
        return full._replace(**sizes)

    def without_validation(self, info: DatasetInfo) -> DatasetInfo:
        """`info` after the training samples that `validation` holds out. Raises SettingError if no training sample is left."""
        kept = info.train_samples - validation_size(info.train_samples, self.validation)
        if kept <= 0:
            problem = f"leaves none of {info.train_samples} training samples"
            raise SettingError("validation", self.validation, problem, "hold out fewer, or 0 for none")
        return info._replace(train_samples=kept)
