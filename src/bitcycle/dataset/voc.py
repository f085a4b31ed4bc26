"""Pascal VOC 2012 (Everingham et al. 2015), and a small proxy in the same layout; torchvision lists and downloads them.

    VOCdevkit/VOC2012/ImageSets/Main/{train,val}.txt    names of images
    VOCdevkit/VOC2012/Annotations/NAME.xml              size, and for each object name, difficult and bndbox
    VOCdevkit/VOC2012/JPEGImages/NAME.jpg

Boxes there count pixels from 1 and include both ends; here they begin at 0 and end after the last pixel: x1 - 1, y1 - 1, x2, y2.
Training uses `train`, 5,717 images, and tests are made with `val`, 5,823, which is what the released code of Better Schedules
comes to (1,430 batches of 4); annotations of the official test set are not public.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch

from bitcycle.dataset.base import Splits, check_whole, missing
from bitcycle.dataset.detection import AnnotatedImage, DetectionDatasetOptions
from bitcycle.dataset.fetch import fetch, unpack, unpack_to_cache
from bitcycle.dataset.images import EncodedImage
from bitcycle.errors import DataError

VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)


@dataclass
class Voc2012(DetectionDatasetOptions):
    """Options of Pascal VOC 2012."""

    class_names = VOC_CLASSES
    sizes = (5717, 5823)
    typical_size = (500, 375)

    name: str = "voc2012"

    def read(self, data_root: Path) -> Splits[list[AnnotatedImage]]:
        folders = (data_root / self.name, data_root)
        root = next((root for root in folders if (root / "VOCdevkit/VOC2012").is_dir()), None)
        root = root or self._download(data_root / self.name)
        train, test = (read_split(root, "2012", split, self.class_names) for split in ("train", "val"))
        check_whole(self.name, root, "training and test images", (len(train), len(test)), self.sizes)
        return Splits(train, test)

    def _download(self, folder: Path) -> Path:
        from torchvision.datasets.voc import DATASET_YEAR_DICT

        source = DATASET_YEAR_DICT["2012"]
        put = f"the official folder VOCdevkit/VOC2012, or the official archive {source['filename']},"
        remedy = str(missing(self.name, folder, put, " dataset=voc_small is a small proxy."))
        archive = fetch(source["url"], folder / source["filename"], remedy, source["md5"])
        unpack(archive, folder / "VOCdevkit", "VOCdevkit")
        return folder


@dataclass
class VocSmall(DetectionDatasetOptions):
    """Options of the proxy: 70 + 25 + 25 photographs of blood cells (BCCD) in the layout of Pascal VOC 2007."""

    class_names = ("Platelets", "RBC", "WBC")
    sizes = (70, 25)
    typical_size = (640, 480)
    has_validation = True

    name: str = "voc_small"
    shorter_side: int = 320
    longer_side: int = 512

    def read(self, data_root: Path) -> Splits[list[AnnotatedImage]]:
        folders = [data_root / "voc-small", data_root / "voc_small"]
        root = next((root for root in folders if (root / "VOCdevkit/VOC2007").is_dir()), None)
        if root is None:
            archive = next((file for root in folders if (file := root / "VOCdevkit-small.tar").is_file()), None)
            if archive is None:
                raise missing(self.name, folders[0], "VOCdevkit-small.tar, or the folder VOCdevkit that it unpacks to,")
            root = unpack_to_cache(archive)
        train, validation, test = (
            read_split(root, "2007", split, self.class_names) for split in ("train", "val", "test")
        )
        check_whole(self.name, root, "training and test images", (len(train), len(test)), self.sizes)
        return Splits(train, test, validation)


def read_split(root: Path, year: str, split: str, class_names: tuple[str, ...]) -> list[AnnotatedImage]:
    """The images of a split in Pascal VOC's layout, with their objects; no image is decoded.

    Raises:
        DataError: if a file is missing or says something that cannot be.
    """
    from torchvision.datasets import VOCDetection

    try:
        listed = VOCDetection(str(root), year=year, image_set=split)
    except (OSError, RuntimeError) as error:
        raise DataError(f"cannot read {root}/VOCdevkit/VOC{year}: {error}. Complete the data set.") from error
    return [_read_annotation(*files, class_names) for files in zip(listed.images, listed.annotations, strict=True)]


def _read_annotation(picture: str, annotation: str, class_names: tuple[str, ...]) -> AnnotatedImage:
    try:
        root = ElementTree.parse(annotation).getroot()
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
    except (OSError, ElementTree.ParseError, ValueError) as error:
        raise DataError(f"cannot use {annotation}: {error}. Fetch the data set again.") from error
    objects = torch.tensor(boxes, dtype=torch.float32).view(-1, 4), torch.tensor(labels, dtype=torch.int64)
    image = EncodedImage(picture, Path(picture).read_bytes)
    return AnnotatedImage(image, width, height, *objects, torch.tensor(difficult, dtype=torch.bool))
