"""Object detection data: images scaled, normalised, padded and batched by aspect ratio; Pascal VOC.

The shorter side is scaled to `shorter_side` pixels, or less if the longer side would exceed `longer_side`. Normalised
images are padded with zeros on the right and below to the next larger multiple of 32 (a multiple of 32 is padded by
another 32), and then to the largest image of the batch. Boxes are x1, y1, x2, y2 in pixels, and are scaled with the
image.

Source: released code of Better Schedules, cpt_voc. Differs from it in the interpolation (Pillow's bilinear, which is
antialiased), in the groups, which are redrawn in each epoch among images of similar aspect ratio, and in the smaller
last batch of an epoch, which is not filled up.

Pascal VOC 2012 (Everingham et al. 2015), and a small proxy in the same layout; torchvision lists and downloads them:

    VOCdevkit/VOC2012/ImageSets/Main/{train,val}.txt    names of images
    VOCdevkit/VOC2012/Annotations/NAME.xml              size, and for each object name and bndbox
    VOCdevkit/VOC2012/JPEGImages/NAME.jpg

VOC's boxes count pixels from 1 and include both ends; here they start at 0 and end after the last pixel: x1 - 1, y1 -
1, x2, y2. Objects marked as difficult count like all others, as the files of the released code cannot mark them; VOC's own
evaluation ignores them. Training uses `train` (5,717 images) and testing `val` (5,823 images), consistent with the released
code of Better Schedules (1,430 batches of 4); annotations of the official test set are not public.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple
from xml.etree import ElementTree

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bitcycle import distributed
from bitcycle.dataset.base import DatasetInfo, Splits, check_whole, first_samples, missing, permutation, validation_size
from bitcycle.dataset.epoch import Epoch, grouped_order
from bitcycle.dataset.images import MEAN, STD, DecodingOptions, EncodedImage, load_batches, open_image
from bitcycle.dataset.sources import download, unpack_to_cache
from bitcycle.device import to_device
from bitcycle.errors import DataError
from bitcycle.randomness import derive
from bitcycle.settings import SettingError, setting
from bitcycle.shapes import DetectionShape
from bitcycle.threads import allowed_cores

MULTIPLE = 32
"""Divisor of the padded height and width: level C5 has a stride of 2^5."""


class AnnotatedImage(NamedTuple):
    """An encoded image, its size in pixels, and its objects: boxes [M, 4] float32 in pixels, labels int64 [M]."""

    image: EncodedImage
    width: int
    height: int
    boxes: Tensor
    labels: Tensor


@dataclass
class DetectionDatasetOptions(DecodingOptions):
    """Options of all detection datasets."""

    takes_all_if_fewer = True

    class_names: ClassVar[tuple[str, ...]]
    """Class names, by class number."""
    sizes: ClassVar[tuple[int, int]]
    """Number of training and test images of the whole dataset."""
    typical_size: ClassVar[tuple[int, int]]
    """Width and height in pixels of the typical image, for which cost is counted."""

    shorter_side: int = setting(608, "shorter side of scaled images, in pixels (cpt_voc: 608)", minimum=16)
    longer_side: int = setting(1024, "maximum of the longer side, in pixels (cpt_voc: 1024)", minimum=16)
    flip: bool = setting(False, "random horizontal flips of training images (paper: no; cpt_voc: yes)")
    workers: int = min(8, allowed_cores())

    def validate(self) -> None:
        if self.longer_side < self.shorter_side:
            problem = f"is less than shorter_side={self.shorter_side}"
            raise SettingError("longer_side", self.longer_side, problem, "use a value of at least that")
        super().validate()

    def full_info(self, data_root: Path) -> DatasetInfo:
        height, width = self.scaled_size(*self.typical_size)
        shape = DetectionShape(3, self.padded(height), self.padded(width), len(self.class_names))
        return DatasetInfo(shape, *self.sizes)

    def load(self, data_root: Path, seed: int) -> Splits[list[AnnotatedImage]]:
        whole = self.read(data_root)
        train, test = first_samples(whole.train, self.train_samples), first_samples(whole.test, self.test_samples)
        held_out = validation_size(len(train), self.validation)
        if not held_out:
            return Splits(train, test, whole.validation)
        order = permutation(len(train), derive(seed, "validation")).tolist()
        validation, kept = ([train[i] for i in sorted(part)] for part in (order[:held_out], order[held_out:]))
        return Splits(kept, test, validation)

    def scaled_size(self, width: int, height: int) -> tuple[int, int]:
        """Height and width in pixels of a scaled image.

        >>> DetectionDatasetOptions("any").scaled_size(500, 375), DetectionDatasetOptions("any").scaled_size(500, 200)
        ((608, 811), (410, 1024))
        """
        scale = min(self.shorter_side / min(width, height), self.longer_side / max(width, height))
        return max(1, round(height * scale)), max(1, round(width * scale))

    def padded(self, side: int) -> int:
        """The side in pixels after padding.

        >>> DetectionDatasetOptions("any").padded(608)
        640
        """
        return (side // MULTIPLE + 1) * MULTIPLE


class DetectionBatch(NamedTuple):
    """A batch of images and their objects, in pixels of the scaled images; with several processes, a shard of it.

    Images are [N, 3, H, W], float32, normalised, channels-last, with H and W multiples of 32; boxes [N, M, 4], padded
    with 0; labels [N, M], padded with -1; sizes (height, width) before padding; `samples` counts
    the whole batch.
    """

    images: Tensor
    boxes: Tensor
    labels: Tensor
    sizes: tuple[tuple[int, int], ...]
    samples: int


class DetectionBatches:
    """Batches of the images of a split: `starting_at` yields training batches, iteration all images once, unflipped."""

    def __init__(
        self,
        images: Sequence[AnnotatedImage],
        options: DetectionDatasetOptions,
        batch_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.images, self.options, self.batch_size, self.seed, self.device = images, options, batch_size, seed, device
        self.epoch = Epoch(len(images), batch_size)
        self.sizes = [options.scaled_size(image.width, image.height) for image in images]
        self.ratios = torch.tensor([image.width / image.height for image in images], dtype=torch.float64)
        self.mean, self.std = (torch.tensor(values, device=device).view(-1, 1, 1) * 255 for values in (MEAN, STD))
        in_memory = sum(3 * height * width for height, width in self.sizes) <= options.memory_gib * 2**30
        self.scaled: Callable[[int], Tensor] = functools.partial(_scaled, images, self.sizes)
        self.scaled, self.workers = (functools.cache(self.scaled), 0) if in_memory else (self.scaled, options.workers)

    def __len__(self) -> int:
        return self.epoch.steps

    def __iter__(self) -> Iterator[DetectionBatch]:
        groups = self.ratios.argsort(stable=True).split(self.batch_size)
        return self._batches((None, group) for group in groups)

    def starting_at(self, step: int) -> Iterator[DetectionBatch]:
        """Yield batches of steps `step`, `step` + 1, ... indefinitely."""
        return self._batches(self.epoch.from_step(step, self.order))

    def order(self, epoch: int) -> list[Tensor]:
        """Image indices of each batch of an epoch, grouped by aspect ratio."""
        mixing = derive(derive(self.seed, "groups"), "order", epoch)
        return grouped_order(self.ratios, self.batch_size, len(self.ratios), self.seed, epoch, mixing)

    def _batches(self, groups: Iterable[tuple[int | None, Tensor]]) -> Iterator[DetectionBatch]:
        """This process's shard of each (epoch, samples), unless it is empty; without an epoch nothing is flipped."""
        shares = ((epoch, group.tolist(), distributed.local_shard(group).tolist()) for epoch, group in groups)
        known, asked = itertools.tee(share for share in shares if share[2])
        pictures = load_batches(self.scaled, (mine for _, _, mine in asked), self.workers, list)
        return map(self._batch, known, pictures)

    def _batch(self, share: tuple[int | None, list[int], list[int]], pictures: list[Tensor]) -> DetectionBatch:
        epoch, group, mine = share
        height, width = (self.options.padded(max(self.sizes[index][side] for index in group)) for side in (0, 1))
        images = torch.zeros(len(mine), 3, height, width, device=self.device)
        images = images.contiguous(memory_format=torch.channels_last)
        boxes = []
        for row, (index, picture) in enumerate(zip(mine, pictures, strict=True)):
            flipped = epoch is not None and self.options.flip and bool(derive(self.seed, "flip", epoch, index) & 1)
            values = to_device(picture, self.device).permute(2, 0, 1)
            values = values.flip(2) if flipped else values
            images[row, :, : values.shape[1], : values.shape[2]] = (values - self.mean) / self.std
            boxes.append(self._boxes(index, flipped))
        known = [self.images[index] for index in mine]
        labels = pad_sequence([image.labels for image in known], batch_first=True, padding_value=-1)
        padded = (to_device(part, self.device) for part in (pad_sequence(boxes, batch_first=True), labels))
        return DetectionBatch(images, *padded, tuple(self.sizes[index] for index in mine), len(group))  # type: ignore[call-arg, arg-type]

    def _boxes(self, index: int, flipped: bool) -> Tensor:
        """Boxes in pixels of the scaled image."""
        image, (height, width) = self.images[index], self.sizes[index]
        scales = torch.tensor([width / image.width, height / image.height] * 2, dtype=torch.float32)
        x1, y1, x2, y2 = (image.boxes * scales).unbind(-1)
        return torch.stack([width - x2, y1, width - x1, y2] if flipped else [x1, y1, x2, y2], dim=-1)


