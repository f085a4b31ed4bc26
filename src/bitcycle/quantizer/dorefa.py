"""DoReFa: weights mapped to [-1, 1] by tanh, activations clipped to [0, 1], gradients with one range per sample.

    n = 2^k - 1,   q_k(x) = rint(n x) / n,   straight-through
    weight      k > 1: t = tanh(w), M = max |t| of the layer, w_q = 2 q_k(t / (2M) + 1/2) - 1, differentiated through M as well
                k = 1: E sign(w), E = mean |w| of the layer, straight through, E constant; the sign of 0 is +1
    activation  q_k(clip(x, 0, 1)), gradient 1 on [0, 1], else 0
    gradient    M = max |g| of each sample, 2M (q_k(clip(g / (2M) + 1/2 + u/n, 0, 1)) - 1/2), u uniform in [-1/2, 1/2)

>>> from bitcycle.quantizer import quantize
>>> quantize(torch.tensor([-0.2, 0.4, 1.7]), 2, quantizer="dorefa", role="activation").tolist()
[0.0, 0.3333333432674408, 1.0]

Source: Zhou et al. 2016, DoReFa-Net, sections 2.3 to 2.5, and its official code (tensorpack, examples/DoReFa-Net); a baseline
of CPT, table 2, and FracTrain, table 2, which do not describe theirs. Differs from the authors' code in samples with zero
gradient, which stay zero (theirs divides by zero), and in the sign of 0 for k = 1. Inputs of layers after a ReLU are clipped and
rounded; skip connections are not clipped, as in the official ResNet, whose activations are part of the branch. Signed inputs
(declared by the network or detected in the first batch) use SBM's affine quantizer, as [0, 1] would clip them.
"""

from dataclasses import dataclass, replace
from typing import Optional

import torch
from torch import Tensor

from bitcycle import distributed
from bitcycle.quantizer.affine import keyed_noise
from bitcycle.quantizer.autograd import gradient_inside, with_gradient
from bitcycle.quantizer.base import FunctionQuantizer, GradientQuantizer, QuantizerOptions, TensorQuantizer
from bitcycle.quantizer.compile_utils import kernel
from bitcycle.quantizer.layout import computable, flat, samples, unflat
from bitcycle.quantizer.sbm import SbmActivation
from bitcycle.settings import setting


def round_unit(x: Tensor, bits: Tensor) -> Tensor:
    """q_k: x in [0, 1] rounded onto the 2^bits values k / (2^bits - 1), at 1 bit or more."""
    levels = ((1 << bits) - 1).clamp_min(1).to(x.dtype)
    return (x * levels).round() / levels


def quantize_activation(x: Tensor, bits: Tensor) -> Tensor:
    """q_k(clip(x, 0, 1)); 0 bits returns x. Any shape, kept."""
    return torch.where(bits > 0, round_unit(x.clamp(0, 1), bits), x)


def quantize_weight(weight: Tensor, bits: Tensor) -> Tensor:
    """The weight of a layer on 2^bits values, an infinite element or NaN as itself; 0 bits returns the weight."""
    w = computable(weight)
    t = w.tanh()
    several = 2 * round_unit(t / (2 * _largest(t)) + 0.5, bits) - 1
    mean = w.abs().mean()
    single = torch.where(w >= 0, mean, -mean)
    return torch.where(w.isfinite(), torch.where(bits > 1, several, torch.where(bits == 1, single, w)), w).to(
        weight.dtype
    )


def weight_gradient(gradient: Tensor, weight: Tensor, bits: Tensor) -> Tensor:
    """dL/dw = (G/M - [|t| = M] sign(t) sum(G t) / M^2) (1 - t^2) for 2 bits and more; G at 0 bits and 1. All have the shape
    of the weight.

    Several maxima share their contribution, as in automatic differentiation.
    """
    g, t = computable(gradient), computable(weight).tanh()
    largest = _largest(t)
    at_maximum = (t.abs() == largest).to(t.dtype)
    through_maximum = at_maximum * t.sign() * ((g * t).sum() / largest / largest) / at_maximum.sum().clamp_min(1)
    return torch.where(bits > 1, (g / largest - through_maximum) * (1 - t * t), g).to(gradient.dtype)


