"""Labelled images of equal size: decoded once in memory, or batch by batch if they do not fit."""

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
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bitcycle import distributed
from bitcycle.cache import cached_file
from bitcycle.dataset.base import DatasetOptions, logger
from bitcycle.device import to_device
from bitcycle.errors import DataError
from bitcycle.randomness import derive
from bitcycle.settings import setting
from bitcycle.threads import allowed_cores

if TYPE_CHECKING:  # Pillow belongs to the extra `images`
    from PIL import Image

CHUNK = 500
"""Images per task of a decoding thread; for single images the overhead would exceed the decoding time."""
WORTH_KEEPING = 10_000
"""Minimum number of images whose decoded pixels are cached; below, decoding takes less than seconds."""
MOST_BYTES = 2**29
"""Maximum bytes of cached pixels: CIFAR has 154 MB, ImageNet 193 GB."""
SMALL = 64
"""Image size in pixels up to which one thread decodes faster than several."""
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
"""Mean and standard deviation of the channels of ImageNet, pixels in [0, 1]."""
GREY_MODES = ("1", "L", "LA", "I", "I;16", "I;16B", "I;16L")
"""Pillow's modes of greyscale images; those that begin with I have 16 bits."""


class EncodedImage(NamedTuple):
    """An image as the bytes or path of its file, with a name for error messages."""

    origin: str
    read: Callable[[], bytes]


class Framing(NamedTuple):
    """Transformation of an image to `size` x `size` pixels: a centre crop after scaling the shorter side to `resize` (ImageNet:
    256 for 224), or with `random_crop`, for training images, a random resized crop."""

    size: int
    resize: int
    random_crop: bool = False


class IndexBatch(NamedTuple):
    """Sample indices of a batch, and a key for their random crops; None means centre crops."""

    indices: Tensor
    crop_seed: int | None = None


@dataclass
class DecodingOptions(DatasetOptions):
    """Options of datasets whose decoded images may exceed memory."""

    memory_gib: float = setting(4.0, "maximum size of decoded images kept in memory", minimum=0, affects_result=False)
    workers: int = setting(
        min(16, allowed_cores()), "processes that decode images not kept in memory", minimum=0, affects_result=False
    )