def _scaled(images: Sequence[AnnotatedImage], sizes: Sequence[tuple[int, int]], index: int) -> Tensor:
    """A scaled image as uint8 [H, W, 3]."""
    from PIL import Image

    record, (height, width) = images[index], sizes[index]
    picture = open_image(record.image).convert("RGB")
    if picture.size != (record.width, record.height):
        raise DataError(
            f"{record.image.origin} has {picture.width}x{picture.height} pixels, its annotation "
            f"{record.width}x{record.height}. Download the dataset again."
        )
    scaled = picture.resize((width, height), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(scaled, dtype=np.uint8))


VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)


@dataclass
class Voc2012(DetectionDatasetOptions):
    """Options of Pascal VOC 2012."""

    class_names: ClassVar[tuple[str, ...]] = VOC_CLASSES
    sizes = (5717, 5823)
    typical_size = (500, 375)
    year: ClassVar[str] = "2012"
    splits: ClassVar[tuple[str, ...]] = ("train", "val")
    """Official image lists for training, testing and, if there are three, validation."""
    folders: ClassVar[tuple[str, ...]] = ("voc2012", ".")
    """Folders below data_root that may contain VOCdevkit."""

    name: str = "voc2012"

    def read(self, data_root: Path) -> Splits[list[AnnotatedImage]]:
        root = self._devkit(data_root) or self.unpacked(data_root)
        found = [read_split(root, self.year, split, self.class_names) for split in self.splits]
        check_whole(self.name, root, "training and test images", [*map(len, found[:2])], self.sizes)
        return Splits(*found)

    def _devkit(self, data_root: Path) -> Path | None:
        """The folder that contains VOCdevkit."""
        folders = (data_root / folder for folder in self.folders)
        return next((root for root in folders if (root / f"VOCdevkit/VOC{self.year}").is_dir()), None)

    def place(self, data_root: Path) -> Path | None:
        archive = data_root / self.folders[0] / self._source["filename"]
        return self._devkit(data_root) or (archive if archive.is_file() else None)

    def absent(self, data_root: Path) -> DataError:
        put = f"the official folder VOCdevkit/VOC2012, or the official archive {self._source['filename']},"
        return missing(self.name, data_root / self.folders[0], put, " dataset=voc_small is a small proxy.")

    @property
    def _source(self) -> dict[str, str]:
        from torchvision.datasets.voc import DATASET_YEAR_DICT

        source: dict[str, str] = DATASET_YEAR_DICT[self.year]
        return source

    def unpacked(self, data_root: Path) -> Path:
        """Return the folder that contains VOCdevkit, after unpacking the archive. Raises DataError if there is no archive."""
        folder, absent = data_root / self.folders[0] / "VOCdevkit", self.absent(data_root)
        return download(self._source["url"], folder, "VOCdevkit", absent, self._source["md5"]).parent


