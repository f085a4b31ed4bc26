"""Quantizers with one scale per block of consecutive elements along one dimension: base of MX and NVFP4.

Blocks must run along the dimension that a product sums over, so that their scales factor out of the sum. Training has three
products with three such dimensions, hence two copies of weight, activation and gradient (see `layer/block_product.py`). When no
dimension is given, blocks run along the channels of [N, C, H, W] (dimension 1), otherwise along the last dimension.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bitcycle.cpp.operators import BLOCK as OPERATORS
from bitcycle.cpp.operators import cpp_operators
from bitcycle.precision import FLOAT
from bitcycle.quantizer.autograd import straight_through
from bitcycle.quantizer.base import GradientQuantizer, TensorQuantizer
from bitcycle.quantizer.compile_utils import kernel
from bitcycle.quantizer.format import FormatOptions, Formatted, next_wider
from bitcycle.quantizer.hadamard import Rotation
from bitcycle.randomness import uniform_noise
from bitcycle.settings import SettingError, setting

SCALE_BITS = 8
LANES = 64
"""Longest side of a square that the operator quantizes."""
HEADROOM = 0.75
"""Factor before stochastic rounding with `headroom`: the largest element of a block, below 8 in units of the scale, stays below
6, so that nothing saturates ("Training LLMs with MXFP4", section 3.1)."""
BACKWARD_PRODUCTS = ("dgrad", "wgrad")
"""Products of the backward pass, by the field's names: the gradients of the input and of the weight."""
Function = Callable[..., Tensor]
"""(blocks [count, size, inner] float32, element [4], bits, noise or None) -> quantized blocks; 0 bits returns them unchanged."""


class Scaling(NamedTuple):
    """How the blocks of a format are scaled: the function that quantizes them, the elements of a block, and whether there are
    E4M3 scales per block and one for the tensor (NVFP4) instead of powers of two (MX)."""

    function: Function
    block: int
    of_tensor: bool


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


