"""Batches of images, whose order and augmentation follow from (seed, epoch, sample), so that any step can be the first.

Augmentation happens on the device, a batch at a time, on unsigned bytes; batches come out normalised and channels-last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bitcycle import distributed
from bitcycle.dataset.epoch import Epoch
from bitcycle.dataset.image_dataset import ImageDatasetOptions
from bitcycle.dataset.images import Images, IndexBatch
from bitcycle.randomness import derive, hash_bits, int32_key


class Batch(NamedTuple):
    """Inputs [N, C, H, W], float32 and channels-last, and targets [N]."""

    inputs: Tensor
    targets: Tensor


class ImageBatches:
    """Batches of a split's images: training ones, startable at any step, and in iteration all images once, not augmented.

    Of several processes each makes its share only; one that gets nothing of a small last batch of all passes it over.

    Args:
        images: of the split.
        options: normalisation and augmentation.
        batch_size: samples a step, of all processes together.
        seed: of order and augmentation.
        device: where batches are made.
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
                yield self._batch(pixels.to(self.device), labels)

    def starting_at(self, step: int) -> Iterator[Batch]:
        """Batches of steps `step`, `step` + 1, and so on without end."""
        shares = (
            IndexBatch(distributed.local_shard(indices), derive(self.seed, "crop", epoch))
            for epoch, indices in self.epoch.shuffled(self.seed, step)
        )
        for number, (indices, pixels, labels) in enumerate(self.images.batches(shares), step):
            pixels = self._augment(pixels.to(self.device), indices.to(self.device), number // self.epoch.steps)
            yield self._batch(pixels, labels)

    def _batch(self, pixels: Tensor, labels: Tensor) -> Batch:
        return Batch(((pixels - self.mean) / self.std).permute(0, 3, 1, 2), labels.to(self.device))

    def _augment(self, pixels: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Random crop with zero padding and random horizontal flip, from (seed, epoch, sample)."""
        padding, size = self.options.crop_padding, pixels.shape[1]
        if not padding and not self.options.flip:
            return pixels
        key = torch.tensor(int32_key(self.seed, "augmentation", epoch), dtype=torch.int32, device=pixels.device)
        bits = hash_bits(indices.to(torch.int32), key).long() & 0x7FFFFFFF  # 31 of each sample, in whatever batch it is
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
    """A number in 0 .. count-1 from the lowest 11 bits."""
    return (bits & 0x7FF) * count >> 11
