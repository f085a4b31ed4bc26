"""CIFAR-10 and CIFAR-100: 50,000 training and 10,000 test images of 32x32 pixels; CIFAR-10 at 16x16, too.

Looked for under `data_root` as Hugging Face parquet files (`uoft-cs/cifar10`), as class folders, or as the official python
files, which torchvision reads; else `datasets` gets `uoft-cs/cifar10` or `uoft-cs/cifar100` from its cache or the hub.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bitcycle.dataset.base import DatasetInfo, check_whole, logger
from bitcycle.dataset.hub import has_parquet, load_hub
from bitcycle.dataset.image_dataset import ImageDatasetOptions, Splits
from bitcycle.dataset.images import EncodedImages, Framing, Images
from bitcycle.dataset.source import Encoded, read_folder_split, read_table
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
    crop_padding: int = setting(
        4, "training images are padded with this many zeros and cropped at random; 0: no crop", minimum=0
    )
    flip: bool = setting(True, "training images are flipped horizontally at random")

    @property
    def classes(self) -> int:
        """Number of classes."""
        return 100 if self.name == "cifar100" else 10

    @property
    def equal_classes(self) -> bool:
        return True

    def full_info(self, data_root: Path) -> DatasetInfo:
        return DatasetInfo(ImageShape(3, 32, self.classes), TRAIN_SAMPLES, TEST_SAMPLES)

    def read(self, data_root: Path) -> Splits:
        hub = f"uoft-cs/{self.name}"
        for folder in (data_root / self.name, data_root / hub, data_root):
            if (found := self._read_if_present(folder)) is not None:
                logger.info("reading the images of %s", folder)
                return self._checked(found, folder)
        folder = data_root / self.name
        logger.info("%s is not in %s; looking for it in the cache of datasets and at the hub", self.name, folder)
        return self._checked(self._read_hub(hub), hub)

    def _read_if_present(self, folder: Path) -> Splits | None:
        if (folder / OFFICIAL[self.name]).is_dir():
            return self._read_official(folder)
        if folder.name != self.name:  # data_root itself may hold the files of any data set
            return None
        if has_parquet(folder):
            return self._read_hub(folder)
        train = read_folder_split(folder, "train")
        test = read_folder_split(folder, "test", train.class_names) if train else None
        return _encoded(train, test) if train and test else None

    def _read_official(self, folder: Path) -> Splits:
        from torchvision import datasets

        official = datasets.CIFAR10 if self.name == "cifar10" else datasets.CIFAR100
        try:
            found = [official(str(folder), train) for train in (True, False)]
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError) as error:
            problem = f"cannot read {folder / OFFICIAL[self.name]}: {type(error).__name__}: {str(error).split('. ')[0]}"
            raise DataError(f"{problem}. Delete it and unpack the official archive again.") from error
        return Splits(*(Images(torch.from_numpy(split.data), torch.tensor(split.targets)) for split in found))

    def _read_hub(self, where: Path | str) -> Splits:
        remedy = (
            f"Put it below data_root= (or BITCYCLE_DATA) as parquet files of the hub ({self.name}/data/train-*.parquet and "
            f"test-*.parquet), as class folders ({self.name}/train/CLASS/*.png and test/), or as the official "
            f"{self.name}/{OFFICIAL[self.name]}. dataset=digits needs no download."
        )
        splits = load_hub(where, remedy)
        if not {"train", "test"} <= set(splits):
            raise DataError(f"{where} has the splits {', '.join(splits)}, not train and test. {remedy}")
        return _encoded(*(read_table(splits[split], f"{where}, {split}") for split in ("train", "test")))

    def _checked(self, splits: Splits, origin: Path | str) -> Splits:
        """Refuse anything but the whole data set."""
        labels = torch.cat([splits.train.labels, splits.test.labels])
        found = len(splits.train), len(splits.test), len(labels.unique()), int(labels.max())
        expected = TRAIN_SAMPLES, TEST_SAMPLES, self.classes, self.classes - 1
        what = "training and test images, different labels and as highest label"
        check_whole(self.name, origin, what, found, expected)
        return splits


def _encoded(train: Encoded, test: Encoded) -> Splits:
    return Splits(*(EncodedImages(split.images, split.labels, 3, Framing(32, 32)) for split in (train, test)))


@dataclass
class CifarSmall(Cifar):
    """Options of CIFAR-10 at 16x16 pixels, the real images averaged over 2x2 pixels: a proxy with a quarter of the cost.

    Two CPU cores can train on it to convergence; no paper uses it.
    """

    crop_padding: int = setting(
        2, "training images are padded with this many zeros and cropped at random; 0: no crop", minimum=0
    )

    def full_info(self, data_root: Path) -> DatasetInfo:
        return super().full_info(data_root)._replace(shape=ImageShape(3, 16, self.classes))

    def read(self, data_root: Path) -> Splits:
        full = Cifar.read(replace(self, name="cifar10"), data_root)
        return Splits(_HalvedImages(full.train), _HalvedImages(full.test))


class _HalvedImages(Images):
    """Images at half their size, computed when they are decoded, so that only the chosen ones are."""

    def __init__(self, images: Images) -> None:
        self.images, self.labels = images, images.labels

    def subset(self, indices: Tensor) -> _HalvedImages:
        part = _HalvedImages(self.images.subset(indices))
        part.labels = self.labels[indices]
        return part

    def decoded(self) -> Images:
        return Images(halve(self.images.decoded().pixels), self.labels)


def halve(pixels: Tensor) -> Tensor:
    """Means over 2x2 pixels, rounded half up: uint8 [N, H, W, C] -> uint8 [N, H/2, W/2, C].

    >>> import torch
    >>> halve(torch.tensor([[0, 1], [2, 255]], dtype=torch.uint8).reshape(1, 2, 2, 1)).item()  # 64.5
    65
    """
    total = sum(pixels[:, i::2, j::2].short() for i in (0, 1) for j in (0, 1))
    assert isinstance(total, Tensor)
    return ((total + 2) // 4).byte()
