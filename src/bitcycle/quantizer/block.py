"""Quantizers with one scale per block of consecutive elements along one dimension: base of MX and NVFP4.

Blocks must run along the dimension that a product sums over, so that their scales factor out of the sum. Training has three
products with three such dimensions, hence two copies of weight, activation and gradient (see `layer/block_product.py`). When no
dimension is given, blocks run along the channels of [N, C, H, W] (dimension 1), otherwise along the last dimension.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from bitcycle.quantizer.autograd import straight_through
from bitcycle.quantizer.base import GradientQuantizer, TensorQuantizer
from bitcycle.quantizer.compile_utils import kernel
from bitcycle.quantizer.cpp_operators import BLOCK as OPERATORS
from bitcycle.quantizer.cpp_operators import cpp_operators
from bitcycle.quantizer.format import FormatOptions, Formatted
from bitcycle.randomness import uniform_noise
from bitcycle.settings import SettingError, setting

SCALE_BITS = 8
Function = Callable[..., Tensor]
"""(blocks [count, size, inner] float32, element [4], bits, noise or None) -> quantized blocks; 0 bits returns them unchanged."""


def split(x: Tensor, dim: int, block: int, groups: int = 1) -> Tensor:
    """x as [count, size, inner], with blocks along `dim` in the middle; an incomplete last block is padded with zeros.

    Args:
        x: of any shape; tensors of four or more dimensions in channels-last order are not copied.
        dim: the dimension that is divided into blocks.
        block: elements per block; a shorter dimension is one block.
        groups: equal parts of `dim` whose borders no block crosses (as in a grouped convolution).
    """
    x, position = _ordered(x.detach().float(), dim)
    length, inner = x.shape[position] // groups, math.prod(x.shape[position + 1 :])
    rows, size = x.reshape(-1, length, inner), min(block, length)
    if missing := -length % size:
        rows = F.pad(rows, (0, 0, 0, missing))
    return rows.reshape(-1, size, inner).contiguous()


def join(blocks: Tensor, like: Tensor, dim: int, groups: int = 1) -> Tensor:
    """The inverse of `split`, in the shape and type of `like`."""
    ordered, position = _ordered(like, dim)
    length, inner = ordered.shape[position] // groups, blocks.shape[2]
    padded = -(-length // blocks.shape[1]) * blocks.shape[1]
    x = blocks.reshape(-1, padded, inner)[:, :length].reshape(ordered.shape).to(like.dtype)
    return x.movedim(-1, 1) if like.dim() >= 4 else x


def _ordered(x: Tensor, dim: int) -> tuple[Tensor, int]:
    """x in channels-last order if it has four or more dimensions, and the new position of dimension `dim`."""
    dim %= x.dim()
    if x.dim() < 4:
        return x, dim
    return x.movedim(1, -1), x.dim() - 1 if dim == 1 else max(dim - 1, 0)


def _features(x: Tensor) -> int:
    return 1 if x.dim() >= 4 else -1


class Blocks(Formatted):
    """Quantizes in blocks along any dimension. With `compile` the function is one kernel, or the equivalent C++ operator."""

    has_blocks = True

    def __init__(self, options: "BlockOptions", role: str, compile: bool) -> None:
        super().__init__(options.formats(role), compile, options.stochastic)
        self.function, self.block, self.tensor_scale = options.quantize_blocks, options.block_size, options.tensor_scale
        self.samples_are_independent = self.steps_are_independent = not self.tensor_scale

    def quantized(self, x: Tensor, bits: Tensor, dim: int, groups: int, key: Tensor | None = None) -> Tensor:
        """x in blocks along `dim` that do not cross groups; stochastically rounded if a key is given."""
        if not x.numel():
            return x
        element = self.element(bits)
        if (native := cpp_operators(x, self.compile_kernel, OPERATORS)) is not None:
            return native.quantize_blocks(x, dim, self.block, groups, element, bits, key, self.tensor_scale)
        function = kernel(self.function if key is None else _with_noise, self.compile_kernel)
        noise = (None,) if key is None else (key, self.function)
        return join(function(split(x, dim, self.block, groups), element, bits, *noise), x, dim, groups)


class BlockQuantizer(Blocks, TensorQuantizer):
    """Weights or activations with one scale per block, rounded to nearest, straight-through."""

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        return straight_through(self.along, x, bits, _features(x))

    def along(self, x: Tensor, bits: Tensor, dim: int, groups: int = 1) -> Tensor:
        return self.quantized(x, bits, dim, groups)


class BlockGradient(Blocks, GradientQuantizer):
    """Gradients with one scale per block."""

    def quantize(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        return self.along(gradient, bits, _features(gradient), step_key ^ layer_key)

    def along(self, gradient: Tensor, bits: Tensor, dim: int, key: Tensor, groups: int = 1) -> Tensor:
        return self.quantized(gradient, bits, dim, groups, key if self.stochastic else None)


def _with_noise(blocks: Tensor, element: Tensor, bits: Tensor, key: Tensor, function: Function) -> Tensor:
    return function(blocks, element, bits, uniform_noise(blocks.shape, key))


@dataclass
class BlockOptions(FormatOptions):
    """Options of a quantizer with blocks."""

    quantizers = (BlockQuantizer, BlockGradient)
    tensor_scale: ClassVar[bool] = False
    """Whether there are E4M3 scales per block and one per tensor (NVFP4) instead of powers of two (MX)."""
    quantize_blocks: ClassVar[Function]
    """The function that quantizes blocks."""

    stochastic: bool = setting(True, "round gradients stochastically; false: to nearest, halves to even")

    @property
    def block_size(self) -> int:
        """Elements that share a scale."""
        raise NotImplementedError

    @property
    def scale_share(self) -> Fraction:
        return Fraction(SCALE_BITS, self.block_size)

    def check_sharing(self) -> None:
        """Refuse data-parallel training, as blocks of the weight's gradient run along the samples."""
        problem = "divides the samples of a batch into blocks, which would change with the number of processes"
        raise SettingError("name", self.name, problem, "train in one process, or use quantizer=fp8 or quantizer=sbm")
