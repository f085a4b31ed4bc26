"""Your own images: class folders, parquet files in the layout of the Hugging Face hub, or a data set of the hub by its name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Optional

from bitcycle.dataset.base import DatasetInfo, logger
from bitcycle.dataset.hub import load_hub
from bitcycle.dataset.image_dataset import ImageDatasetOptions, Splits
from bitcycle.dataset.images import GREY_MODES, EncodedImages, Framing, open_image
from bitcycle.dataset.source import Encoded, both_splits, read_class_folders, read_folder_split, read_table
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
        framings = Framing(shape.size, resize, self.random_crop), Framing(shape.size, resize)
        size_gib = sum(len(split.images) for split in splits) * shape.size**2 * shape.channels / 2**30
        workers = None
        if self.random_crop or size_gib > self.memory_gib:
            logger.info("images of %s are decoded batch by batch, by %d processes", self.name, self.workers)
            workers = self.workers
        train, test = (
            EncodedImages(split.images, split.labels, shape.channels, framing, workers)
            for split, framing in zip(splits, framings, strict=True)
        )
        return Splits(train, test)

    def _encoded(self, data_root: Path) -> tuple[Encoded, Encoded]:
        """Training and test images as they are stored."""
        folder = data_root / Path(self.path).expanduser()  # an absolute path stands for itself
        if not folder.is_dir():
            problem = f"dataset.path={self.path}: {folder} is not a folder"
            raise DataError(f"{problem}. Give an absolute path or one below data_root.")
        if self.name == "image_parquet":
            return read_hub_images(folder, None, None, "train", None, self.label_column, self.test_fraction)
        return read_folders(folder, self.test_fraction)


@lru_cache(maxsize=4)
def read_folders(folder: Path, test_fraction: float) -> tuple[Encoded, Encoded]:
    """Training and test images of class folders, below train/ and test/ (or val/) or without these.

    Raises:
        DataError: if there are none, or the splits have different classes.
    """
    train = read_folder_split(folder, "train")
    test = None if train is None else read_folder_split(folder, "test", train.class_names)
    return both_splits(train or read_class_folders(folder), test, test_fraction, folder)


@dataclass
class HubImages(CustomImages):
    """A data set of the hub with a column of images and one of labels: dataset=hub dataset.path=owner/name.

    A folder in the hub's layout, absolute or below data_root, is read without network. Runs are named by path, subset and
    revision, not by what these hold.
    """

    path: str = setting(MISSING, "owner/name at the hub, or a folder in its layout")
    subset: Optional[str] = setting(None, "configuration of a data set that has several; null: its default")
    revision: Optional[str] = setting(None, "commit, branch or tag at the hub; null: the newest")
    train_split: str = setting("train", "name of the split to train on")
    test_split: Optional[str] = setting(
        None, "name of the split to test on; null: test, else validation, else test_fraction of the training split"
    )

    def _encoded(self, data_root: Path) -> tuple[Encoded, Encoded]:
        folder = data_root / Path(self.path).expanduser()
        where = folder if folder.is_dir() else self.path
        splits = self.train_split, self.test_split
        return read_hub_images(where, self.subset, self.revision, *splits, self.label_column, self.test_fraction)


@lru_cache(maxsize=4)
def read_hub_images(
    where: Path | str,
    subset: str | None,
    revision: str | None,
    train_split: str,
    test_split: str | None,
    label_column: str | None,
    test_fraction: float,
) -> tuple[Encoded, Encoded]:
    """Training and test images of a folder in the hub's layout, or of a data set there; arguments as the options of `HubImages`.

    Raises:
        DataError: if they cannot be loaded, or lack a split, images or labels.
    """
    remedy = "Check name, dataset.subset and network, log in for gated data, or give a folder in the hub's layout."
    splits = load_hub(where, f"It is dataset.path. {remedy}", subset, revision)
    for name in (train_split, *([test_split] if test_split else [])):
        if name not in splits:
            problem = f"dataset.path={where} has the splits {', '.join(splits)}, not {name}"
            raise DataError(f"{problem}; set dataset.train_split and test_split, or name the files so")
    found = test_split or next(
        (name for name in ("test", "validation") if name in splits and name != train_split), None
    )
    train = read_table(splits[train_split], f"{where}, {train_split}", label_column)
    test = read_table(splits[found], f"{where}, {found}", label_column) if found else None
    return both_splits(train, test, test_fraction, where)
