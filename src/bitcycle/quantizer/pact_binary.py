"""pact_binary: 1-bit PACT activations and 1-bit sign weights; float first, last and projection layers.

    activation  0 up to alpha/2, alpha above; alpha trainable, 3 at first, with the penalty 2e-4 alpha^2
    weight      -1 or +1, straight through where |w| <= 1
    gradient    float32

>>> import torch
>>> from bitcycle.quantizer import quantize
>>> quantize(torch.tensor([0.5, 1.4, 1.6]), 1, quantizer="pact_binary", role="activation").tolist()
[0.0, 0.0, 3.0]

Source: partial pre-training, section 4.3; no code was released. The paper replaces each ReLU by PACT; here PACT follows the ReLU
at the layer's input, which is the same function but leaves skip connections real-valued.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from bitcycle.quantizer.base import QuantizerOptions
from bitcycle.quantizer.binary import SCALES, BinaryWeight
from bitcycle.quantizer.pact import MINIMUM_ALPHA, PactActivation
from bitcycle.settings import SettingError, setting

FLOAT_LAYERS = ("first", "last", "shortcut")
"""Partial pre-training, section 4.3: first, last and projection layers, and batch norm, are not binarized."""


@dataclass
class PactBinary(QuantizerOptions):
    """Options of 1-bit PACT activations with 1-bit weights."""

    name: str = "pact_binary"
    alpha: float = setting(3.0, "initial clipping value of each layer (partial 4.3)", minimum=MINIMUM_ALPHA)
    alpha_grad: str = setting(
        "published",
        "derivative by alpha: 1 above alpha (published, partial 4.3), or 1 above the jump at alpha/2 (jump)",
        choices=("published", "jump"),
    )
    l2: float = setting(
        2e-4, "penalty: this times the sum of all alpha^2 is added to the loss (partial 4.3)", minimum=0
    )
    scale: str = setting(
        "none",
        "scale of the signs: none (partial 4.3), mean_abs of each output channel (XNOR-Net), init_std of the layer (static; 7)",
        choices=SCALES,
    )
    clip: Optional[float] = setting(
        None, "clip latent weights to +-clip; null: no clipping (none in partial 4.3); larq has 1.25", minimum=1e-3
    )

    def bits(self, role: str) -> range:
        return range(0) if role == "gradient" else range(1, 2)

    def float_rule(self, model_rule: Sequence[str]) -> list[str]:
        return super().float_rule(FLOAT_LAYERS)

    def weight(self, compile: bool) -> BinaryWeight:
        return BinaryWeight(self.scale, self.clip)

    def activation(self, compile: bool, signed: bool = False) -> PactActivation:
        if signed:
            problem = "PACT would clip the negative inputs of a layer that does not follow a ReLU"
            remedy = "leave such layers float, including the first, as float_layers=[first, last, shortcut]"
            raise SettingError("float_layers", self.float_layers, problem, remedy)
        return PactActivation(self.alpha, self.l2, self.alpha_grad == "published", compile)
