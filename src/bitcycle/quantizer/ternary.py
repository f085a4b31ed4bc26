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
minus; its authors' code, which uses automatic differentiation, has it, as here. No difference from the authors' code is known:
as there, Wp and Wn are not kept positive and have no weight decay, and first and last layer stay float.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitcycle.quantizer.autograd import with_gradient
from bitcycle.quantizer.base import FunctionQuantizer, TensorQuantizer
from bitcycle.quantizer.layout import computable
from bitcycle.quantizer.uniform import UniformActivationOptions

MEAN_SHARE = 2 / 3
"""Threshold of zero weights in units of the mean |w| (HitNet; TWN: 0.7)."""
MAXIMUM_SHARE = 0.05
"""Threshold of zero weights in units of the largest |w| (TTQ)."""


def ternarize(weight: Tensor, bits: Tensor) -> Tensor:
    """a sign(w) where |w| > 2/3 mean |w|, else 0; a is the mean magnitude above the threshold.
    Infinite elements and NaN stay; 0 bits returns the weight."""
    magnitudes = computable(weight).abs()
    above = magnitudes > MEAN_SHARE * magnitudes.mean()
    scale = torch.where(above, magnitudes, 0).sum() / above.sum().clamp_min(1)
    values = torch.where(above, weight.sign() * scale, 0).to(weight.dtype)
    return torch.where((bits > 0) & weight.isfinite(), values, weight)


@dataclass
class Ternary(UniformActivationOptions):
    """Options of symmetric ternary weights."""

    name: str = "ternary"

    def bits(self, role: str) -> range:
        return range(2, 3) if role == "weight" else super().bits(role)

    def weight(self, compile: bool) -> TensorQuantizer:
        return FunctionQuantizer(ternarize)


def ternary_signs(weight: Tensor) -> Tensor:
    """+1 above 0.05 max |w|, -1 below its negative, else 0. Any shape, kept."""
    w = computable(weight)
    limit = MAXIMUM_SHARE * w.abs().amax()
    return (w > limit).to(weight.dtype) - (w < -limit).to(weight.dtype)


def trained_ternary(weight: Tensor, positive: Tensor, negative: Tensor, bits: Tensor) -> Tensor:
    """Wp, 0 or -Wn for each weight; infinite elements and NaN stay. 0 bits returns the weight."""
    signs = ternary_signs(weight)
    values = torch.where(signs > 0, positive, torch.where(signs < 0, -negative, 0)).to(weight.dtype)
    return torch.where((bits > 0) & weight.isfinite(), values, weight)


class TrainedTernaryWeight(TensorQuantizer):
    """Asymmetric ternary weights with trainable values, which do not change in the float phase (0 bits)."""

    def __init__(self) -> None:
        super().__init__()
        self.positive = nn.Parameter(torch.ones(()))
        self.negative = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        return with_gradient(trained_ternary, self._gradients, x, self.positive, self.negative, bits)

    def _gradients(
        self, gradient: Tensor, x: Tensor, positive: Tensor, negative: Tensor, bits: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        signs = torch.where(bits > 0, ternary_signs(x), 0)
        of_x = gradient * torch.where(signs > 0, positive, torch.where(signs < 0, negative, 1))
        return of_x, torch.where(signs > 0, gradient, 0).sum(), -torch.where(signs < 0, gradient, 0).sum()


@dataclass
class Ttq(UniformActivationOptions):
    """Options of trained ternary quantization."""

    # as in the authors' code; a classifier with Wp = Wn = 1, without batch norm, hardly trains
    float_roles = ("first", "last")

    name: str = "ttq"

    def bits(self, role: str) -> range:
        return range(2, 3) if role == "weight" else super().bits(role)

    def weight(self, compile: bool) -> TrainedTernaryWeight:
        return TrainedTernaryWeight()
