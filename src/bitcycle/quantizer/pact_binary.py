"""pact_binary: 1-bit PACT activations and 1-bit sign weights; float first, last and projection layers.

    activation  n = 2^b - 1,   y = rint(n clip(x, 0, alpha) / alpha) alpha / n          b = 1: 0 up to alpha/2, alpha above
                dy/dx     = 1 on [0, alpha], else 0
                dy/dalpha = 1 on [alpha, inf), else 0                                   published
                          = y / alpha, which for b = 1 is 1 above alpha/2, else 0       jump: the derivative of what is printed
                alpha is trainable, one for each layer, 3 at first, with the penalty 2e-4 alpha^2
    weight      w_q = s sign(w),   sign(w) = -1 if w <= 0, else +1;     dL/dw = dL/dw_q on [-1, 1], else 0;     s = 1
    gradient    float32

>>> import torch
>>> from bitcycle.quantizer import quantize
>>> quantize(torch.tensor([0.5, 1.4, 1.6]), 1, quantizer="pact_binary", role="activation").tolist()
[0.0, 0.0, 3.0]

Source: partial pre-training, section 4.3; Choi et al. 2018 (PACT). No code was released. The paper replaces each ReLU by PACT;
here PACT follows the ReLU at the layer's input, which is the same function but leaves skip connections real-valued. With the
published derivative, units between alpha/2 and alpha output alpha but do not contribute to its gradient. The gradient of a
weight treats the scale of the signs (mentioned once in section 7 of the paper, as "static weight scaling") as constant and
passes unscaled.
"""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor, nn

from bitcycle.quantizer.autograd import gradient_inside, with_gradient
from bitcycle.quantizer.base import QuantizerOptions, TensorQuantizer
from bitcycle.quantizer.compile_utils import kernel
from bitcycle.quantizer.layout import flat, unflat
from bitcycle.settings import SettingError, setting

MINIMUM_ALPHA = 1e-3
"""Lower bound of alpha, so that training continues if it reaches zero; not in the papers."""
SCALES = ("none", "mean_abs", "init_std")


def pact_code(x: Tensor, alpha: Tensor, bits: Tensor) -> Tensor:
    """The level rint(n clip(x, 0, alpha) / alpha) of each element, as a float."""
    levels = ((1 << bits) - 1).to(x.dtype)
    return (torch.minimum(x.clamp_min(0), alpha) * levels / alpha).round()


def pact(x: Tensor, alpha: Tensor, bits: Tensor) -> Tensor:
    """x on the 2^bits values between 0 and alpha; 0 bits returns x. Any shape, kept; alpha and bits are scalars."""
    levels = ((1 << bits) - 1).clamp_min(1).to(x.dtype)
    return torch.where(bits > 0, pact_code(x, alpha, bits) * alpha / levels, x)


def pact_gradients(gradient: Tensor, x: Tensor, alpha: Tensor, bits: Tensor, published: bool) -> tuple[Tensor, Tensor]:
    """dL/dx, and the contribution of each element to dL/dalpha, from dL/dy. At 0 bits dL/dy and 0."""
    of_x = gradient_inside(gradient, x, 0, alpha, bits)
    levels = ((1 << bits) - 1).clamp_min(1).to(x.dtype)
    slope = (x >= alpha).to(x.dtype) if published else pact_code(x, alpha, bits) / levels
    return of_x, torch.where(bits > 0, gradient * slope, 0)


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
        return with_gradient(self._quantize, self._gradients, x, self.alpha, bits)

    def _quantize(self, x: Tensor, alpha: Tensor, bits: Tensor) -> Tensor:
        return self.on_elements(pact, x, alpha.detach().clamp_min(MINIMUM_ALPHA), bits)

    def _gradients(self, gradient: Tensor, x: Tensor, alpha: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        alpha = alpha.detach().clamp_min(MINIMUM_ALPHA)
        function = kernel(pact_gradients, self.compile_kernel)
        of_x, of_alpha = function(flat(gradient), flat(x), alpha, bits, self.published)
        # The sum is outside the kernel, as compiled sums differ in the order of summation.
        return unflat(of_x, like=x), of_alpha.sum()

    def penalty(self, bits: Tensor) -> Tensor | None:
        if self.l2 == 0:
            return None
        return torch.where(bits > 0, self.l2 * self.alpha.square(), 0)


def binarize(weight: Tensor, scale: Tensor, bits: Tensor) -> Tensor:
    """scale * sign(weight); the sign of 0 is -1, infinite elements and NaN stay. 0 bits returns the weight."""
    return torch.where((bits > 0) & weight.isfinite(), torch.where(weight > 0, scale, -scale), weight)


class BinaryWeight(TensorQuantizer):
    """Signs of the latent weights, times a scale.

    Args:
        scale: none (1), mean_abs (the mean |w| of each output channel at each step, as in XNOR-Net), or init_std (the standard
            deviation that the layer's weights had when the model was converted).
        clip: latent weights are kept within +-clip before each training step; None leaves them free.
    """

    initial_std: Tensor

    def __init__(self, scale: str = "none", clip: float | None = None) -> None:
        super().__init__()
        self.scale, self.clip = scale, clip
        self.works_each_step = clip is not None
        if scale == "init_std":
            self.register_buffer("initial_std", torch.ones(()))

    def initialise(self, x: Tensor) -> None:
        if self.scale == "init_std":
            self.initial_std = x.detach().std(correction=0)

    def begin_step(self, x: Tensor, new_epoch: bool) -> None:
        assert self.clip is not None, "only needed with a clip"
        x.clamp_(-self.clip, self.clip)

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        return with_gradient(binarize, self._gradient, x, self._scale_of(x), bits)

    def _gradient(self, gradient: Tensor, x: Tensor, scale: Tensor, bits: Tensor) -> Tensor:
        return gradient_inside(gradient, x, -1, 1, bits)

    def _scale_of(self, x: Tensor) -> Tensor:
        if self.scale == "mean_abs":
            return x.detach().abs().mean(dim=tuple(range(1, x.dim())), keepdim=True)
        return self.initial_std if self.scale == "init_std" else x.new_ones(())


@dataclass
class PactBinary(QuantizerOptions):
    """Options of 1-bit PACT activations with 1-bit weights."""

    float_roles = ("first", "last", "shortcut")  # partial pre-training, section 4.3

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

    def weight(self, compile: bool) -> BinaryWeight:
        return BinaryWeight(self.scale, self.clip)

    def activation(self, compile: bool, signed: bool = False) -> PactActivation:
        if signed:
            problem = "PACT would clip the negative inputs of a layer that does not follow a ReLU"
            remedy = "leave such layers float, including the first, as float_layers=[first, last, shortcut]"
            raise SettingError("float_layers", self.float_layers, problem, remedy)
        return PactActivation(self.alpha, self.l2, self.alpha_grad == "published", compile)
