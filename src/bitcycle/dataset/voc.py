"""Pascal VOC 2012 (Everingham et al. 2015), and a small stand-in in the same layout.

    VOCdevkit/VOC2012/ImageSets/Main/{train,val}.txt    names of images
    VOCdevkit/VOC2012/Annotations/NAME.xml              size, and for each object name, difficult and bndbox
    VOCdevkit/VOC2012/JPEGImages/NAME.jpg

Boxes there count pixels from 1 and include both ends; here they begin at 0 and end after the last pixel: x1 - 1, y1 - 1, x2, y2.
Training uses `train`, 5,717 images, and tests are made with `val`, 5,823, which is what the released code of Better Schedules
comes to (1,430 batches of 4); annotations of the official test set are not public.
"""

from __future__ import annotations

import logging
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar
from urllib.error import URLError

import torch

from bitcycle.dataset.archive import Files, find_files
from bitcycle.dataset.detection import AnnotatedImage, DetectionDatasetOptions, DetectionSplits, Objects
from bitcycle.dataset.images import EncodedImage
from bitcycle.errors import DataError
from bitcycle.settings import setting

logger = logging.getLogger(__name__)

VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
DEVKIT = "VOCdevkit/VOC2012"


@dataclass
class Voc2012(DetectionDatasetOptions):
    """Options of Pascal VOC 2012."""

    SIZES: ClassVar[tuple[int, int]] = (5717, 5823)

    name: str = "voc2012"

    @property
    def class_names(self) -> tuple[str, ...]:
        return VOC_CLASSES

    @property
    def sizes(self) -> tuple[int, int]:
        return self.SIZES

    @property
    def typical_size(self) -> tuple[int, int]:
        return 500, 375

    def read(self, data_root: Path) -> DetectionSplits:
        folders = [data_root / self.name, data_root]
        files = find_files(folders, DEVKIT)
        if files is None:
            self._download(data_root / self.name)
            files = find_files(folders, DEVKIT)
        assert files is not None, "the archive was downloaded and unpacked"
        train, test = (read_split(files, split, self.class_names) for split in ("train", "val"))
        check_sizes(self.name, (len(train), len(test)), self.sizes, files)
        return DetectionSplits(train, None, test)

    def _download(self, folder: Path) -> None:
        from torchvision.datasets import VOCDetection

        logger.info("%s is not under %s; downloading it from its official source (2 GB)", self.name, folder.parent)
        try:
            VOCDetection(str(folder), year="2012", image_set="train", download=True)
        except (URLError, OSError, RuntimeError) as error:
            raise DataError(
                f"{self.name} is not in {folder} and cannot be downloaded ({error}). Put the official folder "
                f"VOCdevkit/VOC2012 there, or the official archive VOCtrainval_11-May-2012.tar, or point data_root= (or "
                "BITCYCLE_DATA) at the folder that holds VOCdevkit. dataset=voc_small is a small stand-in."
            ) from error
        finally:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


@dataclass
class VocSmall(DetectionDatasetOptions):
    """Options of the stand-in: 70 + 25 + 25 photographs of blood cells (BCCD) in the layout of Pascal VOC 2007."""

    has_validation = True

    name: str = "voc_small"
    shorter_side: int = setting(320, "pixels that the shorter side is scaled to", minimum=16)
    longer_side: int = setting(512, "the longer side is scaled to at most so many pixels", minimum=16)

    @property
    def class_names(self) -> tuple[str, ...]:
        return "Platelets", "RBC", "WBC"

    @property
    def sizes(self) -> tuple[int, int]:
        return 70, 25

    @property
    def typical_size(self) -> tuple[int, int]:
        return 640, 480

    def read(self, data_root: Path) -> DetectionSplits:
        folders = [data_root / "voc-small", data_root / "voc_small"]
        files = find_files(folders, "VOCdevkit/VOC2007", [folder / "VOCdevkit-small.tar" for folder in folders])
        if files is None:
            raise DataError(
                f"{self.name} is not in {folders[0]}. Put VOCdevkit-small.tar, or the folder VOCdevkit that it unpacks to, "
                "there, or point data_root= (or BITCYCLE_DATA) at the folder above."
            )
        train, validation, test = (read_split(files, split, self.class_names) for split in ("train", "val", "test"))
        check_sizes(self.name, (len(train), len(test)), self.sizes, files)
        return DetectionSplits(train, validation, test)


def check_sizes(name: str, found: tuple[int, int], expected: tuple[int, int], files: Files) -> None:
    """Refuse anything but the whole data set.

    Raises:
        DataError: for other numbers of images.
    """
    if found != expected:
        raise DataError(
            f"{files.origin('.')} holds {found[0]} training and {found[1]} test images; {name} has {expected[0]} and "
            f"{expected[1]}. Fetch the data set again, or point data_root= at the whole one."
        )


def read_split(files: Files, split: str, class_names: tuple[str, ...]) -> list[AnnotatedImage]:
    """The images of a split in Pascal VOC's layout, with their objects; no image is decoded.

    Raises:
        DataError: if a file is missing or says something that cannot be.
    """
    names = files.read(f"ImageSets/Main/{split}.txt").decode().split()
    return [_read_annotation(files, name, class_names) for name in names]


def _read_annotation(files: Files, name: str, class_names: tuple[str, ...]) -> AnnotatedImage:
    source = f"Annotations/{name}.xml"
    try:
        root = ElementTree.fromstring(files.read(source))
        width, height = (int(root.findtext(f"size/{side}", "")) for side in ("width", "height"))
        boxes, labels, difficult = [], [], []
        for element in root.iterfind("object"):
            x1, y1, x2, y2 = (
                float(element.findtext(f"bndbox/{side}", "")) for side in ("xmin", "ymin", "xmax", "ymax")
            )
            if x2 < x1 or y2 < y1:
                raise ValueError(f"box {x1:g}, {y1:g}, {x2:g}, {y2:g} ends before it begins")
            boxes.append([x1 - 1, y1 - 1, x2, y2])
            labels.append(class_names.index(element.findtext("name", "")))
            difficult.append(element.findtext("difficult", "0").strip() == "1")
    except (ElementTree.ParseError, ValueError) as error:
        raise DataError(f"cannot use {files.origin(source)}: {error}. Fetch the data set again.") from error
    picture = f"JPEGImages/{name}.jpg"
    image = EncodedImage(files.origin(picture), partial(files.read, picture))
    objects = Objects(
        torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
        torch.tensor(labels, dtype=torch.int64),
        torch.tensor(difficult, dtype=torch.bool),
    )
    return AnnotatedImage(image, width, height, objects)
