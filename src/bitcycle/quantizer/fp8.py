"""fp8: 8-bit floating point with one scale for the tensor: E4M3 forward, E5M2 for gradients.

    Q(x) = round(x s) / s,    s = largest / max |x|        of this tensor (`scaling=current`), or
                              s = largest / max_i a_i      with the largest magnitudes a_i of the last calls (`delayed`)

    weight, activation    rounded to nearest, halves to even, saturated, straight-through
    gradient              the same, or stochastically if `stochastic` is true

One copy of a tensor serves all products, as its scale factors out of any sum. Infinities do not affect s; they saturate, but stay
infinite in gradients, so that a gradient scaler notices an overflow. NaN stays NaN, a tensor of zeros has s = 1. Delayed scaling
starts with the current scale; evaluation leaves the history unchanged.
A recurrent layer's input sequence has one scale, its hidden state one for each time step.

>>> import torch
>>> from bitcycle.quantizer import quantize
>>> quantize(torch.tensor([[0.1, 0.4, -1.1, 448.0]]), 8, quantizer="fp8", role="weight").tolist()
[[0.1015625, 0.40625, -1.125, 448.0]]

Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; delayed scaling as NVIDIA's Transformer Engine documents it.
Differs from the authors' code in starting from the current scale instead of 1; equals PyTorch's casts to float8_e4m3fn and
float8_e5m2 wherever these do not overflow.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bitcycle import distributed
from bitcycle.quantizer.autograd import is_recomputation
from bitcycle.quantizer.base import GradientQuantizer, TensorQuantizer
from bitcycle.quantizer.compile_utils import kernel
from bitcycle.quantizer.format import ELEMENTS, Element, FormatOptions, Formatted, round_to_element
from bitcycle.quantizer.layout import flat, rows, unflat
from bitcycle.randomness import uniform_noise
from bitcycle.settings import setting

LARGEST_SCALE = 2.0**126
HISTORY = 16
"""Calls that delayed scaling remembers."""


def magnitude(x: Tensor) -> Tensor:
    """The largest finite |x|, a scalar."""
    return torch.where(x.isfinite(), x.abs(), 0).amax()


def quantize_scaled(x: Tensor, largest: Tensor, element: Tensor, bits: Tensor, noise: Tensor | None = None) -> Tensor:
    """x (float32) in a format scaled so that its largest value represents `largest`; 0 bits returns x. Any shape, kept;
    `largest` is a scalar."""
    scale = torch.where(largest > 0, (element[3] / largest).clamp_max(LARGEST_SCALE), 1)
    return torch.where(bits > 0, round_to_element(x * scale, element, noise) / scale, x)


class Scaled(Formatted):
    """Maps the largest magnitude, of this tensor or of the last calls, to the end of the format's range."""

    history: Tensor

    def __init__(self, options: "Fp8", role: str, compile: bool) -> None:
        super().__init__(options.formats(role), compile, options.stochastic)
        calls = HISTORY if options.scaling == "delayed" else 0
        self.samples_are_independent = calls > 0
        self.register_buffer("history", torch.zeros(calls))

    def quantized(self, x: Tensor, bits: Tensor, noise: Tensor | None = None) -> Tensor:
        """x quantized; training with nonzero bits updates the history."""
        if not x.numel():
            return x
        vector = flat(x).float()
        largest = distributed.all_max(kernel(magnitude, self.compile_kernel)(vector))
        if len(self.history):
            remembered = self._remembered(largest, bits)
            largest = torch.where(remembered > 0, remembered, largest)
        function = kernel(quantize_scaled, self.compile_kernel)
        return unflat(function(vector, largest, self.element(bits), bits, noise), like=x)

    def _remembered(self, largest: Tensor, bits: Tensor) -> Tensor:
        """The largest magnitude of the last calls; in training this one is added to them."""
        remembered = self.history.amax()
        if self.training:
            moved = torch.cat([largest.view(1), self.history[:-1]])
            self.history.copy_(torch.where(bits > 0, moved, self.history))
        return remembered


class Fp8Quantizer(Scaled, TensorQuantizer):
    """Weights or activations with one scale, straight-through."""

    steps_are_independent = True  # a sequence has one scale
    calls: Tensor | None = None
    """[2, calls]: largest magnitudes of the last calls, the latest first, and the magnitudes that scaled them."""

    def _remembered(self, largest: Tensor, bits: Tensor) -> Tensor:
        """As of all tensors; in a recomputation that of the call with this largest magnitude, the latest of several."""
        if is_recomputation() and self.calls is not None:
            return self.calls[1, (self.calls[0] == largest).int().argmax()]
        remembered = super()._remembered(largest, bits)
        if not torch.compiler.is_compiling():  # which would not allow it
            call = torch.stack([largest, remembered]).view(2, 1)
            self.calls = call if self.calls is None else torch.cat([call, self.calls[:, : HISTORY - 1]], dim=1)
        return remembered

    def rounded(self, x: Tensor, bits: Tensor) -> Tensor:
        return self.quantized(x, bits)


class Fp8Gradient(Scaled, GradientQuantizer):
    """Gradients with one scale."""

    def quantize(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        noise = None
        if self.stochastic:
            matrix = rows(gradient)
            noise = uniform_noise(matrix.shape, step_key ^ layer_key, distributed.first_element(matrix)).view(-1)
        return torch.where(gradient.isinf(), gradient, self.quantized(gradient, bits, noise))

    def quantize_steps(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_keys: Tensor) -> Tensor:
        return self.quantize(gradient.flatten(0, 1), bits, step_key, layer_keys[:1]).view(gradient.shape)


@dataclass
class Fp8(FormatOptions):
    """Options of scaled 8-bit floating point."""

    quantizers = (Fp8Quantizer, Fp8Gradient)

    name: str = "fp8"
    scaling: str = setting(
        "delayed",
        "scale by the largest magnitude of the last 16 calls (delayed), or of this tensor (current)",
        choices=("delayed", "current"),
    )
    stochastic: bool = setting(False, "round gradients stochastically; false: to nearest, halves to even")

    def formats(self, role: str) -> Mapping[int, Element]:
        return {8: ELEMENTS["e5m2" if role == "gradient" else "e4m3"]}
