"""Quantized tensors as integer codes, which compute=codes multiplies and saves for the backward pass.

    activation  x_q = s n + z,           n = 0 ... 2^b - 1               in one byte, without sign
    weight      W_q = s n + z',          n = -2^(b-1) ... 2^(b-1) - 1,   z' = z + 2^(b-1) s      in one byte, with sign
    gradient    G_q = s n + z', the same

for b = 1 ... 8. The codes of weights and gradients are centred so that they fit and the offset z' is small. Codes, steps and
zero points are those of `affine.fake_quantize`: decoded tensors equal its result bit for bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bitcycle.quantizer import affine

MOST_BITS = 8


class Codes(NamedTuple):
    """Codes of the tensor scale * integers + zero_point.

    integers: uint8 in the shape of an activation.
    scale, zero_point: float32 scalars.
    """

    integers: Tensor
    scale: Tensor
    zero_point: Tensor


class WeightCodes(NamedTuple):
    """Codes of the weight [out, ...] scale * integers + zero_point, int8; the others are float32 [out].

    minimum: the lowest value of each channel, for bitwise exact decoding.
    """

    integers: Tensor
    scale: Tensor
    zero_point: Tensor
    minimum: Tensor


class GradientCodes(NamedTuple):
    """Codes of the gradient scale * integers + zero_point, int8 in its shape."""

    integers: Tensor
    scale: float
    zero_point: float


def encode_and_observe(
    x: Tensor, bits: Tensor, running_zero_point: Tensor, running_range: Tensor, momentum: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`affine.quantize_and_observe` that returns codes: integers, scale, zero point and the new running statistics. Integers
    have the shape of x, all others are scalars."""
    low, high = torch.aminmax(x)
    value_range = high - low
    code, scale = affine.encode(x, low, value_range, bits)
    moved = affine.observed(running_zero_point, running_range, low, value_range, bits, momentum)
    return code.to(torch.uint8), scale, low, *moved


def encode_in_range(x: Tensor, zero_point: Tensor, value_range: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of x in a given range: integers and scale. Integers have the shape of x, the scale is a scalar."""
    code, scale = affine.encode(x, zero_point, value_range, bits)
    return code.to(torch.uint8), scale


def encode_rows(rows: Tensor, bits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`affine.quantize_per_row` as codes: int8 integers, scales, zero points and minima [rows]."""
    low, high = torch.aminmax(rows, dim=1, keepdim=True)
    code, scale = affine.encode(rows, low, high - low, bits)
    middle = _middle(bits, rows)
    return (code - middle).to(torch.int8), scale[:, 0], (low + middle * scale)[:, 0], low[:, 0]


def decode_rows(integers: Tensor, scale: Tensor, minimum: Tensor, bits: Tensor) -> Tensor:
    """The quantized rows from the result of `encode_rows`, bitwise equal to `affine.quantize_per_row`."""
    return (integers.to(scale.dtype) + _middle(bits, scale)) * scale[:, None] + minimum[:, None]


def _middle(bits: Tensor, like: Tensor) -> Tensor:
    return (1 << (bits - 1)).to(like.dtype)


def encode_gradient(x: Tensor, bits: Tensor, *keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The quantized gradient x with one range, and its codes: int8 integers, scale and minimum; `keys` as of `keyed_noise`.
    Integers have the shape of x, scale and minimum are scalars."""
    low, high = torch.aminmax(x)
    code, scale = affine.encode(x, low, high - low, bits, affine.keyed_noise(x, keys))
    return code * scale + low, (code - _middle(bits, x)).to(torch.int8), scale, low


def decode(integers: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The float32 tensor represented by codes. It has the shape of the integers."""
    return integers.to(torch.float32) * scale + zero_point
