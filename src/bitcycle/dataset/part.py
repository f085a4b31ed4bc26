"""Halves of a data set, for training on one and going on with the other: half of the classes, or half of each class's samples.

    first_classes, second_classes    classes in a random order that is the same for every run (`torch.randperm` of the number of
                                     classes, generator seeded with 0): its first half, and the rest; of both splits, with
                                     labels numbered anew in the old order
    first_samples, second_samples    training samples in such a random order, then sorted by class: every other one, so that the
                                     halves of a class differ by one sample at most; all test samples

Source: FracTrain, section 4.5 and appendix E (adaptation and fine-tuning on CIFAR-100), which does not give the split; no code.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from bitcycle.dataset.images import Images

CLASSES, SAMPLES = ("first_classes", "second_classes"), ("first_samples", "second_samples")
PARTS = ("all", *CLASSES, *SAMPLES)


def classes_of(part: str, classes: int) -> Tensor:
    """The classes, ascending, that belong to a part of so many."""
    if part not in CLASSES:
        return torch.arange(classes)
    order = _random_order(classes)
    half = classes // 2
    return (order[:half] if part == "first_classes" else order[half:]).sort().values


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
        chosen = images.subset(torch.isin(images.labels, kept).nonzero().flatten())
        renumbered = copy.copy(chosen)
        renumbered.labels = torch.searchsorted(kept, chosen.labels)
        return renumbered
    if part in SAMPLES and training:
        order = _random_order(len(images))
        by_class = order[images.labels[order].argsort(stable=True)]
        return images.subset(by_class[SAMPLES.index(part) :: 2].sort().values)
    return images


def _random_order(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))
