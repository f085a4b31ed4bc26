"""Labelled images of one size: decoded once and held in memory, or decoded batch by batch where they would not fit."""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bitcycle import distributed
from bitcycle.cache import kept
from bitcycle.dataset.base import DatasetOptions, logger
from bitcycle.errors import DataError
from bitcycle.randomness import derive
from bitcycle.settings import setting

CHUNK = 500
"""Images that one thread decodes at a time; single ones would cost more to hand out than to decode."""
WORTH_KEEPING = 10_000
"""Images from which decoding takes seconds, and looking them up in the user's cache does not."""
MOST_BYTES = 2**29
"""Bytes of pixels up to which they are kept there: CIFAR's 154 MB, not ImageNet's 193 GB."""
SMALL = 64
"""Pixels up to which one thread decodes faster than several."""
GREY_MODES = ("1", "L", "LA", "I", "I;16", "I;16B", "I;16L")
"""Pillow's modes of grey images; those that begin with I have 16 bits."""


class EncodedImage(NamedTuple):
    """One image as its file's bytes or path, with the name to show in errors."""

    origin: str
    read: Callable[[], bytes]


class Framing(NamedTuple):
    """How an image of any size becomes `size` x `size` pixels.

    Attributes:
        size: pixels of the result.
        resize: the shorter side is scaled to this before the centre is cut out (ImageNet: 256 for 224).
        random_crop: training images are cut out at random places, sizes and aspect ratios instead.
    """

    size: int
    resize: int
    random_crop: bool = False


class IndexBatch(NamedTuple):
    """Which samples are in a batch, and what their random crops depend on beside their index: (seed, epoch)."""

    indices: Tensor
    crop_seed: int = 0


