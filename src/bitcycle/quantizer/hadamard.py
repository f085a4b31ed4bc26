"""Random Hadamard transform: an orthogonal rotation of both operands of a product, which spreads outliers over a block.

    (A R)(B R)^T = A B^T,    R = S H_d / sqrt(d)    in tiles of d elements along the dimension that the product sums over

H_d is the Hadamard matrix of Sylvester, H_2d = [[H_d, H_d], [H_d, -H_d]], and S = diag(s) with random signs s. Elements beyond
the last whole tile stay as they are: the identity is orthogonal, too. On a CPU a rotation is part of the C++ operator that
quantizes its result (cpp/hadamard.h), if that adds in the order of PyTorch's product of matrices.

Source: Tseng et al. 2025, "Training LLMs with MXFP4", section 3.2; NVIDIA 2025, "Pretraining large language models with NVFP4",
section 4.2 and appendix C.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from bitcycle.cpp.operators import BLOCK, cpp_operators
from bitcycle.device import to_device
from bitcycle.randomness import hash_bits


@cache
def hadamard_matrix(size: int) -> Tensor:
    """H / sqrt(size) [size, size], orthogonal and symmetric, for a power of two.

    >>> hadamard_matrix(4).tolist()
    [[0.5, 0.5, 0.5, 0.5], [0.5, -0.5, 0.5, -0.5], [0.5, 0.5, -0.5, -0.5], [0.5, -0.5, -0.5, 0.5]]
    """
    assert size > 0 and size & (size - 1) == 0, "the size of a Hadamard matrix is a power of two"
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def random_signs(size: int, key: Tensor) -> Tensor:
    """[size] numbers 1 or -1, drawn with the int32 `key`, on its device. The key is a scalar."""
    counter = torch.arange(size, dtype=torch.int32, device=key.device)
    return 1.0 - 2.0 * ((hash_bits(counter, key) >> 16) & 1)


def rotate(x: Tensor, dim: int, size: int, signs: Tensor, groups: int = 1) -> Tensor:
    """x with each tile of `size` elements along `dim` multiplied by the rotation R of `signs` [size].

    Args:
        x: floating-point tensor of any shape.
        dim: the dimension that a product sums over.
        size: elements per tile, a power of two; the rest of a dimension that is no multiple of it is not rotated.
        signs: [size], each 1 or -1.
        groups: equal parts of `dim` whose borders no tile crosses.
    """
    dim %= x.dim()
    if x.dim() >= 4 and dim == 1:  # channels, which lie next to each other
        return rotate(x.movedim(1, -1), -1, size, signs, groups).movedim(-1, 1)
    length, inner = x.shape[dim] // groups, math.prod(x.shape[dim + 1 :])
    whole = length // size * size
    if not whole:
        return x
    matrix, rows = signs[:, None] * to_device(hadamard_matrix(size), x.device), x.float().reshape(-1, length, inner)
    tiles = rows[:, :whole].reshape(-1, size, inner)
    turned = tiles.squeeze(-1) @ matrix if inner == 1 else matrix.T @ tiles
    turned = turned.reshape(-1, whole, inner)
    if whole < length:
        turned = torch.cat([turned, rows[:, whole:]], 1)
    return turned.reshape(x.shape).to(x.dtype)


class Rotation(NamedTuple):
    """The rotation with tiles of `size` elements whose signs are drawn with the int32 `key`, a scalar."""

    size: int
    key: Tensor

    def __call__(self, x: Tensor, dim: int, groups: int = 1) -> Tensor:
        """`rotate` with these signs. The shape of x is kept."""
        return rotate(x, dim, self.size, random_signs(self.size, self.key), groups)

    def has_operator(self, x: Tensor, dim: int) -> bool:
        """Whether the C++ operator rotates x along `dim` as PyTorch does, which multiplies a single tile, or tiles of few
        columns, in another order."""
        return self._is_wide(x, dim) and x.numel() >= 2 * self.size and _adds_in_order(self.size)

    def _is_wide(self, x: Tensor, dim: int) -> bool:
        columns = 1 if x.dim() >= 4 and dim % x.dim() == 1 else math.prod(x.shape[dim % x.dim() + 1 :])
        return 16 <= self.size <= 64 and (columns == 1 or columns >= FEW_COLUMNS)


FEW_COLUMNS = 16
"""Products with fewer columns are PyTorch's: on an AMD EPYC with AVX-512, fewer than 12 add in an order of their own."""


@cache
def _adds_in_order(size: int) -> bool:
    """Whether products of matrices add in the order of the operator on this processor, whatever their shapes."""
    generator, rotation = torch.Generator().manual_seed(size), Rotation(size, torch.tensor(size, dtype=torch.int32))
    native, bits, formats = cpp_operators(rotation.key.float(), True, BLOCK), torch.tensor(0), torch.zeros(1, 6)
    if native is None:
        return False
    for rows, columns in ((2, 87), (2, 17), (1, 16), (2, 3), (2, 2), (1, 43), (1, 3)):
        x = torch.randn(rows * size, columns, generator=generator)
        for dim, y in enumerate((x, x.T)):
            turned = native.quantize_blocks(y, bits, formats, dim, 1, None, 1.0, *rotation)
            if rotation._is_wide(y, dim) and not torch.equal(turned, rotation(y, dim)):
                return False
    return True
