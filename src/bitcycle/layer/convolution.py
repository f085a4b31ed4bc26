"""Quantized convolutions in one to three dimensions, and transposed ones in two.

A transposed convolution's weight [in, out, k, k] is also quantized with one range per output channel.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.layer.bifurcation import Product
from bitcycle.layer.block_product import CONVOLUTION, Axes
from bitcycle.layer.quantized import CONVERSIONS, QuantizedLayer


class QuantizedConvolution(QuantizedLayer):
    """Mixin that quantizes convolutions in any number of dimensions; shapes as in PyTorch."""

    has_positions = False
    axes = CONVOLUTION
    _conv_forward: Product

    def forward(self, x: Tensor) -> Tensor:
        return self.quantized_product(x, self._conv_forward)


class QuantizedConv1d(QuantizedConvolution, nn.Conv1d):
    """A quantized torch.nn.Conv1d: [N, C, L] -> [N, C', L']."""


class QuantizedConv2d(QuantizedConvolution, nn.Conv2d):
    """A quantized torch.nn.Conv2d, grouped and depthwise included: [N, C, H, W] -> [N, C', H', W']."""


class QuantizedConv3d(QuantizedConvolution, nn.Conv3d):
    """A quantized torch.nn.Conv3d: [N, C, D, H, W] -> [N, C', D', H', W']."""


class QuantizedConvTranspose2d(QuantizedLayer, nn.ConvTranspose2d):
    """A quantized torch.nn.ConvTranspose2d with one group. Shapes as there: [N, C, H, W] -> [N, C', H', W']."""

    has_positions = False
    axes = Axes(1, 0, 1, by_position=True)

    def rows_of(self, weight: Tensor) -> Tensor:
        return weight.transpose(0, 1)

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        sizes: Any = (self.stride, self.padding, self.kernel_size, 2, self.dilation)
        padding = self._output_padding(x, output_size, *sizes)

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            geometry: Any = (self.stride, self.padding, padding, self.groups, self.dilation)
            return F.conv_transpose2d(x, weight, bias, *geometry)

        return self.quantized_product(x, product)


CONVERSIONS |= {
    nn.Conv1d: QuantizedConv1d,
    nn.Conv2d: QuantizedConv2d,
    nn.Conv3d: QuantizedConv3d,
    nn.ConvTranspose2d: QuantizedConvTranspose2d,
}
