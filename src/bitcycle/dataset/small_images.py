"""Small images that are held in memory: CIFAR-10, CIFAR-100, CIFAR-10 at 16x16 pixels, and scikit-learn's digits.

CIFAR: 50,000 training and 10,000 test images of 32x32 pixels. Looked for under `data_root` as the official python files, which
torchvision reads, as Hugging Face parquet files, or as class folders; else `datasets` gets `uoft-cs/cifar10` or
`uoft-cs/cifar100` from its cache or the hub.

Digits: 1,797 grey images of 8x8 pixels, part of scikit-learn, the test half of the UCI "Optical Recognition of Handwritten
Digits" data. Four fifths of each class train, one fifth tests; the split is the same for every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from bitcycle.dataset.base import UNREADABLE, DatasetInfo, Splits, check_whole, logger
from bitcycle.dataset.hub import has_parquet
from bitcycle.dataset.image_dataset import ImageDatasetOptions
from bitcycle.dataset.image_sources import hold_out, read_folders, read_hub_images
from bitcycle.dataset.images import EncodedImages, Framing, Images
from bitcycle.errors import DataError
from bitcycle.settings import setting
from bitcycle.shapes import ImageShape

TRAIN_SAMPLES, TEST_SAMPLES = 50_000, 10_000
OFFICIAL = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


@dataclass
class Cifar(ImageDatasetOptions):
    """Options of CIFAR-10 and CIFAR-100. Normalisation and augmentation: released code of CPT, modules/data.py."""

    mean: list[float] = setting([0.4914, 0.4822, 0.4465], "mean of each channel, pixels in [0, 1]")
    std: list[float] = setting(
        [0.2023, 0.1994, 0.2010], "standard deviation of each channel (the released code's)", minimum=1e-6
    )
    crop_padding: int = 4
    flip: bool = True

    equal_classes = True

    @property
    def classes(self) -> int:
        """Number of classes."""
        return 100 if self.name == "cifar100" else 10

    def full_info(self, data_root: Path) -> DatasetInfo:
        return DatasetInfo(ImageShape(3, 32, self.classes), TRAIN_SAMPLES, TEST_SAMPLES)

    def read(self, data_root: Path) -> Splits[Images]:
        name = f"cifar{self.classes}"
        folder, hub = data_root / name, f"uoft-cs/{name}"
        for place in (folder, data_root / hub, data_root):
            if (place / OFFICIAL[name]).is_dir():
                return self._checked(self._read_official(place), place)
        remedy = (
            f"Put it below data_root= (or BITCYCLE_DATA) as parquet files of the hub ({name}/data/train-*.parquet and "
            f"test-*.parquet), as class folders ({name}/train/CLASS/*.png and test/), or as the official "
            f"{name}/{OFFICIAL[name]}. dataset=digits needs no download."
        )
        where: Path | str = next((place for place in (folder, data_root / hub) if has_parquet(place)), hub)
        if where == hub and (folder / "train").is_dir():
            where, found = folder, read_folders(folder, 0.2)
        else:
            logger.info("reading the images of %s, of the cache of datasets or of the hub", where)
            found = read_hub_images(where, remedy, test_split="test")
        framed = (EncodedImages(split.images, split.labels, 3, Framing(32, 32)) for split in found)
        return self._checked(Splits(*framed), where)

    def _read_official(self, folder: Path) -> Splits[Images]:
        from torchvision.datasets import CIFAR10, CIFAR100

        official = CIFAR10 if self.classes == 10 else CIFAR100
        try:
            found = [official(str(folder), train) for train in (True, False)]
        except UNREADABLE as error:
            problem = (
                f"cannot read {folder / official.base_folder}: {type(error).__name__}: {str(error).split('. ')[0]}"
            )
            raise DataError(f"{problem}. Delete it and unpack the official archive again.") from error
        return Splits(*(Images(torch.from_numpy(split.data), torch.tensor(split.targets)) for split in found))

    def _checked(self, splits: Splits[Images], origin: Path | str) -> Splits[Images]:
        """Refuse anything but the whole data set."""
        labels = torch.cat([splits.train.labels, splits.test.labels])
        found = len(splits.train), len(splits.test), len(labels.unique()), int(labels.max())
        expected = TRAIN_SAMPLES, TEST_SAMPLES, self.classes, self.classes - 1
        what = "training and test images, different labels and as highest label"
        check_whole(self.name, origin, what, found, expected)
        return splits


@dataclass
class CifarSmall(Cifar):
    """Options of CIFAR-10 at 16x16 pixels, the real images averaged over 2x2 pixels: a proxy with a quarter of the cost.

    Two CPU cores can train on it to convergence; no paper uses it.
    """

    crop_padding: int = 2

    def full_info(self, data_root: Path) -> DatasetInfo:
        return super().full_info(data_root)._replace(shape=ImageShape(3, 16, self.classes))

    def load(self, data_root: Path, seed: int) -> Splits[Images]:
        def halved(images: Images) -> Images:
            return Images(halve(images.pixels), images.labels)

        train, test, validation = super().load(data_root, seed)
        return Splits(halved(train), halved(test), None if validation is None else halved(validation))


def halve(pixels: Tensor) -> Tensor:
    """Means over 2x2 pixels, rounded half up: uint8 [N, H, W, C] -> uint8 [N, H/2, W/2, C].

    >>> import torch
    >>> halve(torch.tensor([[0, 1], [2, 255]], dtype=torch.uint8).reshape(1, 2, 2, 1)).item()  # 64.5
    65
    """
    total = pixels[:, ::2].short() + pixels[:, 1::2]
    return ((total[:, :, ::2] + total[:, :, 1::2] + 2) // 4).byte()


@dataclass
class Digits(ImageDatasetOptions):
    """Options of the digits. Differs from CIFAR's recipe: no flips, since a mirrored digit is no digit."""

    name: str = "digits"
    mean: list[float] = setting([0.3060], "mean of each channel, pixels in [0, 1]")
    std: list[float] = setting([0.3763], "standard deviation of each channel", minimum=1e-6)
    crop_padding: int = 1

    def full_info(self, data_root: Path) -> DatasetInfo:
        return DatasetInfo(ImageShape(1, 8, 10), 1438, 359)

    def read(self, data_root: Path) -> Splits[Images]:
        whole = _read_digits()
        held_out = hold_out(whole.labels, 0.2)
        return Splits(whole.subset(~held_out), whole.subset(held_out))


@cache  # a text file, which takes half a second
def _read_digits() -> Images:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = torch.from_numpy(images.reshape(-1, 8, 8, 1) * (255 / 16)).round().to(torch.uint8)
    return Images(pixels, torch.from_numpy(labels).long())
