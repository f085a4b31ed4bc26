"""What every data set of images has: normalisation, augmentation, its two splits, and parts of them.

Halves of a data set are for training on one and going on with the other:

    first_classes, second_classes    classes in a random order that is the same for every run (`torch.randperm` of the number of
                                     classes, generator seeded with 0): its first half, and the rest; of both splits, with
                                     labels renumbered in the old order
    first_samples, second_samples    training samples in such a random order, then sorted by class: every other one, so that the
                                     halves of a class differ by one sample at most; all test samples

Source: FracTrain, section 4.5 and appendix E (adaptation and fine-tuning on CIFAR-100), which does not give the split; no code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from bitcycle.dataset.base import DatasetInfo, DatasetOptions, Splits, fixed_order, validation_size
from bitcycle.dataset.images import Images
from bitcycle.randomness import derive
from bitcycle.settings import SettingError, setting
from bitcycle.shapes import ImageShape

CLASSES, SAMPLES = ("first_classes", "second_classes"), ("first_samples", "second_samples")
PARTS = ("all", *CLASSES, *SAMPLES)


@dataclass
class ImageDatasetOptions(DatasetOptions):
    """Options that every image data set has."""

    equal_classes: ClassVar[bool] = False
    """Whether all classes are known to have equally many samples."""

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

    def info(self, data_root: Path) -> DatasetInfo:
        full = self.full_info(data_root)
        assert isinstance(full.shape, ImageShape)
        for option in ("mean", "std"):
            values = getattr(self, option)
            if len(values) not in (1, full.shape.channels):
                problem = f"images of {self.name} have {full.shape.channels} channels"
                raise SettingError(option, values, problem, "give one number, or one for each channel")
        classes = full.shape.classes
        if self.part in CLASSES and not self.equal_classes:
            remedy = "use first_samples or second_samples, or cifar10 or cifar100"
            raise SettingError("part", self.part, f"classes of {self.name} need not be of one size", remedy)
        sizes = (
            size_of(self.part, full.train_samples, classes, True),
            size_of(self.part, full.test_samples, classes, False),
        )
        shape = full.shape._replace(classes=len(classes_of(self.part, classes)))
        return self.without_validation(self.limited(DatasetInfo(shape, *sizes)))

    def load(self, data_root: Path, seed: int) -> Splits[Images]:
        shape = self.full_info(data_root).shape
        assert isinstance(shape, ImageShape)
        whole = self.read(data_root)
        train = take_part(whole.train, self.part, shape.classes, training=True)
        test = take_part(whole.test, self.part, shape.classes, training=False)
        train = first_images(train, self.train_samples).decoded()
        test = first_images(test, self.test_samples).decoded()
        count = validation_size(len(train), self.validation)
        if count == 0:
            return Splits(train, test)
        held_out = validation_mask(train.labels, count, derive(seed, "validation"))
        return Splits(train.subset(~held_out), test, train.subset(held_out).for_evaluation())


def first_images(images: Images, count: int | None) -> Images:
    """The first `count` images of an order that is random but the same for every run; all for None, or if there are no more."""
    return images if count is None or count >= len(images) else images.subset(fixed_order(len(images), count))


def validation_mask(labels: Tensor, count: int, seed: int) -> Tensor:
    """A mask of `count` samples to hold out: as near to the same share of each class as whole numbers allow, else by `seed`.

    >>> mask = validation_mask(torch.tensor([0] * 8 + [1] * 4), 3, seed=0)
    >>> mask[:8].sum().item(), mask[8:].sum().item()
    (2, 1)
    """
    generator = torch.Generator().manual_seed(seed)
    classes, sizes = labels.unique(return_counts=True)
    quotas = sizes.double() * count / len(labels)
    counts = quotas.floor().long()
    # What rounding down leaves goes to the largest remainders; a random order decides among equal ones.
    order = torch.randperm(len(classes), generator=generator)
    by_remainder = order[(quotas - counts)[order].argsort(descending=True, stable=True)]
    counts[by_remainder[: count - int(counts.sum())]] += 1
    return draw_of_classes(labels, dict(zip(classes.tolist(), counts.tolist(), strict=True)), generator)


def draw_of_classes(labels: Tensor, counts: Mapping[int, int], generator: torch.Generator) -> Tensor:
    """A mask of so many random samples of each class."""
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for label, count in counts.items():
        members = (labels == label).nonzero().flatten()
        mask[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    return mask


def classes_of(part: str, classes: int) -> Tensor:
    """The classes, ascending, that belong to a part of so many."""
    if part not in CLASSES:
        return torch.arange(classes)
    return _order(classes).tensor_split([classes // 2])[CLASSES.index(part)].sort().values


def size_of(part: str, samples: int, classes: int, training: bool) -> int:
    """How many of a split's samples belong to a part, where all classes have equally many."""
    if part in CLASSES:
        return samples // classes * len(classes_of(part, classes))
    if part in SAMPLES and training:
        return (samples + (part == "first_samples")) // 2
    return samples


def take_part(images: Images, part: str, classes: int, training: bool) -> Images:
    """The images of a split that belong to a part."""
    if part in CLASSES:
        kept = classes_of(part, classes)
        chosen = images.subset(torch.isin(images.labels, kept))
        chosen.labels = torch.searchsorted(kept, chosen.labels)
        return chosen
    if part in SAMPLES and training:
        order = _order(len(images))
        by_class = order[images.labels[order].argsort(stable=True)]
        return images.subset(by_class[SAMPLES.index(part) :: 2].sort().values)
    return images


def _order(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))
