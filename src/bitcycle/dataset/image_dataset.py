"""What every data set of images has: normalisation, augmentation, parts, and its two splits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from bitcycle.dataset.base import DatasetInfo, DatasetOptions
from bitcycle.dataset.images import Images
from bitcycle.dataset.part import CLASSES, PARTS, classes_of, size_of, take_part
from bitcycle.dataset.validation import validation_mask, validation_size
from bitcycle.errors import DataError
from bitcycle.randomness import derive
from bitcycle.settings import SettingError, setting
from bitcycle.shapes import ImageShape


class Splits(NamedTuple):
    """Training and test images."""

    train: Images
    test: Images


@dataclass
class ImageDatasetOptions(DatasetOptions):
    """Options that every image data set has."""

    mean: list[float] = setting([0.5], "mean of each channel that images are normalised with, pixels in [0, 1]")
    std: list[float] = setting(
        [0.5], "standard deviation of each channel that images are normalised with", minimum=1e-6
    )
    crop_padding: int = setting(
        0, "training images are padded with this many zeros and cropped at random; 0: no crop", minimum=0
    )
    flip: bool = setting(False, "training images are flipped horizontally at random")
    part: str = setting(
        "all",
        "half of the data: half of the classes, or half of each class's training samples (FracTrain, section 4.5); all: no half",
        choices=PARTS,
    )
    train_samples: Optional[int] = setting(
        None, "train on the first so many images of a fixed random order; null: all", minimum=1
    )
    test_samples: Optional[int] = setting(
        None, "evaluate on the first so many images of a fixed random order; null: all", minimum=1
    )

    def full_info(self, data_root: Path) -> DatasetInfo:
        """What the whole data set holds; reads no image."""
        raise NotImplementedError

    def read(self, data_root: Path) -> Splits:
        """Both splits, whole.

        Raises:
            DataError: if the data are missing or cannot be read.
        """
        raise NotImplementedError

    def info(self, data_root: Path) -> DatasetInfo:
        """What is used of the data set: `full_info` after train_samples, test_samples and validation."""
        full = self._part_info(self.full_info(data_root))
        assert isinstance(full.shape, ImageShape)
        for option, available in (("train_samples", full.train_samples), ("test_samples", full.test_samples)):
            wanted = getattr(self, option)
            if wanted is not None and wanted > available:
                raise SettingError(
                    option, wanted, f"{self.name} has only {available}", f"use at most {available}, or null for all"
                )
        for option in ("mean", "std"):
            values = getattr(self, option)
            if len(values) not in (1, full.shape.channels):
                problem = f"images of {self.name} have {full.shape.channels} channels"
                raise SettingError(option, values, problem, "give one number, or one for each channel")
        train_samples = self.train_samples or full.train_samples
        held_out = validation_size(train_samples, self.validation or 0)
        if held_out >= train_samples:
            problem = f"leaves none of {train_samples} training images"
            raise SettingError("validation", self.validation, problem, "hold out less, or 0 for none")
        return full._replace(
            train_samples=train_samples - held_out,
            test_samples=self.test_samples or full.test_samples,
        )

    @property
    def equal_classes(self) -> bool:
        """Whether all classes are known to have equally many samples."""
        return False

    def _part_info(self, full: DatasetInfo) -> DatasetInfo:
        """What `part` leaves of the whole data set."""
        assert isinstance(full.shape, ImageShape)
        classes = full.shape.classes
        if self.part in CLASSES and not self.equal_classes:
            remedy = "use first_samples or second_samples, or cifar10 or cifar100"
            raise SettingError("part", self.part, f"classes of {self.name} need not be of one size", remedy)
        kept = len(classes_of(self.part, classes))
        train = size_of(self.part, full.train_samples, classes, training=True)
        test = size_of(self.part, full.test_samples, classes, training=False)
        return DatasetInfo(full.shape._replace(classes=kept), train, test)

    def _part_of(self, splits: Splits, data_root: Path) -> Splits:
        if self.part == "all":
            return splits
        shape = self.full_info(data_root).shape
        assert isinstance(shape, ImageShape)
        classes = shape.classes
        train = take_part(splits.train, self.part, classes, training=True)
        return Splits(train, take_part(splits.test, self.part, classes, training=False))

    def load(self, data_root: Path) -> Splits:
        """The images that are used of both splits, before any are held out."""
        splits = self._part_of(self.read(data_root), data_root)
        return Splits(
            first_images(splits.train, self.train_samples).decoded(),
            first_images(splits.test, self.test_samples).decoded(),
        )

    def hold_out(self, train: Images, seed: int) -> tuple[Images, Images | None]:
        """Training images without those held out for choosing, and these; `seed` says which ones."""
        count = validation_size(len(train), self.validation or 0)
        if count == 0:
            return train, None
        held_out = validation_mask(train.labels, count, derive(seed, "validation"))
        validation = train.subset(held_out.nonzero().flatten()).for_evaluation()
        return train.subset((~held_out).nonzero().flatten()), validation


def first_images(images: Images, count: int | None) -> Images:
    """The first `count` images of an order that is random but the same for every run; all for None, or if there are no more."""
    if count is None or count >= len(images):
        return images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images.subset(order[:count])


def hold_out(labels: Tensor, fraction: float) -> Tensor:
    """A mask of the samples held out for testing: a share of each class, at least one; the same for every run.

    Raises:
        DataError: for a class with fewer than two samples.
    """
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        if len(members) < 2:
            raise DataError(f"class {int(label)} has a single image: add another, or a test split")
        count = max(1, round(fraction * len(members)))
        held_out[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    return held_out
