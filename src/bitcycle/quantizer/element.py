"""Number formats of 4 to 8 bits, each described by four numbers so that all formats share one compiled program.

A value v is rounded to m mantissa bits, with the step of the lowest binade below it (denormals), and saturates:

    e = max(floor(log2 |v|), lowest),   u = 2^(e - m),   round(v) = u rint(clamp(v, -largest, largest) / u)

A fixed-point format has a single binade. All of this is exact in float32: scalings by powers of two, and one rounding.

Source: OCP Microscaling Formats (MX) specification 1.0, section 5.3; OCP 8-bit floating point specification 1.0 (E4M3, E5M2).
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from bitcycle.schedule import FLOAT


class Element(NamedTuple):
    """A number format: its bits, mantissa bits m, exponents of its lowest and highest binade, and its largest value."""

    bits: int
    mantissa: int
    lowest: int
    highest: int
    largest: float


ELEMENTS = {
    "e2m1": Element(4, 1, 0, 2, 6.0),
    "int4": Element(4, 2, 0, 0, 1.75),
    "e2m3": Element(6, 3, 0, 2, 7.5),
    "e3m2": Element(6, 2, -2, 4, 28.0),
    "e4m3": Element(8, 3, -6, 8, 448.0),
    "e5m2": Element(8, 2, -14, 15, 57344.0),
    "int8": Element(8, 6, 0, 0, 1.984375),
}
"""Elements by name; int4 and int8 are fixed point, 1.2 and 1.6."""


def elements_by_bits(formats: Mapping[int, Element]) -> Tensor:
    """[33, 4] float32: mantissa, lowest, highest and largest for each number of bits. Bits without a format use the next wider
    one; bits above the widest use the widest, and are rejected by the caller."""
    widths = sorted(formats)
    chosen = [formats[next((width for width in widths if width >= bits), widths[-1])] for bits in range(FLOAT + 1)]
    return torch.tensor([element[1:] for element in chosen], dtype=torch.float32)


def exponent_of(x: Tensor) -> Tensor:
    """floor(log2 |x|) of float32 as int32; -127 for zeros and denormals, 128 for infinities and NaN."""
    return ((x.view(torch.int32) >> 23) & 0xFF) - 127


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float32 for int32 exponents from -126 to 127, exactly."""
    return ((exponent + 127) << 23).view(torch.float32)


def round_to_element(x: Tensor, element: Tensor, noise: Tensor | None = None, rounding: str = "even") -> Tensor:
    """x (float32) rounded to a format and saturated at its largest value; infinities also saturate, NaN stays NaN.

    Args:
        x: of any shape.
        element: [4], a row of `elements_by_bits`.
        noise: in [-1/2, 1/2) steps, added before rounding: stochastic rounding, unbiased unless saturated.
        rounding: round halves to even (`even`) or away from zero (`nearest`).
    """
    mantissa, lowest, largest = element[0].to(torch.int32), element[1].to(torch.int32), element[3]
    x = torch.minimum(torch.maximum(x, -largest), largest)
    unit = torch.maximum(exponent_of(x), lowest) - mantissa
    code = x * power_of_two(-unit)
    if noise is not None:
        code = code + noise
    code = code.round() if rounding == "even" else code.sign() * (code.abs() + 0.5).floor()
    return torch.minimum(torch.maximum(code * power_of_two(unit), -largest), largest)