class Images:
    """Labelled images as unsigned bytes [N, H, W, C], with labels int64 [N]."""

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        assert len(pixels) == len(labels) and pixels.dtype == torch.uint8
        self.pixels, self.labels = pixels, labels

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, chosen: Tensor) -> Images:
        """Images selected by indices or by a mask."""
        return Images(self.pixels[chosen], self.labels[chosen])

    def decoded(self) -> Images:
        """These images, decoded if possible."""
        return self

    def to(self, device: torch.device) -> Images:
        """These images on a device, where batches are then made."""
        return Images(self.pixels.to(device), self.labels.to(device))

    def batches(self, index_batches: Iterable[IndexBatch]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Indices [N], uint8 pixels [N, H, W, C] and labels [N] of each batch."""
        for indices, _ in index_batches:
            here = to_device(indices, self.pixels.device)
            yield here, self.pixels[here], self.labels[here]


@dataclass(eq=False)
class EncodedImages(Images):
    """Labelled encoded images, decoded once (possibly after selecting a subset) or per batch.

    Args:
        encoded, labels, class_names: images, their labels, and the names of classes 0, 1, ...
        channels: 1 or 3.
        framing: transformation to `size` x `size` pixels.
        workers: processes on this machine that decode batches ahead, over all training processes; 0 decodes in the training
            process; None decodes all images once and keeps them in memory.
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
        """The decoded images; if decoding takes seconds, they are cached for other runs on this machine."""
        import PIL

        if self.workers is not None:
            return self
        if len(self) < WORTH_KEEPING or len(self) * self.framing.size**2 * self.channels > MOST_BYTES:
            return Images(self._pixels(), self.labels)
        digest = hashlib.sha256(PIL.__version__.encode())  # digest of all inputs of decoding
        options = repr((self.channels, self.framing)).encode()
        try:
            for part in itertools.chain([options], (image.read() for image in self.encoded)):
                digest.update(len(part).to_bytes(8, "little") + part)
        except OSError:
            return Images(self._pixels(), self.labels)  # raises an error that names the unreadable image
        name, read = f"pixels-{digest.hexdigest()[:32]}.npy", lambda file: torch.from_numpy(np.load(file))
        return Images(cached_file(name, self._pixels, read, np.save), self.labels)

    def _pixels(self) -> Tensor:
        """Decode all images to uint8 [N, size, size, channels] with several threads; logs the progress."""
        size, reported = self.framing.size, time.monotonic()
        pixels = np.empty((len(self), size, size, self.channels), dtype=np.uint8)
        workers = 1 if size <= SMALL else None  # threads contend if an image takes microseconds
        with ThreadPool(workers) as pool:
            decoded = pool.imap(lambda image: decode(image, self.channels, self.framing), self.encoded, CHUNK)
            for index, image in enumerate(decoded):
                pixels[index] = image
                if time.monotonic() - reported > 10:
                    reported = time.monotonic()
                    logger.info("decoded %d of %d images", index + 1, len(self))
        return torch.from_numpy(pixels)

    def to(self, device: torch.device) -> EncodedImages:
        return self  # batches are moved individually

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
    """Yield a batch of `item(key)` for each list of keys, prefetched by `workers` processes. Raises DataError as the items."""
    options: dict[str, Any] = {"num_workers": workers, "collate_fn": collate, "worker_init_fn": _leave_process_group}
    try:
        yield from DataLoader(_Items(item), batch_sampler=keys, **options)
    except DataError as error:  # from a worker, with the worker's traceback in its message
        error.__traceback__ = None  # whose frames would keep the other workers for seconds
        raise DataError(str(error).strip().rsplit("DataError: ", 1)[-1]) from error


def _leave_process_group(worker: int) -> None:
    """Leave the process group, which Ctrl-C and `timeout` signal: the parent stops workers after its checkpoint."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM's warning, sent to every process of a job


def open_image(image: EncodedImage) -> Image.Image:
    """Decode an image. Raises DataError naming the image, if it cannot be read."""
    from PIL import Image, UnidentifiedImageError

    try:
        picture = Image.open(io.BytesIO(image.read()))
        picture.load()
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        # Pillow's message names an object instead of the file
        reason = "it is no image" if isinstance(error, UnidentifiedImageError) else str(error).rstrip(".")
        remedy = "Replace it, or remove it from the dataset"
        raise DataError(f"cannot read the image {image.origin}: {reason}. {remedy}.") from error
    return picture


def decode(
    image: EncodedImage, channels: int, framing: Framing, generator: random.Random | None = None
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An image as uint8 [size, size, channels]: a random crop with a generator, a centre crop without."""
    from PIL import Image, ImageOps

    picture = _as_bytes(open_image(image), channels, image.origin)
    size = (framing.size, framing.size)
    if generator and (box := random_box(*picture.size, generator)):
        picture = picture.resize(size, Image.Resampling.BILINEAR, box=box)
    else:
        bleed = 0 if generator else (1 - framing.size / framing.resize) / 2
        picture = ImageOps.fit(picture, size, Image.Resampling.BILINEAR, bleed)
    return np.array(picture, dtype=np.uint8).reshape(*size, channels)


def _as_bytes(picture: Image.Image, channels: int, origin: str) -> Image.Image:
    """Convert a picture to 1 or 3 channels of 8 bits."""
    from PIL import Image

    is_grey = picture.mode in GREY_MODES
    if picture.mode.startswith("I"):  # 16 bits, which Pillow would clip at 255
        values = np.asarray(picture).astype(np.int64)
        picture = Image.fromarray((values.clip(0, 65535) // 257).astype(np.uint8))
    elif picture.mode == "F":
        raise DataError(f"the image {origin} has floating-point pixels of unknown range; convert it to 8 bits")
    if channels == 1 and not is_grey:
        problem = f"the image {origin} is in colour, but the first image is greyscale, or dataset.channels is 1"
        raise DataError(f"{problem}; set dataset.channels=3")
    return picture.convert("L" if channels == 1 else "RGB")


def random_box(width: int, height: int, generator: random.Random) -> tuple[int, int, int, int] | None:
    """A box of 8 % to 100 % of the area and an aspect ratio of 3/4 to 4/3: left, top, right, bottom in pixels.

    The distribution of torchvision's RandomResizedCrop; None if ten attempts find no box that fits.
    """
    for _ in range(10):
        area = width * height * generator.uniform(0.08, 1)
        ratio = math.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3)))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, top = generator.randint(0, width - box_width), generator.randint(0, height - box_height)
            return left, top, left + box_width, top + box_height
    return None