@dataclass
class DecodingOptions(DatasetOptions):
    """Options of data sets whose decoded images may be more than memory holds."""

    memory_gib: float = setting(
        4.0, "images are held in memory up to this size, else decoded batch by batch", minimum=0, affects_result=False
    )
    workers: int = setting(
        min(16, os.cpu_count() or 1),
        "processes that decode where images are not held in memory",
        minimum=0,
        affects_result=False,
    )


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

    def subset(self, chosen: Tensor) -> Images:
        """The images of indices, or of a mask."""
        return Images(self.pixels[chosen], self.labels[chosen])

    def decoded(self) -> Images:
        """The same images, ready for batches."""
        return self

    def for_evaluation(self) -> Images:
        """The same images, none of them framed at random."""
        return self

    def to(self, device: torch.device) -> Images:
        """The same images on a device, where batches are then made."""
        return Images(self.pixels.to(device), self.labels.to(device))

    def batches(self, index_batches: Iterable[IndexBatch]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Indices [N], uint8 pixels [N, H, W, C] and labels [N] of each batch."""
        for indices, _ in index_batches:
            here = indices.to(self.pixels.device)
            yield here, self.pixels[here], self.labels[here]


class EncodedImages(Images):
    """Labelled images that are decoded once, after a part of them may have been chosen, or when a batch asks for them.

    Args:
        encoded, labels: the images.
        channels: 1 or 3.
        framing: how an image becomes `size` x `size` pixels.
        workers: processes that decode batches ahead, for all that train on this machine together; 0: this one does; None: all
            images are decoded at once, and held in memory.
    """

    def __init__(
        self,
        encoded: Sequence[EncodedImage],
        labels: Tensor,
        channels: int,
        framing: Framing,
        workers: int | None = None,
    ) -> None:
        self.encoded, self.labels = encoded, labels
        self.channels, self.framing, self.workers = channels, framing, workers

    def subset(self, chosen: Tensor) -> EncodedImages:
        part, indices = copy.copy(self), torch.arange(len(self))[chosen].tolist()
        part.encoded, part.labels = [self.encoded[index] for index in indices], self.labels[chosen]
        return part

    def decoded(self) -> Images:
        """The images, which are decoded once on a machine if that takes seconds, not once in each of hundreds of runs."""
        if self.workers is not None:
            return self
        shape = (len(self.encoded), self.framing.size, self.framing.size, self.channels)
        decode = partial(decode_all, self.encoded, self.channels, self.framing)
        if shape[0] < WORTH_KEEPING or math.prod(shape) > MOST_BYTES:
            return Images(decode(), self.labels)
        digest = hashlib.sha256(PIL.__version__.encode())  # of all that decoding depends on
        try:
            for part in itertools.chain(
                [repr((self.channels, self.framing)).encode()], (i.read() for i in self.encoded)
            ):
                digest.update(len(part).to_bytes(8, "little") + part)
        except OSError:
            return Images(decode(), self.labels)  # which names the image that cannot be read

        def read(file: Path) -> Tensor:
            pixels = np.load(file)
            if pixels.shape != shape or pixels.dtype != np.uint8:
                raise ValueError(f"it holds {pixels.dtype} {pixels.shape} instead of {shape}")
            return torch.from_numpy(pixels)

        name = f"pixels-{digest.hexdigest()[:32]}.npy"
        return Images(kept(name, decode, read, lambda file, pixels: np.save(file, pixels.numpy())), self.labels)

    def for_evaluation(self) -> EncodedImages:
        whole = copy.copy(self)
        whole.framing = self.framing._replace(random_crop=False)
        return whole

    def to(self, device: torch.device) -> EncodedImages:
        return self  # batches are moved one by one

    def batches(self, index_batches: Iterable[IndexBatch]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        sampler = ([(crop_seed, index) for index in indices.tolist()] for indices, crop_seed in index_batches)
        workers = -(-(self.workers or 0) // distributed.local_world_size())
        for pixels, indices in load_batches(_Decode(self.encoded, self.channels, self.framing), sampler, workers):
            yield indices, pixels, self.labels[indices]


def load_batches(
    items: Dataset[Any], keys: Iterable[list[Any]], workers: int, collate: Callable[[list[Any]], Any] | None = None
) -> Iterator[Any]:
    """A batch of `items` for each list of keys, made by so many processes that read ahead.

    Raises:
        DataError: of an item, whichever process finds it.
    """
    loader: DataLoader[Any] = DataLoader(
        items,
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=collate,
        worker_init_fn=_leave_process_group,
    )
    try:
        yield from loader
    except DataError as error:  # of a worker, with the worker's traceback in its text
        raise DataError(str(error).strip().rsplit("DataError: ", 1)[-1]) from error


def _leave_process_group(worker: int) -> None:
    """Ctrl-C and `timeout` signal a whole group; the parent stops its workers itself, when its checkpoint is saved."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM's warning, which may go to every process of a job


class _Decode(Dataset[tuple[Tensor, int]]):
    def __init__(self, encoded: Sequence[EncodedImage], channels: int, framing: Framing) -> None:
        self.encoded, self.channels, self.framing = encoded, channels, framing

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        generator = random.Random(derive(*key)) if self.framing.random_crop else None
        return torch.from_numpy(decode(self.encoded[key[1]], self.channels, self.framing, generator)), key[1]


def open_image(image: EncodedImage) -> Image.Image:
    """The decoded image.

    Raises:
        DataError: if it cannot be read, naming it.
    """
    try:
        picture = Image.open(io.BytesIO(image.read()))
        picture.load()
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        remedy = "Replace it, or remove it from the data set"
        raise DataError(f"cannot read the image {image.origin}: {error}. {remedy}.") from error
    return picture


def decode(
    image: EncodedImage, channels: int, framing: Framing, generator: random.Random | None = None
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An image as uint8 [size, size, channels], framed at random with a generator, at the centre without one."""
    picture = _as_bytes(open_image(image), channels, image.origin)
    size = (framing.size, framing.size)
    if generator is not None:
        box = random_box(picture.width, picture.height, generator)
        picture = picture.resize(size, Image.Resampling.BILINEAR, box=box)
    elif picture.size != size or framing.resize != framing.size:
        side = min(picture.size) * framing.size / framing.resize
        box = central_box(picture.width, picture.height, side)
        picture = picture.resize(size, Image.Resampling.BILINEAR, box=box)
    return np.array(picture, dtype=np.uint8).reshape(*size, channels)


def _as_bytes(picture: Image.Image, channels: int, origin: str) -> Image.Image:
    """The picture with 8 bits for each of 1 or 3 channels."""
    is_grey = picture.mode in GREY_MODES
    if picture.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
        values = np.asarray(picture).astype(np.int64)
        picture = Image.fromarray((values.clip(0, 65535) // 257).astype(np.uint8))
    elif picture.mode == "F":
        raise DataError(f"the image {origin} has floating-point pixels, whose range is not known; convert it to 8 bits")
    if channels == 1 and not is_grey:
        raise DataError(f"the image {origin} is coloured, while the first one is grey; set dataset.channels=3")
    return picture.convert("L" if channels == 1 else "RGB")


def random_box(width: int, height: int, generator: random.Random) -> tuple[float, float, float, float]:
    """A box of 8 % to 100 % of the area and an aspect ratio of 3/4 to 4/3: left, top, right, bottom in pixels.

    The distribution of torchvision's RandomResizedCrop, with the whole shorter side where ten tries find no box that fits.
    """
    for _ in range(10):
        area = width * height * generator.uniform(0.08, 1)
        ratio = math.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3)))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, top = generator.randint(0, width - box_width), generator.randint(0, height - box_height)
            return left, top, left + box_width, top + box_height
    return central_box(width, height, min(width, height))


def central_box(width: int, height: int, side: float) -> tuple[float, float, float, float]:
    """The square of `side` pixels in the middle: left, top, right, bottom in pixels."""
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def decode_all(encoded: Sequence[EncodedImage], channels: int, framing: Framing) -> Tensor:
    """All images as uint8 [N, size, size, channels], decoded by several threads; says in the log how far it is."""
    size = framing.size
    pixels = np.empty((len(encoded), size, size, channels), dtype=np.uint8)
    chunks = [range(start, min(start + CHUNK, len(encoded))) for start in range(0, len(encoded), CHUNK)]

    def decode_chunk(chunk: range) -> None:
        for index in chunk:
            pixels[index] = decode(encoded[index], channels, framing)

    reported = time.monotonic()
    workers = 1 if size <= SMALL else None  # threads get in each other's way where an image takes microseconds
    with ThreadPoolExecutor(workers) as pool:
        for chunk, _ in zip(chunks, pool.map(decode_chunk, chunks), strict=True):
            if time.monotonic() - reported > 10:
                reported = time.monotonic()
                logger.info("decoded %d of %d images", chunk.stop, len(encoded))
    return torch.from_numpy(pixels)