def squares(x: Tensor, dims: tuple[int, int], block: int, groups: int = 1) -> Tensor:
    """x as [count, block * block, inner], with squares of block x block elements of two dimensions in the middle; incomplete
    ones are padded with zeros. No square crosses the borders of `groups` equal parts of the first dimension."""
    rows = x.detach().float().movedim(dims, (0, 1))
    rows = rows.reshape(groups, rows.shape[0] // groups, rows.shape[1], -1)
    rows = F.pad(rows, (0, 0, 0, -rows.shape[2] % block, 0, -rows.shape[1] % block))
    tiles = rows.unflatten(2, (-1, block)).unflatten(1, (-1, block)).transpose(2, 3)
    return tiles.reshape(-1, block * block, rows.shape[3]).contiguous()


def from_squares(tiles: Tensor, like: Tensor, dims: tuple[int, int], block: int, groups: int = 1) -> Tensor:
    """The inverse of `squares`, in the shape and type of `like`."""
    moved = like.movedim(dims, (0, 1))
    length, width = moved.shape[0] // groups, moved.shape[1]
    counts = (-(-length // block), -(-width // block))
    rows = tiles.reshape(groups, *counts, block, block, -1).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return rows[:, :length, :width].reshape(moved.shape).movedim((0, 1), dims).to(like.dtype)


def _ordered(x: Tensor, dim: int) -> tuple[Tensor, int]:
    """x in channels-last order if it has four or more dimensions, and the new position of dimension `dim`."""
    dim %= x.dim()
    if x.dim() < 4:
        return x, dim
    return x.movedim(1, -1), x.dim() - 1 if dim == 1 else max(dim - 1, 0)


def _features(x: Tensor) -> int:
    return 1 if x.dim() >= 4 else -1


class Blocks(Formatted):
    """Quantizes in blocks along any dimension. With `compile` the function is one kernel, or the equivalent C++ operator.

    Formats of different scalings follow each other, each with 0 bits, at which a tensor stays as it is, unless the bits select
    it: so the format is data, as all bits are.
    """

    has_blocks = True
    uses: Tensor
    """[scalings, 33], 1 for the bits whose format has the scaling."""
    formats: Tensor
    """[33, 6], for the operator: the row of `elements` for each number of bits, and block and of_tensor of its scaling."""

    def __init__(self, options: "BlockOptions", role: str, compile: bool) -> None:
        super().__init__(options.formats(role), compile, options.stochastic)
        by_bits = options.scalings(role)
        chosen = [by_bits[next_wider(by_bits, bits)] for bits in range(FLOAT + 1)]
        self.scalings, self.headroom = tuple(dict.fromkeys(chosen)), options.headroom
        uses = torch.tensor([[int(scaling == of_bits) for of_bits in chosen] for scaling in self.scalings])
        self.register_buffer("uses", uses, persistent=False)
        blocks = torch.tensor([[scaling.block, scaling.of_tensor] for scaling in chosen])
        self.register_buffer("formats", torch.cat([self.elements, blocks], 1), persistent=False)
        of_tensor = any(scaling.of_tensor for scaling in self.scalings)
        self.samples_are_independent = self.steps_are_independent = not of_tensor

    def by_scaling(self, bits: Tensor) -> list[tuple[Scaling, Tensor]]:
        """Each scaling with its bits: `bits` if they select a format of it, else 0."""
        if len(self.scalings) == 1:
            return [(self.scalings[0], bits)]
        uses = self.uses.index_select(1, bits.view(1)).view(-1)
        return [(scaling, bits * use) for scaling, use in zip(self.scalings, uses.unbind())]

    def quantized(
        self,
        x: Tensor,
        bits: Tensor,
        dim: int,
        groups: int = 1,
        key: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """x, rotated along `dim` if requested, in blocks along it that do not cross groups; stochastically rounded if a key is
        given."""
        if not x.numel():
            return x
        native = cpp_operators(x, self.compile_kernel, OPERATORS)
        if rotation is not None and not (native is not None and rotation.has_operator(x, dim)):
            x, rotation = rotation(x, dim, groups), None
        if native is not None:
            headroom = HEADROOM if self.headroom else 1.0
            turn = () if rotation is None else rotation
            return native.quantize_blocks(x, bits, self.formats, dim, groups, key, headroom, *turn)
        for scaling, own in self.by_scaling(bits):
            x = self.scaled(x, own, scaling, dim, groups, key)
        return x

    def scaled(
        self, x: Tensor, bits: Tensor, scaling: Scaling, dim: int, groups: int = 1, key: Tensor | None = None
    ) -> Tensor:
        """`quantized` with a given scaling, by PyTorch's operators."""
        element = self.element(bits)
        headroom = HEADROOM if self.headroom and key is not None and not scaling.of_tensor else 1.0
        blocks = split(x, dim, scaling.block, groups)
        if key is None:
            blocks = kernel(scaling.function, self.compile_kernel)(blocks, element, bits)
        else:
            blocks = kernel(_with_noise, self.compile_kernel)(blocks, element, bits, key, scaling.function, headroom)
        return join(blocks, x, dim, groups)


class BlockQuantizer(Blocks, TensorQuantizer):
    """Weights or activations with one scale per block, rounded to nearest, straight-through."""

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        return straight_through(self.along, x, bits, _features(x))

    along = Blocks.quantized

    def in_squares(self, weight: Tensor, bits: Tensor, dims: tuple[int, int], groups: int = 1) -> Tensor:
        """A weight quantized in squares of block x block elements along two dimensions, the first of which has `groups`: both
        products that read it get the same values."""
        fits = dims == (0, 1) and all(scaling.block <= LANES for scaling in self.scalings)
        if fits and (native := cpp_operators(weight, self.compile_kernel, OPERATORS)) is not None:
            image = weight.unsqueeze(-1) if weight.dim() == 3 else weight  # whose inputs lie next to each other
            found = native.quantize_blocks(image, bits, self.formats, 0, groups, squares=True)
            return found.reshape(weight.shape).contiguous()
        for scaling, own in self.by_scaling(bits):
            tiles = squares(weight, dims, scaling.block, groups)
            tiles = self.scaled(tiles, own, scaling._replace(block=scaling.block**2), dim=1)
            weight = from_squares(tiles, weight, dims, scaling.block, groups)
        return weight


class BlockGradient(Blocks, GradientQuantizer):
    """Gradients with one scale per block."""

    def quantize(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        return self.along(gradient, bits, _features(gradient), step_key ^ layer_key)

    def along(
        self,
        gradient: Tensor,
        bits: Tensor,
        dim: int,
        key: Tensor,
        groups: int = 1,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """The gradient quantized in blocks along `dim`, after a rotation along it if there is one. Any shape, kept."""
        return self.quantized(gradient, bits, dim, groups, key if self.stochastic else None, rotation)


def _with_noise(
    blocks: Tensor, element: Tensor, bits: Tensor, key: Tensor, function: Function, headroom: float
) -> Tensor:
    noise = uniform_noise(blocks.shape, key)
    return function(blocks, element, bits, noise, **({} if headroom == 1 else {"headroom": headroom}))


@dataclass
class BlockOptions(FormatOptions):
    """Options of a quantizer with blocks."""

    quantizers = (BlockQuantizer, BlockGradient)
    stochastic: bool = setting(True, "round gradients stochastically; false: to nearest, halves to even")
    stochastic_operands: bool = setting(
        False, "also round weights and activations stochastically in products of the backward pass (MXFP4, section 3.1)"
    )
    headroom: bool = setting(
        False,
        "multiply by 3/4 before stochastic rounding and by 4/3 after it, so that nothing saturates (MXFP4, section 3.1)",
    )
    square_weights: bool = setting(
        False, "one scale for a square of weights, so that fprop and dgrad read the same values (NVFP4, section 4.3)"
    )
    hadamard: list[str] = setting(
        [],
        "products whose operands are rotated by a random Hadamard transform: wgrad (NVFP4, section 4.2), and dgrad"
        " (MXFP4, section 3.2)",
        choices=BACKWARD_PRODUCTS,
    )
    hadamard_size: int = setting(
        16,
        "elements per tile of the Hadamard transform, a power of two (NVFP4: 16, MXFP4: 64)",
        minimum=2,
        maximum=1024,
    )
    hadamard_signs: str = setting(
        "fixed",
        "random signs: the same ones in all layers and steps (fixed; NVFP4, section 4.2), or new ones for each product (drawn;"
        " MXFP4's code)",
        choices=("fixed", "drawn"),
    )
    backward_bits: str = setting(
        "forward",
        "bits of weights and activations in products of the backward pass: those of the forward pass, or of the gradient"
        " (MXFP4: forward in FP8, backward in MXFP4)",
        choices=("forward", "gradient"),
    )

    def validate(self) -> None:
        super().validate()
        size = self.hadamard_size
        if size & (size - 1):
            raise SettingError("hadamard_size", size, "is not a power of two", f"use {1 << size.bit_length() - 1}")
        if self.square_weights and "dgrad" in self.hadamard:
            problem = "rotates the weight along its outputs, where square_weights keeps the values of the forward pass"
            raise SettingError("hadamard", self.hadamard, problem, "use hadamard=[wgrad], or square_weights=false")
        if self.headroom and all(scaling.of_tensor for scaling in self.scalings("gradient").values()):
            problem = "is for scales that are powers of two: those of NVFP4 fit the largest element"
            raise SettingError("headroom", True, problem, "leave it out, or use quantizer=mx")

    def scalings(self, role: str) -> Mapping[int, Scaling]:
        """The scalings of the formats of tensors of `role` by their bits."""
        raise NotImplementedError

    def storage_bits(self, role: str) -> Mapping[int, Fraction]:
        by_bits, of_elements = self.scalings(role), super().storage_bits(role)
        blocks = {bits: by_bits[next_wider(by_bits, bits)].block for bits in of_elements}
        return {bits: of_elements[bits] + Fraction(SCALE_BITS, block) for bits, block in blocks.items()}

    def check_sharing(self) -> None:
        """Refuse data-parallel training, as blocks of the weight's gradient run along the samples."""
        problem = "divides the samples of a batch into blocks, which would change with the number of processes"
        raise SettingError("name", self.name, problem, "train in one process, or use quantizer=fp8 or quantizer=sbm")
