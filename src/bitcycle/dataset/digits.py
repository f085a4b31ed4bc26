"""scikit-learn's real handwritten digits: 1,797 grey images of 8x8 pixels, ten classes, part of the package.

The images are the test half of the UCI "Optical Recognition of Handwritten Digits" data. Four fifths of each class train,
one fifth tests; the split is the same for every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from bitcycle.dataset.base import DatasetInfo
from bitcycle.dataset.image_dataset import ImageDatasetOptions, Splits
from bitcycle.dataset.images import Images
from bitcycle.dataset.source import hold_out
from bitcycle.settings import setting
from bitcycle.shapes import ImageShape

TRAIN_SAMPLES, TEST_SAMPLES = 1438, 359


@dataclass
class Digits(ImageDatasetOptions):
    """Options of the digits. Differs from CIFAR's recipe: no flips, since a mirrored digit is no digit."""

    name: str = "digits"
    mean: list[float] = setting([0.3060], "mean of each channel, pixels in [0, 1]")
    std: list[float] = setting([0.3763], "standard deviation of each channel", minimum=1e-6)
    crop_padding: int = setting(
        1, "training images are padded with this many zeros and cropped at random; 0: no crop", minimum=0
    )

    def full_info(self, data_root: Path) -> DatasetInfo:
        return DatasetInfo(ImageShape(1, 8, 10), TRAIN_SAMPLES, TEST_SAMPLES)

    def read(self, data_root: Path) -> Splits:
        whole = _read()
        held_out = hold_out(whole.labels, 0.2)
        return Splits(whole.subset((~held_out).nonzero().flatten()), whole.subset(held_out.nonzero().flatten()))


@cache  # a text file, which takes half a second
def _read() -> Images:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = torch.from_numpy(images.reshape(-1, 8, 8, 1) * (255 / 16)).round().to(torch.uint8)
    return Images(pixels, torch.from_numpy(labels).long())
