"""Layers of timm: Conv2dSame, the convolution with TensorFlow's padding in its tf_ networks, such as tf_efficientnet_b0."""

from timm.layers.conv2d_same import Conv2dSame
from timm.layers.padding import pad_same
from torch import Tensor

from bitcycle.layer.products.convolution import QuantizedConvolution
from bitcycle.layer.products.quantized import CONVERSIONS


class QuantizedConv2dSame(QuantizedConvolution, Conv2dSame):
    """A quantized timm Conv2dSame, whose input is padded after it is quantized: [N, C, H, W] -> [N, C', H', W']."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padded = pad_same(x, list(self.kernel_size), list(self.stride), list(self.dilation))
        return super()._conv_forward(padded, weight, bias)


CONVERSIONS[Conv2dSame] = QuantizedConv2dSame
