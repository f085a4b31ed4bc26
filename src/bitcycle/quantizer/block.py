"""Quantizers with one scale for each block of neighbouring elements along one dimension: what MX and NVFP4 share.

A block must lie along the dimension that a product sums over, or its scale could not be taken out of the sum. Training has three
products with three such dimensions, hence two copies of weight, activation and gradient (see `layer/block_product.py`). Called
as any quantizer, without a dimension, blocks lie along the channels of [N, C, H, W] (dimension 1), else along the last dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from bitcycle.quantizer.autograd import straight_through
from bitcycle.quantizer.base import GradientQuantizer, TensorQuantizer
from bitcycle.quantizer.compile_utils import kernel
from bitcycle.quantizer.cpp_operators import BLOCK as OPERATORS
from bitcycle.quantizer.cpp_operators import cpp_operators
from bitcycle.quantizer.element import Element, elements_by_bits
from bitcycle.quantizer.noise import uniform

Function = Callable[..., Tensor]
"""(blocks [count, size, inner] float32, element [4], bits, noise or None) -> quantized blocks; bits 0 return them."""


def split(x: Tensor, dim: int, block: int, groups: int = 1) -> Tensor:
    """x as [count, size, inner], blocks along `dim` in the middle; a last block that is not full is padded with zeros.

    Args:
        x: of any shape; tensors of four and more dimensions in channels-last order, which is not copied.
        dim: the dimension that is cut into blocks.
        block: elements of a block; a shorter dimension is one block.
        groups: equal parts of `dim`, across whose borders no block goes (as of a grouped convolution).
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
    """x in channels-last order if it has four or more dimensions, and where its dimension `dim` is then."""
    dim %= x.dim()
    if x.dim() < 4:
        return x, dim
    return x.movedim(1, -1), x.dim() - 1 if dim == 1 else max(dim - 1, 0)


def _features(x: Tensor) -> int:
    return 1 if x.dim() >= 4 else -1


class Blocks(torch.nn.Module):
    """Quantizes in blocks along any dimension.

    Args:
        function: quantizes blocks.
        formats: elements by their bits.
        block: elements of a block.
        compile: fuse the function into one kernel, or call the operator in C++ that has its numbers.
        tensor_scale: whether blocks have a scale in E4M3 and the tensor one of its own (NVFP4), in place of powers of two (MX).
    """

    has_blocks = True
    elements: Tensor

    def __init__(
        self,
        function: Function,
        formats: Mapping[int, Element],
        block: int,
        compile: bool = False,
        tensor_scale: bool = False,
    ) -> None:
        super().__init__()
        self.function, self.block, self.compile_kernel, self.tensor_scale = function, block, compile, tensor_scale
        self.register_buffer("elements", elements_by_bits(formats), persistent=False)

    def quantized(self, x: Tensor, bits: Tensor, dim: int, groups: int, key: Tensor | None = None) -> Tensor:
        """x in blocks along `dim`, none of them across the border of a group; stochastically rounded with a key."""
        if not x.numel():
            return x
        element = self.elements.index_select(0, bits.view(1)).view(-1)
        if (native := cpp_operators(x, self.compile_kernel, OPERATORS)) is not None:
            return native.quantize_blocks(x, dim, self.block, groups, element, bits, key, self.tensor_scale)
        function = kernel(self.function if key is None else _with_noise, self.compile_kernel)
        noise = (None,) if key is None else (key, self.function)
        return join(function(split(x, dim, self.block, groups), element, bits, *noise), x, dim, groups)


class BlockQuantizer(Blocks, TensorQuantizer):
    """Weights or activations with a scale for each block, rounded to nearest, straight-through; arguments as of `Blocks`."""

    samples_are_independent = True
    steps_are_independent = True

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        return straight_through(self.along, x, bits, _features(x))

    def along(self, x: Tensor, bits: Tensor, dim: int, groups: int = 1) -> Tensor:
        return self.quantized(x, bits, dim, groups)


class BlockGradient(Blocks, GradientQuantizer):
    """Gradients with a scale for each block; arguments as of `Blocks`, and whether they are rounded stochastically."""

    def __init__(
        self,
        function: Function,
        formats: Mapping[int, Element],
        block: int,
        stochastic: bool = True,
        compile: bool = False,
        tensor_scale: bool = False,
    ) -> None:
        super().__init__(function, formats, block, compile, tensor_scale)
        self.stochastic = stochastic

    def quantize(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        return self.along(gradient, bits, _features(gradient), step_key ^ layer_key)

    def along(self, gradient: Tensor, bits: Tensor, dim: int, key: Tensor, groups: int = 1) -> Tensor:
        return self.quantized(gradient, bits, dim, groups, key if self.stochastic else None)


def _with_noise(blocks: Tensor, element: Tensor, bits: Tensor, key: Tensor, function: Function) -> Tensor:
    return function(blocks, element, bits, uniform(blocks.shape, key))
