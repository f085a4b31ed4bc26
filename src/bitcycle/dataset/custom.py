"""Your own images: any folder of class sub-folders, or Hugging Face image parquet files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Optional

from bitcycle.dataset.base import DatasetInfo, logger
from bitcycle.dataset.image_dataset import ImageDatasetOptions, Splits, hold_out
from bitcycle.dataset.images import GREY_MODES, EncodedImages, Framing, StreamedImages, open_image
from bitcycle.dataset.source import Encoded, find_class_folders, find_parquet, read_class_folders, read_parquet
from bitcycle.errors import DataError
from bitcycle.settings import MISSING, SettingError, setting
from bitcycle.shapes import ImageShape


@dataclass
class CustomImages(ImageDatasetOptions):
    """Options of a data set of your own."""

    path: str = setting(
        MISSING, "the folder, absolute or below data_root: train/ and test/ (or val/), or class folders alone"
    )
    image_size: Optional[int] = setting(
        None,
        "pixels; other images are scaled by the shorter side and cropped; null: that of the first image",
        minimum=4,
        maximum=4096,
    )
    channels: Optional[int] = setting(
        None, "1 (grey) or 3 (colour) channels of the network's input; null: those of the first image", minimum=1
    )
    label_column: Optional[str] = setting(
        None, "parquet column of labels; null: label, labels, fine_label or the only integer one"
    )
    random_crop: bool = setting(
        False, "training images are cut out at random places, sizes (8 to 100 %) and aspect ratios, as for ImageNet"
    )
    resize: Optional[int] = setting(
        None, "pixels of the shorter side before the centre is cut out (ImageNet: 256); null: image_size", minimum=4
    )
    test_fraction: float = setting(
        0.2, "share of each class held out for testing where there is no test split", minimum=0.001, maximum=0.9
    )
    memory_gib: float = setting(
        4.0,
        "images are held in memory decoded up to this size, else decoded batch by batch",
        minimum=0,
        affects_result=False,
    )
    workers: int = setting(
        min(16, os.cpu_count() or 1),
        "processes that decode where images are not held in memory",
        minimum=0,
        affects_result=False,
    )

    def validate(self) -> None:
        if self.channels not in (None, 1, 3):
            raise SettingError("channels", self.channels, "images are grey or coloured", "use 1, 3 or null")
        if self.resize is not None and self.image_size is not None and self.resize < self.image_size:
            problem = f"is smaller than the image_size={self.image_size} that is cut out of it"
            raise SettingError("resize", self.resize, problem, "use image_size or more, or null")

    def full_info(self, data_root: Path) -> DatasetInfo:
        train, test = self._encoded(data_root)
        first = open_image(train.images[0])
        size = self.image_size or first.size[0]
        if self.image_size is None and first.size[0] != first.size[1]:
            raise DataError(
                f"{train.images[0].origin} is {first.size[0]}x{first.size[1]} pixels; set dataset.image_size"
            )
        if len(train.class_names) < 2:
            raise DataError(f"dataset.path={self.path} holds a single class ({train.class_names[0]}); add another")
        channels = self.channels or (1 if first.mode in GREY_MODES else 3)
        shape = ImageShape(channels, size, len(train.class_names))
        return DatasetInfo(shape, len(train.images), len(test.images))

    def read(self, data_root: Path) -> Splits:
        splits = self._encoded(data_root)
        shape = self.full_info(data_root).shape
        assert isinstance(shape, ImageShape)
        return self._frame(splits, shape)

    def _frame(self, splits: tuple[Encoded, Encoded], shape: ImageShape) -> Splits:
        """Training and test images as `shape` says, held in memory or decoded batch by batch."""
        resize = self.resize or shape.size
        framings = (Framing(shape.size, resize, self.random_crop), Framing(shape.size, resize))
        size_gib = sum(len(split.images) for split in splits) * shape.size**2 * shape.channels / 2**30
        if self.random_crop or size_gib > self.memory_gib:
            logger.info("images of %s are decoded batch by batch, by %d processes", self.name, self.workers)
            return Splits(
                *(
                    StreamedImages(split.images, split.labels, shape.channels, framing, self.workers)
                    for split, framing in zip(splits, framings, strict=True)
                )
            )
        return Splits(
            *(
                EncodedImages(split.images, split.labels, shape.channels, framing)
                for split, framing in zip(splits, framings, strict=True)
            )
        )

    def _encoded(self, data_root: Path) -> tuple[Encoded, Encoded]:
        """Training and test images as they are stored."""
        return _read_encoded(self._folder(data_root), self.name, self.label_column, self.test_fraction)

    def _folder(self, data_root: Path) -> Path:
        folder = data_root / Path(self.path).expanduser()  # an absolute path stands for itself
        if not folder.is_dir():
            raise DataError(
                f"dataset.path={self.path}: {folder} is not a folder. Give an absolute path or one below data_root."
            )
        return folder


@lru_cache(maxsize=4)
def _read_encoded(folder: Path, kind: str, label_column: str | None, test_fraction: float) -> tuple[Encoded, Encoded]:
    if kind == "image_parquet":
        files = {split: find_parquet(folder, split) for split in ("train", "test")}
        if not files["train"]:
            raise DataError(f"no parquet file whose name begins with train in {folder}")
        train = read_parquet(files["train"], label_column)
        test = read_parquet(files["test"], label_column) if files["test"] else None
    else:
        found = find_class_folders(folder, "train")
        whole = found or find_class_folders(folder, None)
        if whole is None:
            raise DataError(
                f"no images in class sub-folders of {folder}; expected CLASS/IMAGE.png or train/CLASS/IMAGE.png"
            )
        train = read_class_folders(whole)
        test_folder = find_class_folders(folder, "test") if found else None
        test = read_class_folders(test_folder, train.class_names) if test_folder else None
    return both_splits(train, test, test_fraction, str(folder))


def both_splits(train: Encoded, test: Encoded | None, test_fraction: float, folder: str) -> tuple[Encoded, Encoded]:
    """Training and test images, the latter held out where there is no test split.

    Raises:
        DataError: where the splits number their classes differently.
    """
    if test is None:
        return _split(train, test_fraction)
    _check_alike(train, test, folder)
    return train, test


def _check_alike(train: Encoded, test: Encoded, folder: str) -> None:
    """Refuse splits whose labels do not mean the same classes."""
    count = len(train.class_names)
    if test.class_names != train.class_names[: len(test.class_names)]:
        raise DataError(
            f"{folder}: the test split numbers its classes otherwise ({', '.join(test.class_names[:5])} ...) than the training "
            f"split ({', '.join(train.class_names[:5])} ...); export both alike"
        )
    if len(test.labels) and int(test.labels.max()) >= count:
        raise DataError(f"{folder}: the test split has label {int(test.labels.max())}; training has {count} classes")


def _split(whole: Encoded, test_fraction: float) -> tuple[Encoded, Encoded]:
    held_out = hold_out(whole.labels, test_fraction)
    parts = []
    for mask in (~held_out, held_out):
        indices = mask.nonzero().flatten()
        parts.append(Encoded([whole.images[i] for i in indices.tolist()], whole.labels[indices], whole.class_names))
    return parts[0], parts[1]
