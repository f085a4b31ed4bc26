"""pact_binary: 1-bit PACT activations and 1-bit sign weights; float first, last and projection layers.

    activation  n = 2^b - 1,   y = rint(n clip(x, 0, alpha) / alpha) alpha / n          b = 1: 0 up to alpha/2, alpha above
                dy/dx     = 1 on [0, alpha], else 0
                dy/dalpha = 1 on [alpha, inf), else 0
                alpha is trainable, one for each layer, 3 at first, with the penalty 2e-4 alpha^2
    weight      w_q = sign(w),   sign(w) = -1 if w <= 0, else +1;     dL/dw = dL/dw_q on [-1, 1], else 0
    gradient    float32

>>> import torch
>>> from bitcycle.quantizer import quantize
>>> quantize(torch.tensor([0.5, 1.4, 1.6]), 1, quantizer="pact_binary", role="activation").tolist()
[0.0, 0.0, 3.0]

Source: partial pre-training, section 4.3; Choi et al. 2018 (PACT). No code was released. The paper replaces each ReLU by PACT;
here PACT follows the ReLU at the layer's input, which is the same function but leaves skip connections real-valued. With the
published derivative, units between alpha/2 and alpha output alpha but do not contribute to its gradient. The scale of the signs
that section 7 of the paper mentions once ("static weight scaling") is left out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitcycle.quantizer.autograd import gradient_inside, with_gradient
from bitcycle.quantizer.base import FunctionQuantizer, QuantizerOptions, TensorQuantizer
from bitcycle.quantizer.compile_utils import kernel
from bitcycle.quantizer.layout import flat, unflat
from bitcycle.settings import SettingError

ALPHA, PENALTY = 3.0, 2e-4
"""Initial clipping value of each layer, and factor of the penalty, the sum of all alpha^2."""
MINIMUM_ALPHA = 1e-3
"""Lower bound of alpha, so that training continues if it reaches zero; not in the papers."""


def pact_code(x: Tensor, alpha: Tensor, bits: Tensor) -> Tensor:
    """The level rint(n clip(x, 0, alpha) / alpha) of each element, as a float."""
    levels = ((1 << bits) - 1).to(x.dtype)
    return (torch.minimum(x.clamp_min(0), alpha) * levels / alpha).round()


def pact(x: Tensor, alpha: Tensor, bits: Tensor) -> Tensor:
    """x on the 2^bits values between 0 and alpha; 0 bits returns x. Any shape, kept; alpha and bits are scalars."""
    levels = ((1 << bits) - 1).clamp_min(1).to(x.dtype)
    return torch.where(bits > 0, pact_code(x, alpha, bits) * alpha / levels, x)


def pact_gradients(gradient: Tensor, x: Tensor, alpha: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dx, and the contribution of each element to dL/dalpha, from dL/dy. At 0 bits dL/dy and 0."""
    of_x = gradient_inside(gradient, x, 0, alpha, bits)
    return of_x, torch.where((bits > 0) & (x >= alpha), gradient, 0)


def _unchanged(x: Tensor, alpha: Tensor) -> Tensor:
    return x.detach()


def _gradients_of_unchanged(gradient: Tensor, x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    return gradient, torch.zeros_like(alpha)


class PactActivation(TensorQuantizer):
    """PACT at a layer's input, with its trainable alpha (a scalar) and its penalty.

    At a layer's input it follows the model's ReLU: PACT after a ReLU equals PACT, forward and backward. In the float phase
    (0 bits) it is therefore the identity, the ReLU remains, and neither gradient nor penalty changes alpha.
    """

    samples_are_independent = True
    non_negative = True

    def __init__(self, compile: bool = False) -> None:
        super().__init__(compile)
        self.alpha = nn.Parameter(torch.tensor(ALPHA))

    def accept_signed(self, x: Tensor) -> None:
        problem = "PACT clips negative inputs, and the input of this layer has some"
        remedy = "put a ReLU before it, list its name in float_layers, or use another quantizer"
        raise SettingError("quantizer", "pact", problem, remedy)

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        return with_gradient(self._quantize, self._gradients, x, self.alpha, bits)

    def at_float(self, x: Tensor) -> Tensor:
        # alpha stays part of the graph, as data-parallel training and optimizers expect, with a gradient of zero
        return with_gradient(_unchanged, _gradients_of_unchanged, x, self.alpha)

    def _quantize(self, x: Tensor, alpha: Tensor, bits: Tensor) -> Tensor:
        return self.on_elements(pact, x, alpha.detach().clamp_min(MINIMUM_ALPHA), bits)

    def _gradients(self, gradient: Tensor, x: Tensor, alpha: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        alpha = alpha.detach().clamp_min(MINIMUM_ALPHA)
        function = kernel(pact_gradients, self.compile_kernel)
        of_x, of_alpha = function(flat(gradient), flat(x), alpha, bits)
        # The sum is outside the kernel, as compiled sums differ in the order of summation.
        return unflat(of_x, like=x), of_alpha.sum()

    def penalty(self, bits: Tensor) -> Tensor | None:
        return torch.where(bits > 0, PENALTY * self.alpha.square(), 0)


def binarize(weight: Tensor, bits: Tensor) -> Tensor:
    """sign(weight); the sign of 0 is -1, infinite elements and NaN stay. 0 bits returns the weight."""
    return torch.where((bits > 0) & weight.isfinite(), torch.where(weight > 0, 1.0, -1.0).to(weight.dtype), weight)


def binary_gradient(gradient: Tensor, weight: Tensor, bits: Tensor) -> Tensor:
    """The gradient where |weight| <= 1, else 0; at 0 bits the gradient. Any shape, kept."""
    return gradient_inside(gradient, weight, -1, 1, bits)


@dataclass
class PactBinary(QuantizerOptions):
    """Options of 1-bit PACT activations with 1-bit weights."""

    float_roles = ("first", "last", "shortcut")  # partial pre-training, section 4.3

    name: str = "pact_binary"

    def bits(self, role: str) -> range:
        return range(0) if role == "gradient" else range(1, 2)

    def weight(self, compile: bool) -> TensorQuantizer:
        return FunctionQuantizer(binarize, binary_gradient)

    def activation(self, compile: bool, signed: bool = False) -> PactActivation:
        if signed:
            problem = "PACT would clip the negative inputs of a layer that does not follow a ReLU"
            remedy = "leave such layers float, including the first, as float_layers=[first, last, shortcut]"
            raise SettingError("float_layers", self.float_layers, problem, remedy)
        return PactActivation(compile)
