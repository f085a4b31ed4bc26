"""Stateless randomness: every random number is a hash of what it is used for.

A hash has no state, so a resumed run uses the same numbers as an uninterrupted one: the order of an epoch depends on
(seed, epoch), augmentation on (seed, epoch, sample), noise on (seed, step, layer, element).
"""

import importlib
import math
import operator
import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
# Multipliers of the "lowbias32" integer hash (C. Wellons, 2018), as signed 32-bit numbers.
_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B - (1 << 32)


def derive(*parts: int | str) -> int:
    """A 63-bit number that depends on all parts; all randomness in this project is derived from it.

    >>> derive(0, "order", 1) == derive(0, "order", 1), derive(0, "order", 1) == derive(0, "order", 2)
    (True, False)
    """
    state = 0
    for part in parts:
        # as a Python integer, because NumPy's overflow
        number = zlib.crc32(part.encode()) if isinstance(part, str) else operator.index(part)
        state = _splitmix((state ^ (number & _MASK64)) & _MASK64)
    return state >> 1


def _splitmix(state: int) -> int:
    """One step of the splitmix64 generator (Steele, Lea, Flood, 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


def int32_key(*parts: int | str) -> int:
    """`derive` as a signed 32-bit number, the key of `hash_bits`."""
    return (derive(*parts) & 0xFFFFFFFF) - (1 << 31)


def hash_bits(counter: Tensor, key: Tensor) -> Tensor:
    """Hash int32 counters with an int32 key to 32 well-mixed bits as int32; identical on every device, compiled or not."""
    mixed = counter ^ key
    mixed = mixed ^ ((mixed >> 16) & 0xFFFF)  # torch's >> is arithmetic, hence the mask
    mixed = mixed * _MULTIPLIER_1
    mixed = mixed ^ ((mixed >> 15) & 0x1FFFF)
    mixed = (mixed + key) * _MULTIPLIER_2  # without the second key, different keys would permute the same values
    return mixed ^ ((mixed >> 16) & 0xFFFF)


def uniform_noise(shape: tuple[int, ...], key: Tensor, first: Tensor | None = None) -> Tensor:
    """Uniform noise in [-1/2, 1/2) on the 24-bit grid of float32, for stochastic rounding: element i from counter i.

    Args:
        shape: shape of the result.
        key: int32 tensor with one element, or with leading dimensions before those of `shape`: noise for each element.
        first: int32, the counter of the first element if the tensor is a shard of a larger one; None: 0.
    """
    counter = torch.arange(math.prod(shape), dtype=torch.int32, device=key.device).view(shape)
    if first is not None:
        counter = counter + first
    return ((hash_bits(counter, key) >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24 - 0.5


def random_state() -> dict[str, Any]:
    """The state of the generators of Python, NumPy and PyTorch (CPU, and GPUs in use), as numbers, tuples and tensors."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, keys.tolist(), *rest)
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        importlib.import_module("numpy").random.set_state(state["numpy"])
    if "cuda" in state and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Context after which every generator is as before."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
