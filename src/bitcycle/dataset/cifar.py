"""CIFAR-10 and CIFAR-100: 50,000 training and 10,000 test images of 32x32 pixels.

Looked for under `data_root` as Hugging Face parquet files (`uoft-cs/cifar10`), as class folders, or as the official python
files; if none is there, the official archive is downloaded.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import torch

from bitcycle.dataset.base import DatasetInfo, logger
from bitcycle.dataset.image_dataset import ImageDatasetOptions, Splits
from bitcycle.dataset.images import EncodedImages, Framing, Images
from bitcycle.dataset.source import (
    find_class_folders,
    find_parquet,
    read_cifar_pickles,
    read_class_folders,
    read_parquet,
)
from bitcycle.errors import DataError
from bitcycle.settings import setting
from bitcycle.shapes import ImageShape

TRAIN_SAMPLES, TEST_SAMPLES = 50_000, 10_000
OFFICIAL = {
    "cifar10": ("cifar-10-batches-py", [f"data_batch_{i}" for i in range(1, 6)], ["test_batch"], b"labels"),
    "cifar100": ("cifar-100-python", ["train"], ["test"], b"fine_labels"),
}


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
        folders = [data_root / self.name, data_root / "uoft-cs" / self.name, data_root]
        for folder in folders:
            if folder.is_dir():
                found = self._read_if_present(folder)
                if found is not None:
                    return self._checked(found, folder)
        self._download(data_root / self.name)
        found = self._read_if_present(data_root / self.name)
        assert found is not None, "the archive was downloaded and unpacked"
        return self._checked(found, data_root / self.name)

    def _read_if_present(self, folder: Path) -> Splits | None:
        subfolder, train_files, test_files, label_key = OFFICIAL[self.name]
        if (folder / subfolder / train_files[-1]).is_file():
            train = read_cifar_pickles(folder / subfolder, train_files, label_key)
            return Splits(Images(*train), Images(*read_cifar_pickles(folder / subfolder, test_files, label_key)))
        is_own_folder = folder.name == self.name  # data_root itself may hold the files of any data set
        if is_own_folder and find_parquet(folder, "train") and find_parquet(folder, "test"):
            encoded = [read_parquet(find_parquet(folder, split)) for split in ("train", "test")]
        elif is_own_folder and find_class_folders(folder, "train") and find_class_folders(folder, "test"):
            train_split = read_class_folders(find_class_folders(folder, "train") or folder)
            test_folder = find_class_folders(folder, "test") or folder
            encoded = [train_split, read_class_folders(test_folder, train_split.class_names)]
        else:
            return None
        logger.info("reading the images of %s", folder)
        return Splits(*(EncodedImages(split.images, split.labels, 3, Framing(32, 32)) for split in encoded))

    def _checked(self, splits: Splits, folder: Path) -> Splits:
        """Refuse anything but the whole data set."""
        sizes = len(splits.train), len(splits.test)
        labels = torch.cat([splits.train.labels, splits.test.labels])
        if sizes != (TRAIN_SAMPLES, TEST_SAMPLES) or labels.unique().tolist() != list(range(self.classes)):
            raise DataError(
                f"{folder} holds {sizes[0]} training and {sizes[1]} test images with labels {int(labels.min())} to "
                f"{int(labels.max())}; {self.name} has {TRAIN_SAMPLES} and {TEST_SAMPLES} with {self.classes} classes. Point "
                "data_root at the whole data set, or use dataset=image_folder for your own."
            )
        return splits

    def _download(self, folder: Path) -> None:
        from torchvision import datasets

        logger.info("%s is not under %s; downloading it from its official source", self.name, folder.parent)
        official = datasets.CIFAR10 if self.name == "cifar10" else datasets.CIFAR100
        timeout = socket.getdefaulttimeout()
        try:
            socket.setdefaulttimeout(20)
            official(str(folder), train=True, download=True)
        except (URLError, OSError, RuntimeError) as error:
            raise DataError(
                f"{self.name} is not in {folder} and cannot be downloaded ({error}). Put it there as parquet files (the hub's "
                f"uoft-cs/{self.name}: {folder}/data/train-*.parquet and test-*.parquet), as class folders "
                f"({folder}/train/CLASS/*.png and test/), or as the official {OFFICIAL[self.name][0]} folder; or point "
                "data_root= (or BITCYCLE_DATA) at the folder that holds it. dataset=digits needs no download."
            ) from error
        finally:
            socket.setdefaulttimeout(timeout)
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
