"""ternary: weights in {-a, 0, +a}, with a threshold at a fraction of their mean magnitude.

    th = f mean |w| of the layer, f = 2/3,   a = mean of |w| above th,   w_q = a sign(w) [|w| > th], straight-through

>>> from bitcycle.quantizer import quantize
>>> quantize(torch.tensor([[-1.0, 0.25, 2.0]]), 2, quantizer="ternary", role="weight").tolist()
[[-1.5, 0.0, 1.5]]

Source: HLHLp, section 4.2, which cites HitNet (Wang et al. 2018) for its ternary recurrent networks; no code was released.
Differs from HitNet in omitting its stochastic activations and slope factor: HLHLp has 4-level activations, here those of
uniform_l2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bitcycle.quantizer.base import TensorQuantizer
from bitcycle.quantizer.uniform import UniformActivationOptions
from bitcycle.settings import setting


def ternarize(weight: Tensor, factor: float, bits: Tensor) -> Tensor:
    """a sign(w) where |w| > factor * mean |w|, else 0; a is the mean magnitude above the threshold. 0 bits returns the weight."""
    magnitudes = weight.abs()
    above = magnitudes > factor * magnitudes.mean()
    scale = torch.where(above, magnitudes, 0).sum() / above.sum().clamp_min(1)
    return torch.where(bits > 0, torch.where(above, weight.sign() * scale, 0), weight)


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