@dataclass
class VocSmall(Voc2012):
    """Options of the proxy: 70 + 25 + 25 photographs of blood cells (BCCD) in the layout of Pascal VOC 2007."""

    class_names = ("Platelets", "RBC", "WBC")
    sizes = (70, 25)
    typical_size = (640, 480)
    has_validation = True
    year = "2007"
    splits = ("train", "test", "val")
    folders = ("voc-small", "voc_small")

    name: str = "voc_small"
    shorter_side: int = 320
    longer_side: int = 512

    def place(self, data_root: Path) -> Path | None:
        archives = (data_root / name / "VOCdevkit-small.tar" for name in self.folders)
        return self._devkit(data_root) or next(filter(Path.is_file, archives), None)

    def absent(self, data_root: Path) -> DataError:
        put = "VOCdevkit-small.tar, or the folder VOCdevkit that it unpacks to,"
        return missing(self.name, data_root / self.folders[0], put)

    def unpacked(self, data_root: Path) -> Path:
        archive = self.place(data_root)
        if archive is None:
            raise self.absent(data_root)
        return unpack_to_cache(archive)


def read_split(root: Path, year: str, split: str, class_names: tuple[str, ...]) -> list[AnnotatedImage]:
    """Images of a split in Pascal VOC's layout, not decoded, with their objects. Raises DataError for a missing or bad file."""
    from torchvision.datasets import VOCDetection

    try:
        listed = VOCDetection(str(root), year=year, image_set=split)
    except (OSError, RuntimeError) as error:
        raise DataError(f"cannot read {root}/VOCdevkit/VOC{year}: {error}. Complete the dataset.") from error
    return [_read_annotation(*files, class_names) for files in zip(listed.images, listed.annotations, strict=True)]


