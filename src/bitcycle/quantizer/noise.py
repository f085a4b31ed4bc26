"""Noise for stochastic rounding, computed from (seed, step, layer, element) instead of drawn from a generator.

The integer operations fuse with the rounding and give identical results compiled or not.
"""

import torch
from torch import Tensor

from bitcycle.randomness import hash_bits


def uniform(shape: tuple[int, ...] | torch.Size, key: Tensor, first: Tensor | None = None) -> Tensor:
    """Uniform noise in [-1/2, 1/2) on the 24-bit grid of float32, element i from counter i.

    Args:
        shape: shape of the result.
        key: int32 tensor with one element, or with leading dimensions before those of `shape`: noise for each element.
        first: int32, the counter of the first element if the tensor is a shard of a larger one; None: 0.
    """
    count = 1
    for size in shape:
        count = count * size
    counter = torch.arange(count, dtype=torch.int32, device=key.device).view(shape)
    if first is not None:
        counter = counter + first
    return ((hash_bits(counter, key) >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24 - 0.5
