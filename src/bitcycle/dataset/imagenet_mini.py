"""A stand-in for ImageNet: 100 photographs of 100 classes, in ImageNet's layout, to try its way of reading and training.

Its validation images are its training images again: accuracies mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

import torch

from bitcycle.dataset.archive import Files, FolderFiles, TarFiles
from bitcycle.dataset.base import DatasetInfo
from bitcycle.dataset.image_dataset import ImageDatasetOptions, Splits
from bitcycle.dataset.imagenet import ImageNet
from bitcycle.dataset.images import EncodedImage
from bitcycle.dataset.source import Encoded
from bitcycle.errors import DataError
from bitcycle.settings import setting
from bitcycle.shapes import ImageShape

SAMPLES = CLASSES = 100


class _FileReader:
    """Reads one file; can be handed to another process."""

    def __init__(self, files: Files, name: str) -> None:
        self.files, self.name = files, name

    def __call__(self) -> bytes:
        return self.files.read(self.name)


@dataclass
class ImageNetMini(ImageNet):
    """Options of the stand-in for ImageNet; its images are smaller."""

    name: str = "imagenet_mini"
    path: str = setting("imagenet-mini", "the folder with train/ and val/, or with imagenet-mini.tar, below data_root")
    image_size: Optional[int] = setting(112, "pixels of the network's input", minimum=4)
    resize: Optional[int] = setting(
        128, "pixels of the shorter side before the centre is cut out for evaluation", minimum=4
    )

    def full_info(self, data_root: Path) -> DatasetInfo:
        assert self.image_size is not None
        return DatasetInfo(ImageShape(3, self.image_size, CLASSES), SAMPLES, SAMPLES)

    def info(self, data_root: Path) -> DatasetInfo:
        """What is used: at most so many samples as there are, so that `scale=smoke` may ask for more."""
        train, test = (count and min(count, SAMPLES) for count in (self.train_samples, self.test_samples))
        return ImageDatasetOptions.info(replace(self, train_samples=train, test_samples=test), data_root)

    def read(self, data_root: Path) -> Splits:
        files = self._files(data_root / self.path)
        train = read_classes(files, "train")
        test = read_classes(files, "val", train.class_names)
        sizes = len(train.images), len(test.images), len(train.class_names)
        if sizes != (SAMPLES, SAMPLES, CLASSES):
            problem = f"{sizes[0]} training and {sizes[1]} validation images of {sizes[2]} classes"
            raise DataError(f"{files.origin('.')} holds {problem} instead of {SAMPLES} each. Fetch it again.")
        shape = self.full_info(data_root).shape
        assert isinstance(shape, ImageShape)
        return self._frame((train, test), shape)

    def _files(self, folder: Path) -> Files:
        unpacked = next((path for path in (folder, folder / "imagenet-mini") if (path / "train").is_dir()), None)
        if unpacked is not None:
            return FolderFiles(unpacked)
        if (folder / "imagenet-mini.tar").is_file():
            return TarFiles(folder / "imagenet-mini.tar", "imagenet-mini")
        raise DataError(
            f"{self.name} is not in {folder}. Put imagenet-mini.tar, or the folders train/ and val/ that it holds, there, or "
            "point data_root= (or BITCYCLE_DATA) at the folder above. dataset=image_folder takes any images."
        )


def read_classes(files: Files, split: str, class_names: tuple[str, ...] | None = None) -> Encoded:
    """Images named SPLIT/CLASS/IMAGE; classes are numbered in the order of their names, or as `class_names`.

    Raises:
        DataError: for a class that is not one of `class_names`.
    """
    parts = [(name, name.split("/")) for name in files.names()]
    found = [(name, path[1]) for name, path in parts if len(path) == 3 and path[0] == split]
    classes = class_names or tuple(sorted({label for _, label in found}))
    if strangers := {label for _, label in found} - set(classes):
        raise DataError(f"{files.origin(split)} has classes that train lacks: {', '.join(sorted(strangers))}")
    images = [EncodedImage(files.origin(name), _FileReader(files, name)) for name, _ in found]
    return Encoded(images, torch.tensor([classes.index(label) for _, label in found], dtype=torch.int64), classes)
