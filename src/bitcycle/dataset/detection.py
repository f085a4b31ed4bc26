"""Images with objects in boxes: scaled, normalised, padded, and grouped into batches of similar shape.

The shorter side becomes `shorter_side` pixels, unless the longer one would exceed `longer_side`. Normalised images are padded
with zeros on the right and below to a multiple of 32, by a whole 32 where they have one already, and to the largest of the batch.
Boxes are x1, y1, x2, y2 in pixels, and grow with the image.

Source: released code of Better Schedules, cpt_voc. Differs from it in the interpolation (Pillow's bilinear one, which smooths
when it shrinks), and in the groups, drawn in each epoch among images of the same aspect ratio; the smaller last
batch of an epoch is not filled up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Optional

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from bitcycle import distributed
from bitcycle.dataset.base import DatasetInfo, DatasetOptions, fixed_order, validation_size
from bitcycle.dataset.epoch import Epoch
from bitcycle.dataset.images import EncodedImage, load_batches, open_image
from bitcycle.dataset.pipeline import epoch_order
from bitcycle.errors import DataError
from bitcycle.randomness import derive
from bitcycle.settings import SettingError, setting
from bitcycle.shapes import DetectionShape

MULTIPLE = 32
"""Sides of what the network sees: its deepest level but two halves them five times."""


class Objects(NamedTuple):
    """The objects of an image: boxes [M, 4] float32 in pixels, classes [M] int64, and whether each is difficult, bool [M]."""

    boxes: Tensor
    labels: Tensor
    difficult: Tensor


class AnnotatedImage(NamedTuple):
    """An image as it lies on disk, its size in pixels and its objects."""

    image: EncodedImage
    width: int
    height: int
    objects: Objects


class DetectionSplits(NamedTuple):
    """Images for training, for choosing (None: not in the data set) and for testing."""

    train: list[AnnotatedImage]
    validation: list[AnnotatedImage] | None
    test: list[AnnotatedImage]


@dataclass
class DetectionDatasetOptions(DatasetOptions):
    """Options that every data set of objects in boxes has."""

    class_names: ClassVar[tuple[str, ...]]
    """The classes, in the order of their numbers."""
    sizes: ClassVar[tuple[int, int]]
    """Training and test images of the whole data set."""
    typical_size: ClassVar[tuple[int, int]]
    """Width and height in pixels of its typical image, whose cost is counted."""

    shorter_side: int = setting(
        608, "pixels that the shorter side is scaled to (cpt_voc: 608); fewer are faster", minimum=16
    )
    longer_side: int = setting(1024, "upper limit on the longer side, in pixels (cpt_voc: 1024)", minimum=16)
    extra_padding: bool = setting(
        True, "sides that are a multiple of 32 already are padded by another 32 (cpt_voc); false: left as they are"
    )
    flip: bool = setting(False, "training images are flipped horizontally at random (paper: no; cpt_voc: yes)")
    mean: list[float] = setting([0.485, 0.456, 0.406], "mean of each channel, pixels in [0, 1]")
    std: list[float] = setting([0.229, 0.224, 0.225], "standard deviation of each channel", minimum=1e-6)
    memory_gib: float = setting(
        4.0,
        "scaled images are held in memory up to this size, else decoded batch by batch",
        minimum=0,
        affects_result=False,
    )
    workers: int = setting(
        min(8, os.cpu_count() or 1),
        "processes that decode where images are not held in memory",
        minimum=0,
        affects_result=False,
    )

    def validate(self) -> None:
        if self.longer_side < self.shorter_side:
            problem = f"is less than shorter_side={self.shorter_side}"
            raise SettingError("longer_side", self.longer_side, problem, "use at least as much")
        for option in ("mean", "std"):
            if len(values := getattr(self, option)) not in (1, 3):
                raise SettingError(option, values, "images have 3 channels", "give one number, or three")
        super().validate()

    def read(self, data_root: Path) -> DetectionSplits:
        """All splits, whole.

        Raises:
            DataError: if the data are missing or cannot be read.
        """
        raise NotImplementedError

    def info(self, data_root: Path) -> DatasetInfo:
        height, width = self.scaled_size(*self.typical_size)
        shape = DetectionShape(3, self.padded(height), self.padded(width), len(self.class_names))
        limits = zip((self.train_samples, self.test_samples), self.sizes, strict=True)
        return self.without_validation(DatasetInfo(shape, *(min(wanted or size, size) for wanted, size in limits)))

    def load(self, data_root: Path, seed: int) -> DetectionSplits:
        """The images that are used of all splits; `seed` says which are held out for choosing.

        train_samples and test_samples take the first so many of an order that is the same for every run.

        Raises:
            DataError: if the data are missing or cannot be read.
        """
        splits = self.read(data_root)
        train, test = _chosen(splits.train, self.train_samples), _chosen(splits.test, self.test_samples)
        held_out = validation_size(len(train), self.validation)
        if not held_out:
            return DetectionSplits(train, splits.validation, test)
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(derive(seed, "validation"))).tolist()
        validation, kept = sorted(order[:held_out]), sorted(order[held_out:])
        return DetectionSplits([train[i] for i in kept], [train[i] for i in validation], test)

    def scaled_size(self, width: int, height: int) -> tuple[int, int]:
        """Height and width in pixels that an image is scaled to.

        >>> DetectionDatasetOptions("any").scaled_size(500, 375), DetectionDatasetOptions("any").scaled_size(500, 200)
        ((608, 811), (410, 1024))
        """
        scale = min(self.shorter_side / min(width, height), self.longer_side / max(width, height))
        return max(1, round(height * scale)), max(1, round(width * scale))

    def padded(self, side: int) -> int:
        """The side in pixels after padding.

        >>> DetectionDatasetOptions("any").padded(608), DetectionDatasetOptions("any", extra_padding=False).padded(608)
        (640, 608)
        """
        return (side // MULTIPLE + 1 if self.extra_padding else -(-side // MULTIPLE)) * MULTIPLE


def _chosen(images: list[AnnotatedImage], count: int | None) -> list[AnnotatedImage]:
    return [images[index] for index in fixed_order(len(images), count).tolist()]


class DetectionBatch(NamedTuple):
    """A batch of images and their objects, in pixels of the scaled images; of several processes this one's share.

    Attributes:
        images: [N, 3, H, W], float32, normalised, channels-last; H and W multiples of 32.
        boxes: [N, M, 4]; rows without an object are 0.
        labels: [N, M]; -1 for no object.
        difficult: bool [N, M].
        sizes: (height, width) of each image before it was padded.
        samples: images of the whole batch.
    """

    images: Tensor
    boxes: Tensor
    labels: Tensor
    difficult: Tensor
    sizes: tuple[tuple[int, int], ...]
    samples: int


class DetectionImages:
    """Images of a split, scaled; batches of any of them, in which a flip follows from (seed, epoch, sample).

    Args:
        images: as they lie on disk.
        options: of the data set.
        seed: of flips.
        device: where batches are made.
    """

    def __init__(
        self, images: Sequence[AnnotatedImage], options: DetectionDatasetOptions, seed: int, device: torch.device
    ) -> None:
        self.images, self.options, self.seed, self.device = images, options, seed, device
        self.sizes = [options.scaled_size(image.width, image.height) for image in images]
        self.mean = torch.tensor(options.mean, device=device).view(-1, 1, 1) * 255
        self.std = torch.tensor(options.std, device=device).view(-1, 1, 1) * 255
        in_memory = sum(3 * height * width for height, width in self.sizes) <= options.memory_gib * 2**30
        self.scaled = _Scaled(images, self.sizes, in_memory)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def ratios(self) -> Tensor:
        """Width divided by height of each image."""
        return torch.tensor([image.width / image.height for image in self.images], dtype=torch.float64)

    def batches(self, groups: Iterator[tuple[int | None, list[int]]]) -> Iterator[DetectionBatch]:
        """The share of the batch of each (epoch, samples), unless it is empty; without epoch nothing is flipped."""
        known: list[list[int]] = []

        def keys() -> Iterator[list[tuple[int | None, int]]]:
            for epoch, group in groups:
                if mine := distributed.local_shard(torch.tensor(group)).tolist():
                    known.append(group)
                    yield [(epoch, index) for index in mine]

        workers = 0 if self.scaled.cache is not None else self.options.workers
        for batch in load_batches(self.scaled, keys(), workers, list):
            yield self._batch(known.pop(0), batch)

    def _batch(self, group: list[int], batch: list[tuple[int | None, int, Tensor]]) -> DetectionBatch:
        """The batch of some images of a group, whose largest one it has room for."""
        indices = [index for _, index, _ in batch]
        sizes = tuple(self.sizes[index] for index in indices)
        height, width = (self.options.padded(max(self.sizes[index][side] for index in group)) for side in (0, 1))
        images = torch.zeros(len(indices), 3, height, width, device=self.device)
        images = images.contiguous(memory_format=torch.channels_last)
        boxes = []
        for row, (epoch, index, picture) in enumerate(batch):
            flipped = epoch is not None and self.options.flip and bool(derive(self.seed, "flip", epoch, index) & 1)
            values = picture.to(self.device).permute(2, 0, 1)
            values = values.flip(2) if flipped else values
            images[row, :, : sizes[row][0], : sizes[row][1]] = (values - self.mean) / self.std
            boxes.append(self._boxes(index, flipped))
        objects = [self.images[index].objects for index in indices]
        labels = pad_sequence([each.labels for each in objects], batch_first=True, padding_value=-1)
        difficult = pad_sequence([each.difficult for each in objects], batch_first=True)
        padded = pad_sequence(boxes, batch_first=True).to(self.device)
        return DetectionBatch(images, padded, labels.to(self.device), difficult.to(self.device), sizes, len(group))

    def _boxes(self, index: int, flipped: bool) -> Tensor:
        """Boxes in pixels of the scaled image."""
        image, (height, width) = self.images[index], self.sizes[index]
        scales = torch.tensor([width / image.width, height / image.height] * 2, dtype=torch.float32)
        x1, y1, x2, y2 = (image.objects.boxes * scales).unbind(-1)
        return torch.stack([width - x2, y1, width - x1, y2] if flipped else [x1, y1, x2, y2], dim=-1)


class _Scaled(Dataset[tuple[Optional[int], int, Tensor]]):
    """Scaled images as bytes [H, W, 3], decoded when they are first asked for, and kept if there is room."""

    def __init__(self, images: Sequence[AnnotatedImage], sizes: Sequence[tuple[int, int]], keep: bool) -> None:
        self.images, self.sizes = images, sizes
        self.cache: dict[int, Tensor] | None = {} if keep else None

    def __getitem__(self, key: tuple[int | None, int]) -> tuple[int | None, int, Tensor]:
        epoch, index = key
        kept = {} if self.cache is None else self.cache
        if index not in kept:
            kept[index] = self._decode(index)
        return epoch, index, kept[index]

    def _decode(self, index: int) -> Tensor:
        record, (height, width) = self.images[index], self.sizes[index]
        picture = open_image(record.image).convert("RGB")
        if picture.size != (record.width, record.height):
            raise DataError(
                f"{record.image.origin} is {picture.width}x{picture.height} pixels, its annotation says "
                f"{record.width}x{record.height}. Fetch the data set again."
            )
        scaled = picture.resize((width, height), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(scaled, dtype=np.uint8))


def grouped_order(ratios: Tensor, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of an epoch: images of similar aspect ratio together, batches in random order, the smaller one last.

    Args:
        ratios: of the images.
        batch_size: images in a full batch.
        seed, epoch: what the order depends on.
    """
    order = epoch_order(len(ratios), seed, epoch)
    full = len(order) // batch_size * batch_size
    grouped = order[:full][ratios[order[:full]].argsort(stable=True)]
    groups = grouped.view(-1, batch_size)
    shuffled = groups[epoch_order(len(groups), derive(seed, "groups"), epoch)].tolist()
    return shuffled + ([order[full:].tolist()] if full < len(order) else [])


