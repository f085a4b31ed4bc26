"""The gradients of a convolution as integer sums: of its weight and input, from the codes of its output's gradient.

    dL/dW[o, c, k] = sum over images and positions p of G[p, o] X[p + k, c],      G = s n + z,   X = s' n' + z'
                   = s s' sum n n' + z s' sum n' + s z' sum n + z z' sum 1     over positions p with p + k inside the image

for 1x1 and 3x3 convolutions with multiples of 16 output channels, on CPUs with 8-bit products (AVX-512 VNNI). The sums are
exact and the rest is computed in float64, so that the result is more accurate than float32 sums of decoded tensors, in about
a third of their time.

    dL/dX[q, c] = sum over o and k of G[q + padding - k, o] W[o, c, k],     W[o, c, k] ~ t_c m,   |m| <= 32,639

for those of them that have stride 1 and multiples of 16 input channels. Each term has the scale of its output channel, so that
codes of the weight have no common factor: the quantized weight is rounded once more, to 16 bits with one scale per input
channel. Its two bytes are multiplied by n separately, exactly. The relative error of the gradient is about 3e-5 (float32 sums:
3e-7). Neither is in the authors' code, which multiplies float32 tensors.
"""

import math

from torch import Tensor, nn

from bitcycle.layer.codes.support import library
from bitcycle.quantizer.codes import Codes, GradientCodes

_CHANNELS = 16
_MOST_PLACES = 65_000
"""Maximum number of pixels of a padded image: sums of products over as many positions stay below 2^31."""
_MOST_TERMS = 65_000
"""Maximum number of terms of an input gradient, for the same reason."""


def sums_integers(layer: nn.Module, integers: Tensor) -> bool:
    """Whether the weight gradient of the layer can be summed in integers for an input with these codes."""
    if not isinstance(layer, nn.Conv2d) or not integers.is_cpu or layer.dilation != (1, 1) or layer.groups != 1:
        return False
    return (
        layer.kernel_size in ((1, 1), (3, 3))
        and layer.stride[0] == layer.stride[1]
        and not isinstance(layer.padding, str)
        and layer.padding[0] == layer.padding[1]
        and layer.out_channels % _CHANNELS == 0
        and math.prod(size + 2 * int(layer.padding[0]) for size in integers.shape[2:]) <= _MOST_PLACES
        and library() is not None
    )


def weight_gradient(x: Codes, gradient: GradientCodes, layer: nn.Conv2d) -> Tensor:
    """The gradient [O, C, k, k] in float32.

    Args:
        x: codes of the input [N, C, H, W].
        gradient: codes of the output's gradient [N, O, H', W'].
        layer: a layer for which `sums_integers` is true.
    """
    functions = library()
    assert functions is not None, "checked by sums_integers"
    integers = [codes.integers.movedim(1, -1).contiguous() for codes in (x, gradient)]
    geometry = (layer.kernel_size[0], layer.stride[0], int(layer.padding[0]))
    steps = (float(x.scale), float(x.zero_point), gradient.scale, gradient.zero_point)
    return functions.sum_weight_gradient(*integers, *geometry, *steps).movedim(-1, 1)


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
