"""nvfp4: blocks of 16 elements of 4 bits (E2M1) with a scale in E4M3, and one float32 scale for the tensor.

    s = max |x| / (6 * 448)  of the tensor;    X = round_e4m3(max |x| / (6 s))  of the block
    Q(x) = s X round_e2m1(x r),    r = (1 / s) / X  rounded to float32 after each division

    weight, activation    rounded to nearest, halves to even, straight-through
    gradient              rounded stochastically unless `stochastic` is false

The order of the divisions decides ties; it is that of Transformer Engine and torchao, whose codes are the same bit by bit, except
for the lowest block scales: torchao raises X to 2^-6 at least, here X goes down to E4M3's denormal 2^-9.
A block with an infinity or a NaN becomes NaN and does not affect s; a block whose scale rounds to zero becomes zero. Blocks run
along the dimension that each product sums over, as with quantizer="mx". There is only a 4-bit format: schedules use 4 or
32 bits, or combine it with wider formats (`schedule.formats`).

>>> import torch
>>> from bitcycle.quantizer import quantize
>>> quantize(torch.tensor([[0.1, 0.4, -1.1, 6.0]]), 4, quantizer="nvfp4", role="weight").tolist()
[[0.0, 0.5, -1.0, 6.0]]

Source: NVIDIA 2025, "Pretraining large language models with NVFP4", section 2 and appendix B. Differs from the authors' code in
weights, whose blocks are 1x16 in both copies instead of 16x16, and in omitting random Hadamard transforms;
quantizer="nvfp4_pretraining" has both, and keeps some layers in float (there: BF16).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bitcycle.quantizer.block import BlockOptions, Scaling
from bitcycle.quantizer.format import ELEMENTS, Element, round_to_element

BLOCK = 16
SCALE = ELEMENTS["e4m3"]
TINY = 2.0**-64
"""Scale of a tensor below which its elements are multiplied by 1 / TINY before they are scaled."""


def quantize_blocks(blocks: Tensor, element: Tensor, bits: Tensor, noise: Tensor | None = None) -> Tensor:
    """Blocks [count, size, inner] (float32) in NVFP4; each [i, :, j] shares a scale. 0 bits return them. The shape is
    kept."""
    largest, magnitudes = element[3], blocks.abs()
    of_block = magnitudes.amax(1, keepdim=True)
    of_tensor = torch.where(magnitudes.isfinite(), magnitudes, 0).amax() / (largest * SCALE.largest)
    of_tensor = torch.where(of_tensor > 0, of_tensor, 1)
    scale = round_to_element(of_block / largest / of_tensor, torch.stack([largest.new_full((), n) for n in SCALE[1:]]))
    step = scale * of_tensor
    lift = torch.where(of_tensor < TINY, 1 / TINY, 1)  # exact; without it 1 / s could be infinite
    inverse = 1 / (of_tensor * lift) / scale
    quantized = step * round_to_element(torch.where(step > 0, blocks * lift * inverse, 0), element, noise)
    quantized = torch.where(of_block.isfinite(), quantized, torch.nan)
    return torch.where(bits > 0, quantized, blocks)


ELEMENT, SCALING = ELEMENTS["e2m1"], Scaling(quantize_blocks, BLOCK, of_tensor=True)


@dataclass
class Nvfp4(BlockOptions):
    """Options of NVFP4."""

    name: str = "nvfp4"

    def formats(self, role: str) -> Mapping[int, Element]:
        return {4: ELEMENT}

    def scalings(self, role: str) -> Mapping[int, Scaling]:
        return {4: SCALING}
