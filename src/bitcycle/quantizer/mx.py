"""mx: the OCP Microscaling formats, blocks of 32 elements of 4, 6 or 8 bits that share a power-of-two scale.

    X = 2^max(floor(log2 max |x|) - h, -127)     of the block, h the exponent of the element's largest value
    Q(x) = X round(x / X)                        round to the element, saturated (see format.py)

    weight, activation    rounded to nearest, halves to even, straight-through
    gradient              rounded stochastically unless `stochastic` is false

A block with an infinity or a NaN becomes NaN, as in E8M0; a block of zeros stays zero. Values between the element's largest
value and twice the power of two of its binade saturate, also in gradients.

>>> import torch
>>> from bitcycle.quantizer import quantize
>>> quantize(torch.tensor([[0.1, 0.4, -1.1, 5.0]]), 4, quantizer="mx", role="weight").tolist()
[[0.0, 0.5, -1.0, 4.0]]

The bits of a schedule select the format, with one table for the forward pass and one for gradients: 4 mxfp4_e2m1, 6 mxfp6_e2m3,
8 mxfp8_e4m3, and mxfp8_e5m2 for gradients; nvfp4 (see quantizer=nvfp4) can take the place of mxfp4_e2m1. Bits between two
formats take the next wider one (`between`).

quantizer="mxfp4_backward" is the recipe of Tseng et al. 2025, "Training LLMs with MXFP4": options of the backward pass.

Source: OCP Microscaling Formats (MX) specification 1.0; Rouhani et al. 2023, "Microscaling data formats for deep learning",
which trains with blocks along the dimension that each product sums over. Differs from the authors' code only in stochastic
rounding, which theirs draws from a generator: outputs equal those of their emulation library bit for bit
(tests/data/golden-mx).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bitcycle.quantizer import nvfp4
from bitcycle.quantizer.block import BlockOptions, Scaling, join, split
from bitcycle.quantizer.format import ELEMENTS, Element, elements_by_bits, exponent_of, power_of_two, round_to_element
from bitcycle.randomness import int32_key, uniform_noise
from bitcycle.settings import SettingError, nearest, setting

BLOCK = 32
LOWEST_SCALE = -127
FORMATS: dict[str, Element] = {
    f"mx{'' if name.startswith('int') else f'fp{element.bits}_'}{name}": element for name, element in ELEMENTS.items()
}
"""Formats by name: mxfp4_e2m1, mxfp6_e2m3, mxfp6_e3m2, mxfp8_e4m3, mxfp8_e5m2, mxint8, and mxint4 (not in OCP)."""
BLOCK_FORMATS = FORMATS | {"nvfp4": nvfp4.ELEMENT}
"""Formats of the quantizer: those of MX and NVFP4."""
ROUNDINGS = ("even", "nearest", "stochastic")


def quantize_blocks(
    blocks: Tensor,
    element: Tensor,
    bits: Tensor,
    noise: Tensor | None = None,
    rounding: str = "even",
    headroom: float = 1.0,
) -> Tensor:
    """Blocks [count, size, inner] (float32, from `block.split`) in an MX format; each [i, :, j] shares a scale. 0 bits return
    them. `element`, `noise` and `rounding` are those of `round_to_element`; `headroom` scales the elements while they are
    rounded."""
    exponent = exponent_of(blocks.abs().amax(1, keepdim=True))
    shared = (exponent - element[2].to(torch.int32)).clamp_min(LOWEST_SCALE)
    half = shared >> 1  # in two steps, as 2^-127 is denormal
    scaled = blocks * power_of_two(-half) * power_of_two(half - shared) * headroom
    rounded = round_to_element(scaled, element, noise, rounding)
    quantized = rounded * power_of_two(half) * power_of_two(shared - half) / headroom
    quantized = torch.where(exponent > 127, torch.nan, quantized)
    return torch.where(bits > 0, quantized, blocks)


def quantize_mx(
    x: Tensor, element: str = "mxfp8_e4m3", rounding: str = "even", block: int = BLOCK, dim: int = -1, seed: int = 0
) -> Tensor:
    """x in an MX format, dequantized.

    >>> quantize_mx(torch.tensor([0.3, 0.7, 3.0, -40.0]), element="mxfp4_e2m1").tolist()
    [0.0, 0.0, 4.0, -32.0]

    Args:
        x: float tensor.
        element: a name in `FORMATS`.
        rounding: to nearest with halves to the even neighbour (`even`) or away from zero (`nearest`), or `stochastic`.
        block: elements that share a scale.
        dim: the dimension that is divided into blocks; the last block is padded with zeros.
        seed: seed of stochastic rounding.

    Raises:
        SettingError (a ValueError): for an unknown format or rounding, or a block without elements.
    """
    if element not in FORMATS:
        raise SettingError("element", element, "is not an MX format", nearest(element, FORMATS))
    if rounding not in ROUNDINGS:
        raise SettingError("rounding", rounding, "is not a rounding mode", nearest(rounding, ROUNDINGS))
    if block < 1:
        raise SettingError("block", block, "is not positive", f"use {BLOCK}, as in the specification")
    if not x.numel():
        return x
    form = FORMATS[element]
    row = elements_by_bits({form.bits: form})[form.bits].to(x.device)
    blocks, noise = split(x, dim, block), None
    if rounding == "stochastic":
        noise = uniform_noise(blocks.shape, torch.tensor(int32_key(seed), dtype=torch.int32, device=x.device))
        rounding = "even"
    return join(quantize_blocks(blocks, row, torch.ones_like(row[0]), noise, rounding), x, dim)


def _by_width(names: list[str], field: str) -> Mapping[int, str]:
    formats = {BLOCK_FORMATS[name].bits: name for name in names}
    if not names or len(formats) < len(names):
        remedy = "give at most one format of each width, as [mxfp4_e2m1,mxfp6_e2m3,mxfp8_e4m3]"
        raise SettingError(field, names, "names no format, or two of the same width", remedy)
    return formats


@dataclass
class Mx(BlockOptions):
    """Options of the microscaling quantizer."""

    name: str = "mx"
    forward_formats: list[str] = setting(
        ["mxfp4_e2m1", "mxfp6_e2m3", "mxfp8_e4m3"],
        "formats of weights and activations; the bits of a schedule select the format of that width",
        choices=BLOCK_FORMATS,
    )
    gradient_formats: list[str] = setting(
        ["mxfp4_e2m1", "mxfp6_e2m3", "mxfp8_e5m2"], "formats of gradients, selected the same way", choices=BLOCK_FORMATS
    )
    block: int = setting(BLOCK, "elements that share a scale (the specification: 32)", minimum=1, maximum=1024)

    def validate(self) -> None:
        super().validate()
        _by_width(self.forward_formats, "forward_formats")
        _by_width(self.gradient_formats, "gradient_formats")

    def formats(self, role: str) -> Mapping[int, Element]:
        return {bits: BLOCK_FORMATS[name] for bits, name in self._names(role).items()}

    def scalings(self, role: str) -> Mapping[int, Scaling]:
        powers = Scaling(quantize_blocks, self.block, of_tensor=False)
        return {bits: nvfp4.SCALING if name == "nvfp4" else powers for bits, name in self._names(role).items()}

    def _names(self, role: str) -> Mapping[int, str]:
        field = "gradient_formats" if role == "gradient" else "forward_formats"
        return _by_width(getattr(self, field), field)
