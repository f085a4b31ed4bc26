"""Labelled images of one size: decoded once and held in memory, or decoded batch by batch where they would not fit."""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple

import numpy as np
import PIL
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
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

    The shorter side is scaled to `resize` before the centre is cut out (ImageNet: 256 for 224). With `random_crop`, training
    images are cut out at random places, sizes and aspect ratios instead.
    """

    size: int
    resize: int
    random_crop: bool = False


class IndexBatch(NamedTuple):
    """Which samples are in a batch, and what their random crops depend on beside their index; None: none is random."""

    indices: Tensor
    crop_seed: int | None = None


@dataclass
class DecodingOptions(DatasetOptions):
    """Options of data sets whose decoded images may be more than memory holds."""

    memory_gib: float = setting(4.0, "images up to this size are held in memory", minimum=0, affects_result=False)
    workers: int = setting(
        min(16, os.cpu_count() or 1), "processes that decode what is not in memory", minimum=0, affects_result=False
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

    def to(self, device: torch.device) -> Images:
        """The same images on a device, where batches are then made."""
        return Images(self.pixels.to(device), self.labels.to(device))

    def batches(self, index_batches: Iterable[IndexBatch]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Indices [N], uint8 pixels [N, H, W, C] and labels [N] of each batch."""
        for indices, _ in index_batches:
            here = indices.to(self.pixels.device)
            yield here, self.pixels[here], self.labels[here]


@dataclass(eq=False)
class EncodedImages(Images):
    """Labelled images that are decoded once, after a part of them may have been chosen, or when a batch asks for them.

    Args:
        encoded, labels, class_names: the images, and what labels 0, 1, ... stand for.
        channels: 1 or 3.
        framing: how an image becomes `size` x `size` pixels.
        workers: processes that decode batches ahead, for all that train on this machine together; 0: this one does; None: all
            images are decoded at once, and held in memory.
    """

    encoded: Sequence[EncodedImage]
    labels: Tensor
    class_names: tuple[str, ...]
    channels: int = 3
    framing: Framing = Framing(32, 32)
    workers: int | None = None

    def subset(self, chosen: Tensor) -> EncodedImages:
        indices = torch.arange(len(self))[chosen].tolist()
        return replace(self, encoded=[self.encoded[index] for index in indices], labels=self.labels[chosen])

    def decoded(self) -> Images:
        """The images, which are decoded once on a machine if that takes seconds, not once in each of hundreds of runs."""
        if self.workers is not None:
            return self
        decode = partial(decode_all, self.encoded, self.channels, self.framing)
        if len(self) < WORTH_KEEPING or len(self) * self.framing.size**2 * self.channels > MOST_BYTES:
            return Images(decode(), self.labels)
        digest = hashlib.sha256(PIL.__version__.encode())  # of all that decoding depends on
        options = repr((self.channels, self.framing)).encode()
        try:
            for part in itertools.chain([options], (image.read() for image in self.encoded)):
                digest.update(len(part).to_bytes(8, "little") + part)
        except OSError:
            return Images(decode(), self.labels)  # which names the image that cannot be read
        name = f"pixels-{digest.hexdigest()[:32]}.npy"
        pixels = kept(name, decode, lambda file: torch.from_numpy(np.load(file)), lambda file, x: np.save(file, x))
        return Images(pixels, self.labels)

    def to(self, device: torch.device) -> EncodedImages:
        return self  # batches are moved one by one

    def batches(self, index_batches: Iterable[IndexBatch]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        crops = self.framing.random_crop
        sampler = ([(seed if crops else None, index) for index in indices.tolist()] for indices, seed in index_batches)
        workers = -(-(self.workers or 0) // distributed.local_world_size())
        for pixels, indices in load_batches(self._decoded, sampler, workers):
            yield indices, pixels, self.labels[indices]

    def _decoded(self, key: tuple[int | None, int]) -> tuple[Tensor, int]:
        crop_seed, index = key
        generator = None if crop_seed is None else random.Random(derive(crop_seed, index))
        return torch.from_numpy(decode(self.encoded[index], self.channels, self.framing, generator)), index


class _Items(Dataset[Any]):
    def __init__(self, item: Callable[[Any], Any]) -> None:
        self.item = item

    def __getitem__(self, key: Any) -> Any:
        return self.item(key)


def load_batches(
    item: Callable[[Any], Any],
    keys: Iterable[list[Any]],
    workers: int,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Iterator[Any]:
    """A batch of `item(key)` for each list of keys, made by so many processes that read ahead.

    Raises:
        DataError: of an item, whichever process finds it.
    """
    options: dict[str, Any] = {"num_workers": workers, "collate_fn": collate, "worker_init_fn": _leave_process_group}
    try:
        yield from DataLoader(_Items(item), batch_sampler=keys, **options)
    except DataError as error:  # of a worker, with the worker's traceback in its text
        raise DataError(str(error).strip().rsplit("DataError: ", 1)[-1]) from error


def _leave_process_group(worker: int) -> None:
    """Ctrl-C and `timeout` signal a whole group; the parent stops its workers itself, when its checkpoint is saved."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM's warning, which may go to every process of a job


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
    if generator and (box := random_box(*picture.size, generator)):
        picture = picture.resize(size, Image.Resampling.BILINEAR, box=box)
    else:
        bleed = 0 if generator else (1 - framing.size / framing.resize) / 2
        picture = ImageOps.fit(picture, size, Image.Resampling.BILINEAR, bleed)
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


def random_box(width: int, height: int, generator: random.Random) -> tuple[int, int, int, int] | None:
    """A box of 8 % to 100 % of the area and an aspect ratio of 3/4 to 4/3: left, top, right, bottom in pixels.

    The distribution of torchvision's RandomResizedCrop; None where ten tries find no box that fits.
    """
    for _ in range(10):
        area = width * height * generator.uniform(0.08, 1)
        ratio = math.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3)))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, top = generator.randint(0, width - box_width), generator.randint(0, height - box_height)
            return left, top, left + box_width, top + box_height
    return None


def decode_all(encoded: Sequence[EncodedImage], channels: int, framing: Framing) -> Tensor:
    """All images as uint8 [N, size, size, channels], decoded by several threads; says in the log how far it is."""
    size, reported = framing.size, time.monotonic()
    pixels = np.empty((len(encoded), size, size, channels), dtype=np.uint8)
    workers = 1 if size <= SMALL else None  # threads get in each other's way where an image takes microseconds
    with ThreadPool(workers) as pool:
        for index, image in enumerate(pool.imap(lambda image: decode(image, channels, framing), encoded, CHUNK)):
            pixels[index] = image
            if time.monotonic() - reported > 10:
                reported = time.monotonic()
                logger.info("decoded %d of %d images", index + 1, len(encoded))
    return torch.from_numpy(pixels)
