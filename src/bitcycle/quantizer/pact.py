"""PACT: activations between 0 and a trainable clipping value alpha, one per layer.

    n = 2^b - 1,   y = rint(n clip(x, 0, alpha) / alpha) alpha / n              b = 1: 0 up to alpha/2, alpha above
    dy/dx     = 1 on [0, alpha], else 0
    dy/dalpha = 1 on [alpha, inf), else 0                                         published
              = y / alpha, which for b = 1 is 1 above alpha/2, else 0             jump: the derivative of what is printed

Source: partial pre-training, section 4.3 (b = 1); Choi et al. 2018 (PACT). With the published derivative, units between alpha/2
and alpha output alpha but do not contribute to its gradient.
"""

from typing import Any

import torch
from torch import Tensor, nn

from bitcycle.quantizer.base import TensorQuantizer
from bitcycle.quantizer.compile_utils import kernel
from bitcycle.quantizer.layout import flat, unflat
from bitcycle.settings import SettingError

MINIMUM_ALPHA = 1e-3
"""Lower bound of alpha, so that training continues if it reaches zero; not in the papers."""


def pact_code(x: Tensor, alpha: Tensor, bits: Tensor) -> Tensor:
    """The level rint(n clip(x, 0, alpha) / alpha) of each element, as a float."""
    levels = ((1 << bits) - 1).to(x.dtype)
    return (torch.minimum(x.clamp_min(0), alpha) * levels / alpha).round()


def pact(x: Tensor, alpha: Tensor, bits: Tensor) -> Tensor:
    """x on the 2^bits values between 0 and alpha; 0 bits returns x.

    >>> pact(torch.tensor([-1.0, 1.4, 1.6]), torch.tensor(3.0), torch.tensor(1)).tolist()
    [0.0, 0.0, 3.0]
    """
    levels = ((1 << bits) - 1).clamp_min(1).to(x.dtype)
    return torch.where(bits > 0, pact_code(x, alpha, bits) * alpha / levels, x)


def pact_gradients(gradient: Tensor, x: Tensor, alpha: Tensor, bits: Tensor, published: bool) -> tuple[Tensor, Tensor]:
    """dL/dx, and the contribution of each element to dL/dalpha, from dL/dy. At 0 bits dL/dy and 0."""
    quantized = bits > 0
    of_x = torch.where(((x >= 0) & (x <= alpha)) | ~quantized, gradient, 0)
    levels = ((1 << bits) - 1).clamp_min(1).to(x.dtype)
    slope = (x >= alpha).to(x.dtype) if published else pact_code(x, alpha, bits) / levels
    return of_x, torch.where(quantized, gradient * slope, 0)


class _Pact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, bits: Tensor, published: bool, compile: bool) -> Tensor:
        ctx.save_for_backward(x, alpha, bits)
        ctx.published, ctx.compile_kernel = published, compile
        return unflat(kernel(pact, compile)(flat(x), _guarded(alpha), bits), like=x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, alpha, bits = ctx.saved_tensors
        function = kernel(pact_gradients, ctx.compile_kernel)
        of_x, of_alpha = function(flat(gradients[0]), flat(x), _guarded(alpha), bits, ctx.published)
        # The sum is outside the kernel, as compiled sums differ in the order of summation.
        return unflat(of_x, like=x), of_alpha.sum(), None, None, None


def _guarded(alpha: Tensor) -> Tensor:
    return alpha.detach().clamp_min(MINIMUM_ALPHA)


class PactActivation(TensorQuantizer):
    """PACT at a layer's input, with its trainable alpha (a scalar) and its penalty l2 * alpha^2.

    At a layer's input it follows the model's ReLU: PACT after a ReLU equals PACT, forward and backward. In the float phase
    (0 bits) it is therefore the identity, the ReLU remains, and neither gradient nor penalty changes alpha.
    """

    samples_are_independent = True
    non_negative = True

    def __init__(self, alpha: float = 3.0, l2: float = 2e-4, published: bool = True, compile: bool = False) -> None:
        super().__init__(compile)
        self.alpha = nn.Parameter(torch.tensor(float(alpha)))
        self.l2, self.published = l2, published

    def accept_signed(self, x: Tensor) -> None:
        problem = "PACT clips negative inputs, and the input of this layer has some"
        remedy = "put a ReLU before it, list its name in float_layers, or use another quantizer"
        raise SettingError("quantizer", "pact", problem, remedy)

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        return _Pact.apply(x, self.alpha, bits, self.published, self.compile_kernel)

    def penalty(self, bits: Tensor) -> Tensor | None:
        if self.l2 == 0:
            return None
        return torch.where(bits > 0, self.l2 * self.alpha.square(), 0)
