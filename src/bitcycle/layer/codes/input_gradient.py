"""The input gradient of a convolution as integer sums over the codes of its output's gradient.

    dL/dX[q, c] = sum over o and k of G[q + padding - k, o] W[o, c, k],     G = s n + z,    W[o, c, k] ~ t_c m,   |m| <= 32,639

for convolutions of stride 1 whose weight gradient is also one (weight_gradient.py), with multiples of 16 input channels. Each
term has the scale of its output channel, so that codes of the weight have no common factor: the quantized weight is rounded
once more, to 16 bits with one scale per input channel. Its two bytes are multiplied by n separately, exactly. The relative error
of the gradient is about 3e-5 (float32 sums: 3e-7). Not in the authors' code, which multiplies float32 tensors.
"""

from torch import Tensor, nn

from bitcycle.layer.codes.weight_gradient import library
from bitcycle.quantizer.codes import GradientCodes

_CHANNELS = 16
_MOST_TERMS = 65_000


def sums_input(layer: nn.Conv2d) -> bool:
    """Whether the input gradient of the layer is a sum of integers if its weight gradient is."""
    kernel, padding = layer.kernel_size[0], int(layer.padding[0])
    terms = kernel * kernel * layer.out_channels
    return layer.stride[0] == 1 and padding < kernel and layer.in_channels % _CHANNELS == 0 and terms <= _MOST_TERMS


def input_gradient(gradient: GradientCodes, weight: Tensor, layer: nn.Conv2d) -> Tensor:
    """The gradient [N, C, H, W] in float32.

    Args:
        gradient: codes of the output's gradient [N, O, H', W'].
        weight: the quantized weight [O, C, k, k] in float32.
        layer: a layer for which `sums_input` is true.
    """
    functions = library()
    assert functions is not None, "checked by sums_integers"
    operands = (each.movedim(1, -1).contiguous() for each in (gradient.integers, weight))
    found = functions.input_gradient(*operands, int(layer.padding[0]), gradient.scale, gradient.zero_point)
    return found.movedim(-1, 1)