def _largest(t: Tensor) -> Tensor:
    """max |t|, or 1 for a layer of zeros."""
    largest = t.abs().amax()
    return torch.where(largest > 0, largest, 1)


def quantize_gradient(gradient: Tensor, bits: Tensor, *keys: Tensor | None) -> Tensor:
    """Each row (sample) of a matrix with its own range +-M; a row of zeros stays zero. 0 bits returns the gradient. `keys` of
    the noise are those of `keyed_noise`. Gradients [N, F], as the result."""
    levels = ((1 << bits) - 1).clamp_min(1).to(gradient.dtype)
    largest = gradient.abs().amax(dim=1, keepdim=True)
    unit = gradient / (2 * torch.where(largest > 0, largest, 1)) + 0.5
    if (noise := keyed_noise(gradient, keys)) is not None:
        unit = unit + noise / levels
    quantized = 2 * largest * (round_unit(unit.clamp(0, 1), bits) - 0.5)
    return torch.where(bits > 0, quantized, gradient)


class DorefaActivation(TensorQuantizer):
    """Activations clipped to [0, 1] and rounded; signed ones use SBM's quantizer."""

    samples_are_independent = True
    steps_are_independent = True
    non_negative = True
    fixed_range: tuple[float, float] | None = (0.0, 1.0)

    def __init__(self, compile: bool = False, debias: bool = False) -> None:
        super().__init__(compile)
        self.debias = debias
        self.expect_signed()
        self.signed_form = SbmActivation(compile=compile, debias=debias)

    def accept_signed(self, x: Tensor) -> None:
        super().accept_signed(x)
        self.fixed_range = None

    def forget_signed(self) -> None:
        super().forget_signed()
        new = SbmActivation(compile=self.compile_kernel, debias=self.debias).train(self.training)
        self.fixed_range, self.signed_form = (0.0, 1.0), new.to(self.signed_inputs.device)

    @property
    def lacks_values(self) -> bool:
        return not self.non_negative and self.signed_form.lacks_values

    @property
    def adapts(self) -> bool:
        return self.non_negative or self.signed_form.adapts

    def prepare(self, x: Tensor, bits: int) -> None:
        if not self.non_negative:
            self.signed_form.prepare(x, bits)

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        if not self.non_negative:
            return self.signed_form(x, bits)
        return with_gradient(self.rounded, self._gradient, x, bits)

    def rounded(self, x: Tensor, bits: Tensor) -> Tensor:
        return self.on_elements(quantize_activation, x, bits)

    def _gradient(self, gradient: Tensor, x: Tensor, bits: Tensor) -> Tensor:
        return self.on_elements(gradient_inside, gradient, flat(x), 0, 1, bits)


class DorefaGradient(GradientQuantizer):
    """Gradients with one range per sample, by default rounded stochastically."""

    def quantize(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        matrix = samples(gradient)
        keys = (step_key, layer_key, distributed.first_element(matrix)) if self.stochastic else ()
        return unflat(kernel(quantize_gradient, self.compile_kernel)(matrix, bits, *keys), like=gradient)


@dataclass
class Dorefa(QuantizerOptions):
    """Options of DoReFa."""

    name: str = "dorefa"
    stochastic: bool = setting(True, "add noise to gradients before rounding (DoReFa 2.5)")
    running_range: Optional[str] = setting(
        None,
        "running range of signed activations: starts at zero (code, as SBM's released code), or is corrected for that"
        " (debiased); null: code on the command line, debiased in quantize_model",
        choices=("code", "debiased"),
    )

    def as_released(self) -> "Dorefa":
        return replace(self, running_range=self.running_range or "code")

    def bits(self, role: str) -> range:
        return range(1, 17)

    def weight(self, compile: bool) -> TensorQuantizer:
        # not compiled: tanh and sums would differ in the last bit
        return FunctionQuantizer(quantize_weight, weight_gradient)

    def activation(self, compile: bool, signed: bool = False) -> TensorQuantizer:
        debias = self.running_range != "code"
        return SbmActivation(compile=compile, debias=debias) if signed else DorefaActivation(compile, debias)

    def gradient(self, compile: bool) -> DorefaGradient:
        return DorefaGradient(self.stochastic, compile)