def _read_annotation(picture: str, annotation: str, class_names: tuple[str, ...]) -> AnnotatedImage:
    try:
        root = ElementTree.parse(annotation).getroot()
        width, height = (int(root.findtext(f"size/{side}", "")) for side in ("width", "height"))
        boxes, labels = [], []
        for element in root.iterfind("object"):
            x1, y1, x2, y2 = (
                float(element.findtext(f"bndbox/{side}", "")) for side in ("xmin", "ymin", "xmax", "ymax")
            )
            if x2 < x1 or y2 < y1:
                raise ValueError(f"box {x1:g}, {y1:g}, {x2:g}, {y2:g} ends before it begins")
            if (name := element.findtext("name", "")) not in class_names:
                raise ValueError(f"the class {name!r} is none of {', '.join(class_names)}")
            boxes.append([x1 - 1, y1 - 1, x2, y2])
            labels.append(class_names.index(name))
    except (OSError, ElementTree.ParseError, ValueError) as error:
        raise DataError(f"cannot use {annotation}: {error}. Download the dataset again.") from error
    objects = torch.tensor(boxes, dtype=torch.float32).view(-1, 4), torch.tensor(labels, dtype=torch.int64)
    image = EncodedImage(picture, Path(picture).read_bytes)
    return AnnotatedImage(image, width, height, *objects)
