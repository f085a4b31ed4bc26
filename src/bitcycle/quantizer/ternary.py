"""Ternary weights: symmetric values from the current weights (ternary), or two trained values (ttq).

    ternary    th = f mean |w| of the layer, f = 2/3,   a = mean of |w| above th,   w_q = a sign(w) [|w| > th], straight-through
    ttq        th = t max |w| of the layer, t = 0.05;   w_q = Wp where w > th,  -Wn where w < -th,  else 0;   Wp = Wn = 1 at first
               dL/dw  = g (Wp, 1, Wn) on (positive, zero, negative) weights, g = dL/dw_q
               dL/dWp = sum of g over the positive,   dL/dWn = - sum of g over the negative ones

>>> from bitcycle.quantizer import quantize
>>> quantize(torch.tensor([[-1.0, 0.25, 2.0]]), 2, quantizer="ternary", role="weight").tolist()
[[-1.5, 0.0, 1.5]]
>>> quantize(torch.tensor([[-1.0, 0.04, 0.3]]), 2, quantizer="ttq", role="weight").tolist()
[[-1.0, 0.0, 1.0]]

Source: for ternary HLHLp, section 4.2, which cites HitNet (Wang et al. 2018) for its ternary recurrent networks; no code was
released. Differs from HitNet in omitting its stochastic activations and slope factor: HLHLp has 4-level activations, here those
of uniform_l2, as for ttq.

For ttq HLHLp, section 3.2, after Zhu et al. 2017, "Trained ternary quantization". The TTQ paper prints dL/dWn without the
minus; its authors' code, which uses automatic differentiation, has it. `grad_sign=published` follows the print. No
difference from the authors' code is known: as there, Wp and Wn are not kept positive and have no weight decay, and first and
last layer stay float.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitcycle.quantizer.autograd import with_gradient
from bitcycle.quantizer.base import TensorQuantizer
from bitcycle.quantizer.layout import computable
from bitcycle.quantizer.uniform import UniformActivationOptions
from bitcycle.settings import setting


def ternarize(weight: Tensor, factor: float, bits: Tensor) -> Tensor:
    """a sign(w) where |w| > factor * mean |w|, else 0; a is the mean magnitude above the threshold.
    Infinite elements and NaN stay; 0 bits returns the weight."""
    magnitudes = computable(weight).abs()
    above = magnitudes > factor * magnitudes.mean()
    scale = torch.where(above, magnitudes, 0).sum() / above.sum().clamp_min(1)
    values = torch.where(above, weight.sign() * scale, 0).to(weight.dtype)
    return torch.where((bits > 0) & weight.isfinite(), values, weight)


class TernaryWeight(TensorQuantizer):
    """Symmetric ternary weights, with one threshold and scale per layer from the current weights."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def rounded(self, x: Tensor, bits: Tensor) -> Tensor:
        return ternarize(x, self.factor, bits)


@dataclass
class Ternary(UniformActivationOptions):
    """Options of symmetric ternary weights."""

    name: str = "ternary"
    threshold: float = setting(
        2 / 3, "threshold of zero weights, times the layer's mean |w| (HitNet: 2/3; TWN: 0.7)", minimum=0
    )

    def bits(self, role: str) -> range:
        return range(2, 3) if role == "weight" else super().bits(role)

    def weight(self, compile: bool) -> TernaryWeight:
        return TernaryWeight(self.threshold)


def ternary_signs(weight: Tensor, threshold: float) -> Tensor:
    """+1 above threshold * max |w|, -1 below its negative, else 0. Any shape, kept."""
    w = computable(weight)
    limit = threshold * w.abs().amax()
    return (w > limit).to(weight.dtype) - (w < -limit).to(weight.dtype)


def trained_ternary(weight: Tensor, positive: Tensor, negative: Tensor, threshold: float, bits: Tensor) -> Tensor:
    """Wp, 0 or -Wn for each weight; infinite elements and NaN stay. 0 bits returns the weight."""
    signs = ternary_signs(weight, threshold)
    values = torch.where(signs > 0, positive, torch.where(signs < 0, -negative, 0)).to(weight.dtype)
    return torch.where((bits > 0) & weight.isfinite(), values, weight)


class TrainedTernaryWeight(TensorQuantizer):
    """Asymmetric ternary weights with trainable values, which do not change in the float phase (0 bits)."""

    def __init__(self, threshold: float, published_sign: bool) -> None:
        super().__init__()
        self.threshold, self.published_sign = threshold, published_sign
        self.positive = nn.Parameter(torch.ones(()))
        self.negative = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        return with_gradient(self._quantize, self._gradients, x, self.positive, self.negative, bits)

    def _quantize(self, x: Tensor, positive: Tensor, negative: Tensor, bits: Tensor) -> Tensor:
        return trained_ternary(x, positive, negative, self.threshold, bits)

    def _gradients(
        self, gradient: Tensor, x: Tensor, positive: Tensor, negative: Tensor, bits: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        signs = torch.where(bits > 0, ternary_signs(x, self.threshold), 0)
        of_x = gradient * torch.where(signs > 0, positive, torch.where(signs < 0, negative, 1))
        of_negative = torch.where(signs < 0, gradient, 0).sum() * (1 if self.published_sign else -1)
        return of_x, torch.where(signs > 0, gradient, 0).sum(), of_negative


@dataclass
class Ttq(UniformActivationOptions):
    """Options of trained ternary quantization."""

    # as in the authors' code; a classifier with Wp = Wn = 1, without batch norm, hardly trains
    float_roles = ("first", "last")

    name: str = "ttq"
    threshold: float = setting(
        0.05, "threshold of zero weights, times the layer's max |w| (0.05 in TTQ)", minimum=0, maximum=1
    )
    grad_sign: str = setting(
        "derivative",
        "sign of dL/dWn: minus the sum over the negative weights, as in the derivative and the authors' code, or plus, as"
        " printed in the TTQ paper (published)",
        choices=("derivative", "published"),
    )

    def bits(self, role: str) -> range:
        return range(2, 3) if role == "weight" else super().bits(role)

    def weight(self, compile: bool) -> TrainedTernaryWeight:
        return TrainedTernaryWeight(self.threshold, self.grad_sign == "published")