class DetectionTrainingBatches:
    """The endless sequence of training batches, startable at any step; arguments as `DetectionImages`."""

    def __init__(
        self,
        images: Sequence[AnnotatedImage],
        options: DetectionDatasetOptions,
        batch_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.images = DetectionImages(images, options, seed, device)
        self.epoch, self.batch_size, self.seed = Epoch(len(images), batch_size), batch_size, seed

    def starting_at(self, step: int) -> Iterator[DetectionBatch]:
        """Batches of steps `step`, `step` + 1, and so on without end."""
        return self.images.batches(self._groups(step))

    def _groups(self, step: int) -> Iterator[tuple[int | None, list[int]]]:
        epoch, position = divmod(step, self.epoch.steps)
        ratios = self.images.ratios
        while True:
            for group in grouped_order(ratios, self.batch_size, self.seed, epoch)[position:]:
                yield epoch, group
            epoch, position = epoch + 1, 0


class DetectionEvaluationBatches:
    """All images of a split, by aspect ratio, unflipped; can be gone through many times."""

    def __init__(
        self,
        images: Sequence[AnnotatedImage],
        options: DetectionDatasetOptions,
        batch_size: int,
        device: torch.device,
    ) -> None:
        self.images, self.batch_size = DetectionImages(images, options, 0, device), batch_size

    def __iter__(self) -> Iterator[DetectionBatch]:
        order = self.images.ratios.argsort(stable=True)
        return self.images.batches((None, group.tolist()) for group in order.split(self.batch_size))

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)
