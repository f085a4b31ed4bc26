"""Decoded images in the user's cache: PNG files are decoded once on a machine, not once in each of hundreds of runs."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

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


def cached_pixels(identity: Iterable[bytes], shape: tuple[int, ...], decode: Callable[[], Tensor]) -> Tensor:
    """What `decode` gives, from the user's cache if the same images were decoded on this machine before.

    Args:
        identity: the bytes of the images and all that decoding depends on, so that the cache cannot be out of date.
        shape: of the pixels, uint8 [N, size, size, channels].
        decode: decodes the images, where the cache lacks them, cannot be read, or cannot be written.
    """
    if shape[0] < WORTH_KEEPING or math.prod(shape) > MOST_BYTES:
        return decode()
    pixels: Tensor | None = None
    try:
        digest = hashlib.sha256(PIL.__version__.encode())
        for part in identity:
            digest.update(len(part).to_bytes(8, "little") + part)
        file = cache_folder() / f"pixels-{digest.hexdigest()[:32]}.npy"
        if (found := _read(file)) is not None and found.shape == shape and found.dtype == np.uint8:
            return torch.from_numpy(found)
        pixels = decode()
        with tempfile.TemporaryDirectory(dir=file.parent) as unfinished:
            np.save(Path(unfinished) / file.name, pixels.numpy())
            os.replace(Path(unfinished) / file.name, file)  # at once: other runs may look for it
    except OSError as error:  # decoding names an image that cannot be read
        logger.info("decoded images are not kept: %s", error)
    return decode() if pixels is None else pixels


def _read(file: Path) -> Any:
    try:
        return np.load(file) if file.is_file() else None
    except (OSError, ValueError, EOFError) as error:
        logger.info("%s cannot be read (%s): the images are decoded again", file, error)
        return None
