"""Decoded images in the user's cache: PNG files are decoded once on a machine, not once in each of hundreds of runs."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import PIL
import torch
from torch import Tensor

from bitcycle.cache import cache_folder

logger = logging.getLogger(__name__)

WORTH_KEEPING = 10_000
"""Images from which decoding takes seconds, and looking them up does not."""
MOST_BYTES = 2**29
"""Bytes of pixels up to which they are kept: CIFAR's 154 MB, not ImageNet's 193 GB."""


def kept_pixels(identity: Iterable[bytes], shape: tuple[int, ...], decode: Callable[[], Tensor]) -> Tensor:
    """What `decode` gives, from the user's cache if the same images were decoded on this machine before.

    Args:
        identity: the bytes of the images and all that decoding depends on, so that the cache cannot be out of date.
        shape: of the pixels, uint8 [N, size, size, channels].
        decode: decodes the images, where the cache lacks them, cannot be read, or cannot be written.
    """
    if shape[0] < WORTH_KEEPING or math.prod(shape) > MOST_BYTES:
        return decode()
    try:
        file = cache_folder() / f"pixels-{_digest(identity)}.npy"
    except OSError as error:  # decoding names an image that cannot be read
        logger.info("decoded images are not kept: %s", error)
        return decode()
    found = _read(file, shape)
    if found is None:
        found = decode()
        _write(file, found)
    return found


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256(PIL.__version__.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:32]


def _read(file: Path, shape: tuple[int, ...]) -> Tensor | None:
    try:
        pixels = np.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        logger.info("%s cannot be read (%s): the images are decoded anew", file, error)
        return None
    return torch.from_numpy(pixels) if pixels.shape == shape and pixels.dtype == np.uint8 else None


def _write(file: Path, pixels: Tensor) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=file.parent) as unfinished:
            whole = Path(unfinished) / file.name
            np.save(whole, pixels.numpy())
            os.replace(whole, file)  # at once: other runs may look for it
    except OSError as error:
        logger.info("decoded images are not kept: %s", error)
