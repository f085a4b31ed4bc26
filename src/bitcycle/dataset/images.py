"""Labelled images of one size: decoded once and held in memory, or decoded batch by batch where they would not fit."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bitcycle.errors import DataError

logger = logging.getLogger(__name__)

CHUNK = 500
"""Images that one thread decodes at a time; single ones would cost more to hand out than to decode."""
SMALL = 64
"""Pixels up to which one thread decodes faster than several."""


@dataclass(frozen=True)
class EncodedImage:
    """One image as its file's bytes or path, with the name to show in errors."""

    origin: str
    read: Callable[[], bytes]


class Images:
    """Labelled images as unsigned bytes [N, H, W, C].

    Args:
        pixels: uint8 [N, H, W, C].
        labels: int64 [N].
    """

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        assert len(pixels) == len(labels) and pixels.dtype == torch.uint8
        self.pixels, self.labels = pixels, labels

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: Tensor) -> Images:
        """The images at `indices`."""
        return Images(self.pixels[indices], self.labels[indices])

    def to(self, device: torch.device) -> Images:
        """The same images on a device, where batches are then made."""
        return Images(self.pixels.to(device), self.labels.to(device))

    def batches(self, index_batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(indices, pixels, labels) of each batch of indices."""
        for indices in index_batches:
            here = indices.to(self.pixels.device)
            yield indices, self.pixels[here], self.labels[here]


class StreamedImages(Images):
    """Labelled images that are decoded when a batch asks for them, by worker processes that read ahead."""

    def __init__(self, encoded: Sequence[EncodedImage], labels: Tensor, channels: int, size: int, workers: int) -> None:
        self.encoded, self.labels = encoded, labels
        self.channels, self.size, self.workers = channels, size, workers

    def subset(self, indices: Tensor) -> StreamedImages:
        encoded = [self.encoded[index] for index in indices.tolist()]
        return StreamedImages(encoded, self.labels[indices], self.channels, self.size, self.workers)

    def to(self, device: torch.device) -> StreamedImages:
        return self  # batches are moved one by one

    def batches(self, index_batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        decode = _Decode(self.encoded, self.channels, self.size)
        sampler = (indices.tolist() for indices in index_batches)
        loader: DataLoader[Any] = DataLoader(decode, batch_sampler=sampler, num_workers=self.workers)
        for pixels, indices in loader:
            yield indices, pixels, self.labels[indices]


class _Decode(Dataset[tuple[Tensor, int]]):
    def __init__(self, encoded: Sequence[EncodedImage], channels: int, size: int) -> None:
        self.encoded, self.channels, self.size = encoded, channels, size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(decode(self.encoded[index], self.channels, self.size)), index

    def __len__(self) -> int:
        return len(self.encoded)


def open_image(image: EncodedImage) -> Image.Image:
    """The decoded image.

    Raises:
        DataError: if it cannot be read, naming it.
    """
    try:
        picture = Image.open(io.BytesIO(image.read()))
        picture.load()
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise DataError(
            f"cannot read the image {image.origin}: {error}. Replace it, or remove it from the data set."
        ) from error
    return picture


def decode(image: EncodedImage, channels: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An image as uint8 [size, size, channels]; other sizes are scaled by the shorter side and cropped at the centre."""
    picture = open_image(image).convert("L" if channels == 1 else "RGB")
    if picture.size != (size, size):
        scale = size / min(picture.size)
        width, height = (max(size, round(side * scale)) for side in picture.size)
        left, top = (width - size) // 2, (height - size) // 2
        picture = picture.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))
    return np.asarray(picture, dtype=np.uint8).reshape(size, size, channels)


def decode_all(encoded: Sequence[EncodedImage], channels: int, size: int) -> Tensor:
    """All images as uint8 [N, size, size, channels], decoded by several threads; says in the log how far it is."""
    pixels = np.empty((len(encoded), size, size, channels), dtype=np.uint8)
    chunks = [range(start, min(start + CHUNK, len(encoded))) for start in range(0, len(encoded), CHUNK)]

    def decode_chunk(chunk: range) -> None:
        for index in chunk:
            pixels[index] = decode(encoded[index], channels, size)

    reported = time.monotonic()
    workers = 1 if size <= SMALL else None  # threads get in each other's way where an image takes microseconds
    with ThreadPoolExecutor(workers) as pool:
        for chunk, _ in zip(chunks, pool.map(decode_chunk, chunks), strict=True):
            if time.monotonic() - reported > 10:
                reported = time.monotonic()
                logger.info("decoded %d of %d images", chunk.stop, len(encoded))
    return torch.from_numpy(pixels)
