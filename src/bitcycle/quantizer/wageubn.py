"""WAGEUBN: weights, activations and errors in fixed point, with power-of-two steps and ranges.

    Q(x, k) = rint(x 2^(k-1)) / 2^(k-1);     R(e) = 2^rint(log2 max |e|) of the tensor
    weight      W   clip(Q(w, k), -1 + 2^(1-k), 1 - 2^(1-k)), straight-through
    activation  A   Q(x, k) without clip, straight-through
    gradient    E2  at a layer's output, s = R 2^(1-k), v = e / s:
                    s sign(v) Q(|v|, k) where |v| < 1, else s clip(rint v, +-(2^(k-1) - 1))
                E1  at a layer's input: R clip(Q(e / R, k), -1, 1)

>>> from bitcycle.quantizer import quantize
>>> quantize(torch.tensor([[-2.0, 0.3, 0.4]]), 3, quantizer="wageubn", role="weight").tolist()
[[-0.75, 0.25, 0.5]]

Source: Yang et al. 2020, "Training high-performance and large-scale deep neural networks with full 8-bit integers", section 3,
and its official code; a baseline of CPT, table 2, and FracTrain, table 2, which do not describe theirs. Differs from the
authors' code in what stays float32 (batch norm, weight gradients, momentum and update), in errors of zero, which stay zero, and
in E1, which is applied to the gradient of each layer's input before it is added to that of a skip connection. The paper clips E1
one step earlier than the code, which is followed here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bitcycle import distributed
from bitcycle.quantizer.base import GradientQuantizer, QuantizerOptions, TensorQuantizer
from bitcycle.quantizer.compile_utils import kernel
from bitcycle.quantizer.layout import computable, flat, unflat

LEAST_RANGE = 2.0**-112
"""Minimum of R where it divides, so that errors of (almost) zero become zero."""


def half_levels(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """2^(bits - 1), at 1 bit or more. Any shape, kept."""
    return (1 << (bits.clamp_min(1) - 1)).to(dtype)


def round_fixed(x: Tensor, bits: Tensor) -> Tensor:
    """Q(x, k): x in steps of 2^(1-k). Any shape, kept."""
    scale = half_levels(bits, x.dtype)
    return (x * scale).round() / scale


def quantize_weight(weight: Tensor, bits: Tensor) -> Tensor:
    """W: fixed point within +-(1 - 2^(1-k)), an infinite element or NaN as itself; 0 bits returns the weight."""
    limit = 1 - 1 / half_levels(bits, weight.dtype)
    quantized = torch.minimum(torch.maximum(round_fixed(weight, bits), -limit), limit)
    return torch.where((bits > 0) & weight.isfinite(), quantized, weight)


def quantize_activation(x: Tensor, bits: Tensor) -> Tensor:
    """A: fixed point without clipping; 0 bits returns x. Any shape, kept."""
    return torch.where(bits > 0, round_fixed(x, bits), x)


def power_of_two_range(x: Tensor) -> Tensor:
    """R = 2^rint(log2 max |x|) of the whole batch, exactly, as a scalar; 0 for a tensor of zeros. If an element is
    infinite or NaN, the range is not finite, nor are the quantized errors, so that a gradient scaler detects the overflow.

    max |x| = m 2^e with m in [1/2, 1): dividing by 2m leaves a power of two without a logarithm's rounding.
    """
    largest = distributed.all_max(computable(x).abs().amax())
    mantissa, _ = torch.frexp(largest)
    below = torch.where(largest == 0, 0, largest / (2 * mantissa))
    return torch.where(mantissa >= 0.5**0.5, 2 * below, below)


def quantize_error_of_layer(error: Tensor, value_range: Tensor, bits: Tensor) -> Tensor:
    """E2: large errors in steps of R 2^(1-k), small ones (below one step) in steps 2^(k-1) times finer. Any shape, kept; R is
    a scalar."""
    scale = half_levels(bits, error.dtype)
    step = value_range.clamp_min(LEAST_RANGE) / scale
    v = error / step
    small = v.sign() * round_fixed(v.abs(), bits)
    large = torch.minimum(torch.maximum(v.round(), 1 - scale), scale - 1)
    quantized = step * torch.where(v.abs() < 1, small, large)
    return torch.where(bits > 0, quantized, error)


def quantize_error_of_input(error: Tensor, value_range: Tensor, bits: Tensor) -> Tensor:
    """E1: steps of R 2^(1-k) within +-R. Any shape, kept; R is a scalar."""
    unit = value_range.clamp_min(LEAST_RANGE)
    return torch.where(bits > 0, unit * round_fixed(error / unit, bits).clamp(-1, 1), error)


class WageubnQuantizer(TensorQuantizer):
    """W or A, element by element, straight-through."""

    samples_are_independent = True
    steps_are_independent = True
    has_fixed_steps = True

    def __init__(self, function: Callable[..., Tensor], compile: bool = False) -> None:
        super().__init__(compile)
        self.function = function

    def rounded(self, x: Tensor, bits: Tensor) -> Tensor:
        return self.on_elements(self.function, x, bits)


class WageubnError(GradientQuantizer):
    """E2 at a layer's output, or E1 at its input (`of_input`); rounded to nearest."""

    def __init__(self, of_input: bool = False, compile: bool = False) -> None:
        super().__init__(stochastic=False, compile=compile)
        self.function = quantize_error_of_input if of_input else quantize_error_of_layer

    def quantize(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        value_range = power_of_two_range(gradient)
        return unflat(kernel(self.function, self.compile_kernel)(flat(gradient), value_range, bits), like=gradient)


@dataclass
class Wageubn(QuantizerOptions):
    """Options of WAGEUBN."""

    name: str = "wageubn"

    def bits(self, role: str) -> range:
        return range(2, 17)

    def weight(self, compile: bool) -> WageubnQuantizer:
        return WageubnQuantizer(quantize_weight, compile)

    def activation(self, compile: bool, signed: bool = False) -> WageubnQuantizer:
        return WageubnQuantizer(quantize_activation, compile)

    def gradient(self, compile: bool) -> WageubnError:
        return WageubnError(compile=compile)

    def input_gradient(self, compile: bool) -> WageubnError:
        return WageubnError(of_input=True, compile=compile)
