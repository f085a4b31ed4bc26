"""Number formats of 4 to 8 bits, each described by four numbers so that all formats share one compiled program.

Quantizers with formats derive their options from `FormatOptions`: the bits of a schedule select a format.

A value v is rounded to m mantissa bits, with the step of the lowest binade below it (denormals), and saturates:

    e = max(floor(log2 |v|), lowest),   u = 2^(e - m),   round(v) = u rint(clamp(v, -largest, largest) / u)

A fixed-point format has a single binade. All of this is exact in float32: scalings by powers of two, and one rounding.

Source: OCP Microscaling Formats (MX) specification 1.0, section 5.3; OCP 8-bit floating point specification 1.0 (E4M3, E5M2).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from bitcycle.precision import FLOAT, Precision
from bitcycle.quantizer.base import ROLES, GradientQuantizer, QuantizerOptions, TensorQuantizer
from bitcycle.settings import setting


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


def next_wider(widths: Collection[int], bits: int) -> int:
    """The narrowest width of at least `bits`; the widest one for more bits, which the caller rejects.

    >>> next_wider([4, 6, 8], 5)
    6
    """
    return min((width for width in widths if width >= bits), default=max(widths))


def elements_by_bits(formats: Mapping[int, Element]) -> Tensor:
    """[33, 4] float32: mantissa, lowest, highest and largest for each number of bits. Bits without a format use the next wider
    one."""
    chosen = [formats[next_wider(formats, bits)] for bits in range(FLOAT + 1)]
    return torch.tensor([element[1:] for element in chosen], dtype=torch.float32)


def exponent_of(x: Tensor) -> Tensor:
    """floor(log2 |x|) of float32 as int32; -127 for zeros and denormals, 128 for infinities and NaN. Any shape, kept."""
    return ((x.view(torch.int32) >> 23) & 0xFF) - 127


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float32 for int32 exponents from -126 to 127, exactly. Any shape, kept."""
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


class Formatted(nn.Module):
    """Base of quantizers with formats, which the bits select."""

    elements: Tensor

    def __init__(self, formats: Mapping[int, Element], compile: bool, stochastic: bool) -> None:
        super().__init__()
        self.compile_kernel, self.stochastic = compile, stochastic
        self.register_buffer("elements", elements_by_bits(formats), persistent=False)

    def element(self, bits: Tensor) -> Tensor:
        """The row of `elements` for these bits."""
        return self.elements.index_select(0, bits.view(1)).view(-1)


@dataclass
class FormatOptions(QuantizerOptions):
    """Options of a quantizer with formats. The lowest and highest bits of a schedule must be those of a format."""

    between: str = setting(
        "next",
        "bits of a schedule between two formats: next: use (and count) the next wider format, or refuse",
        choices=("next", "refuse"),
    )

    quantizers: ClassVar[tuple[Callable[..., TensorQuantizer], Callable[..., GradientQuantizer]]]
    """Classes of the quantizers of tensors and of gradients."""

    def formats(self, role: str) -> Mapping[int, Element]:
        """The formats of tensors of `role` by their bits."""
        raise NotImplementedError

    def weight(self, compile: bool) -> TensorQuantizer:
        return self.quantizers[0](self, "weight", compile)

    def activation(self, compile: bool, signed: bool = False) -> TensorQuantizer:
        return self.quantizers[0](self, "activation", compile)

    def gradient(self, compile: bool) -> GradientQuantizer:
        return self.quantizers[1](self, "gradient", compile)

    def bits(self, role: str) -> Sequence[int]:
        return sorted(self.formats(role))

    def available(self, precision: Precision) -> Precision:
        """The bits of the formats used for `precision`; bits outside the range of formats are unchanged."""
        return Precision(*(self._next(role, bits) for role, bits in zip(ROLES, precision)))

    def _next(self, role: str, bits: int) -> int:
        offered = self.bits(role)
        if bits == FLOAT or self.between == "refuse" or not offered[0] < bits < offered[-1]:
            return bits
        return next_wider(offered, bits)

    def check(self, precisions: Iterable[Precision]) -> None:
        super().check(map(self.available, precisions))

    def check_ends(self, lowest: Precision, highest: Precision) -> None:
        super().check([lowest, highest])

    def storage_bits(self, role: str) -> Mapping[int, Fraction]:
        offered = self.bits(role)
        return {bits: Fraction(self._next(role, bits)) for bits in range(offered[0], offered[-1] + 1)}
