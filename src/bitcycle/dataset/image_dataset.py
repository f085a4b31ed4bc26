"""Base of image datasets: normalisation, augmentation, splits, subsets and batches.

The order of batches and augmentation depend only on (seed, epoch, sample), so that training can start at any step.
Augmentation runs on the device, per batch, on unsigned bytes; batches are normalised and channels-last.

Halves of a dataset, for training on one and continuing on the other:

    first_classes, second_classes    halves of a random permutation of the classes (`torch.randperm`, generator seeded with
                                     0), in both splits; labels are renumbered in their original order
    first_samples, second_samples    every other training sample in such a permutation, stably sorted by class, so that
                                     the halves of a class differ by at most one sample; all test samples

Source: FracTrain, section 4.5 and appendix E (adaptation and fine-tuning on CIFAR-100), which does not give the split; no code.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from bitcycle import distributed
from bitcycle.dataset.base import DatasetInfo, DatasetOptions, Splits, fixed_order, logger, permutation, validation_size
from bitcycle.dataset.epoch import Epoch
from bitcycle.dataset.images import Images, IndexBatch
from bitcycle.device import scalar, to_device
from bitcycle.randomness import derive, hash_bits, int32_key
from bitcycle.settings import SettingError, setting

CLASSES, SAMPLES = ("first_classes", "second_classes"), ("first_samples", "second_samples")
PARTS = ("all", *CLASSES, *SAMPLES)


@dataclass
class ImageDatasetOptions(DatasetOptions):
    """Options of all image datasets."""

    equal_classes: ClassVar[bool] = False
    """Whether all classes have the same number of samples."""

    mean: list[float] = setting([0.5], "mean of each channel for normalisation, pixels in [0, 1]")
    std: list[float] = setting([0.5], "standard deviation of each channel for normalisation", minimum=1e-6)
    crop_padding: int = setting(0, "zero padding of training images before a random crop; 0: no crop", minimum=0)
    flip: bool = setting(False, "random horizontal flips of training images")
    part: str = setting(
        "all",
        "half of the classes, or half of each class's training samples (FracTrain, section 4.5); all: everything",
        choices=PARTS,
    )
    draw: str = setting(
        "once",
        "images that `train_samples` leaves: the same for all seeds (once), or others for each seed, so that a confidence"
        " interval covers other images, too (by_seed)",
        choices=("once", "by_seed"),
    )

    def info(self, data_root: Path) -> DatasetInfo:
        full = self.full_info(data_root)
        channels, _, classes = full.shape
        for option in ("mean", "std"):
            if len(values := getattr(self, option)) not in (1, channels):
                problem = f"images of {self.name} have {channels} channels"
                raise SettingError(option, values, problem, "give one number, or one per channel")
        if self.part in CLASSES and not self.equal_classes:
            remedy = "use first_samples or second_samples, or cifar10 or cifar100"
            raise SettingError("part", self.part, f"classes of {self.name} may differ in size", remedy)
        counts = zip(full[1:], (True, False), strict=True)
        sizes = (size_of(self.part, samples, classes, training) for samples, training in counts)
        shape = full.shape._replace(classes=len(classes_of(self.part, classes)))
        return self.without_validation(self.limited(DatasetInfo(shape, *sizes)))

    def load(self, data_root: Path, seed: int) -> Splits[Images]:
        classes, whole = self.full_info(data_root).shape.classes, self.read(data_root)
        drawn = 0 if self.draw == "once" else derive(seed, "subset")
        train = first_images(take_part(whole.train, self.part, classes, True), self.train_samples, drawn).decoded()
        test = first_images(take_part(whole.test, self.part, classes, False), self.test_samples).decoded()
        if len(present := train.labels.unique()) == 1 and classes > 1:
            logger.warning("all %d training images belong to class %d: nothing can be learned", len(train), present[0])
        count = validation_size(len(train), self.validation)
        if count == 0:
            return Splits(train, test)
        held_out = validation_mask(train.labels, count, derive(seed, "validation"))
        return Splits(train.subset(~held_out), test, train.subset(held_out))


def first_images(images: Images, count: int | None, seed: int = 0) -> Images:
    """The first `count` images of a random order that depends on `seed` alone; all for None, or if there are no more."""
    return images if count is None or count >= len(images) else images.subset(fixed_order(len(images), count, seed))


def validation_mask(labels: Tensor, count: int, seed: int) -> Tensor:
    """Mask of `count` held-out samples, stratified by class as far as integers allow, otherwise random by `seed`.

    >>> mask = validation_mask(torch.tensor([0] * 8 + [1] * 4), 3, seed=0)
    >>> mask[:8].sum().item(), mask[8:].sum().item()
    (2, 1)
    """
    generator = torch.Generator().manual_seed(seed)
    classes, sizes = labels.unique(return_counts=True)
    quotas = sizes.double() * count / len(labels)
    counts = quotas.floor().long()
    # Largest remainder method; ties are broken at random.
    order = torch.randperm(len(classes), generator=generator)
    by_remainder = order[(quotas - counts)[order].argsort(descending=True, stable=True)]
    counts[by_remainder[: count - int(counts.sum())]] += 1
    return draw_of_classes(labels, dict(zip(classes.tolist(), counts.tolist(), strict=True)), generator)


def draw_of_classes(labels: Tensor, counts: Mapping[int, int], generator: torch.Generator) -> Tensor:
    """Mask of the given number of random samples of each class."""
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for label, count in counts.items():
        members = (labels == label).nonzero().flatten()
        mask[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    return mask


def classes_of(part: str, classes: int) -> Tensor:
    """Classes of a part, in ascending order, given the number of all classes."""
    if part not in CLASSES:
        return torch.arange(classes)
    return permutation(classes).tensor_split([classes // 2])[CLASSES.index(part)].sort().values


def size_of(part: str, samples: int, classes: int, training: bool) -> int:
    """Number of samples of a split in a part, if all classes have the same size."""
    if part in CLASSES:
        return samples // classes * len(classes_of(part, classes))
    if part in SAMPLES and training:
        return (samples + (part == "first_samples")) // 2
    return samples


def take_part(images: Images, part: str, classes: int, training: bool) -> Images:
    """Images of a split that belong to a part."""
    if part in CLASSES:
        kept = classes_of(part, classes)
        chosen = images.subset(torch.isin(images.labels, kept))
        chosen.labels = torch.searchsorted(kept, chosen.labels)
        return chosen
    if part in SAMPLES and training:
        order = permutation(len(images))
        by_class = order[images.labels[order].argsort(stable=True)]
        return images.subset(by_class[SAMPLES.index(part) :: 2].sort().values)
    return images


class Batch(NamedTuple):
    """Inputs [N, C, H, W], float32 and channels-last, and targets [N]."""

    inputs: Tensor
    targets: Tensor


class ImageBatches:
    """Batches of the images of a split: `starting_at` yields training batches, iteration all images once, not augmented.

    With several processes, each makes its shard only, and skips a batch of which it has none; `batch_size` counts over all.
    """

    def __init__(
        self, images: Images, options: ImageDatasetOptions, batch_size: int, seed: int, device: torch.device
    ) -> None:
        self.images, self.options = images.to(device), options
        self.epoch, self.seed, self.device = Epoch(len(images), batch_size), seed, device
        self.mean, self.std = (torch.tensor(values, device=device) * 255 for values in (options.mean, options.std))

    def __len__(self) -> int:
        return self.epoch.steps

    def __iter__(self) -> Iterator[Batch]:
        shares = list(distributed.local_batches(len(self.images), self.epoch.samples_per_step))
        made = self.images.batches(IndexBatch(mine) for _, mine in shares)
        for (batch, _), (_, pixels, labels) in zip(shares, made, strict=True):
            with distributed.sharded(len(batch)):
                yield self._batch(to_device(pixels, self.device), labels)

    def starting_at(self, step: int) -> Iterator[Batch]:
        """Yield batches of steps `step`, `step` + 1, ... indefinitely."""
        shares = (
            IndexBatch(distributed.local_shard(indices), derive(self.seed, "crop", epoch))
            for epoch, indices in self.epoch.shuffled(self.seed, step)
        )
        for number, (indices, pixels, labels) in enumerate(self.images.batches(shares), step):
            pixels = self._augment(
                to_device(pixels, self.device), to_device(indices, self.device), number // self.epoch.steps
            )
            yield self._batch(pixels, labels)

    def _batch(self, pixels: Tensor, labels: Tensor) -> Batch:
        return Batch(((pixels - self.mean) / self.std).permute(0, 3, 1, 2), to_device(labels, self.device))

    def _augment(self, pixels: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Random crop with zero padding and random horizontal flip, determined by (seed, epoch, sample)."""
        padding, size = self.options.crop_padding, pixels.shape[1]
        if not padding and not self.options.flip:
            return pixels
        key = scalar(int32_key(self.seed, "augmentation", epoch), torch.int32, pixels.device)
        bits = hash_bits(indices.to(torch.int32), key).long() & 0x7FFFFFFF  # 31 bits, independent of the batch
        rows = torch.arange(size, device=pixels.device).repeat(len(indices), 1)
        columns = rows
        if self.options.flip:
            columns = torch.where((bits >> 30)[:, None] == 1, size - 1 - columns, columns)
        if padding:
            pixels = torch.nn.functional.pad(pixels, (0, 0, padding, padding, padding, padding))
            rows = rows + _choice(bits, 2 * padding + 1)[:, None]
            columns = columns + _choice(bits >> 11, 2 * padding + 1)[:, None]
        images = torch.arange(len(indices), device=pixels.device)
        return pixels[images[:, None, None], rows[:, :, None], columns[:, None, :]]


def _choice(bits: Tensor, count: int) -> Tensor:
    """Map the lowest 11 bits to 0 .. count-1."""
    return (bits & 0x7FF) * count >> 11
