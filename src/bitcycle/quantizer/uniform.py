"""uniform_l2: symmetric levels D z with the step D that minimises the squared error.

    L = 2^(b-1) - 1;   weight      D sign(w) min(floor(|w| / D + 1/2), L), straight-through; halves away from zero
                       activation  the same for signed inputs; D min(floor(x / D + 1/2), 2^b - 1) after a ReLU;
                                   straight-through inside the range, no gradient outside
                       gradient    float32
    activation_levels = unit:      2^b levels from -1 to 1 for signed inputs (tanh), from 0 to 1 otherwise (sigmoid)

>>> import torch
>>> from bitcycle.quantizer import quantize
>>> quantize(torch.tensor([[-0.9, 0.2, 1.1]]), 2, quantizer="uniform_l2", role="weight").tolist()
[[-1.0, 0.0, 1.0]]

Source: HLHLp, section 3.1: the step minimises the squared error. No code was released. The paper does not say when the step is
recomputed, nor how activations are quantized (`activation_levels`). Here the steps are computed in the first training step after
a change of bits, from the layer's master weights and from the batch at its input, and stay constant until the next change.
Evaluation at other bits than training computes separate steps, from the current weights and from its first batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bitcycle import distributed
from bitcycle.quantizer import affine
from bitcycle.quantizer.autograd import gradient_inside, with_gradient
from bitcycle.quantizer.base import QuantizerOptions, TensorQuantizer
from bitcycle.quantizer.compile_utils import kernel
from bitcycle.quantizer.l2_step import optimal_step, uniform_codes
from bitcycle.quantizer.layout import computable, flat, rows, unflat
from bitcycle.settings import setting

NEVER = -1
"""Value of the bits before any step has been computed."""
CALIBRATION_ELEMENTS = 16381
"""Number of evenly spaced elements of a batch from which the step of an activation is computed; a prime, so that the samples
do not concentrate on a few channels."""


def symmetric_top(bits: Tensor) -> Tensor:
    """L = 2^(b-1) - 1, the highest signed code of b bits. Any shape, kept."""
    return (1 << (bits - 1).clamp_min(0)) - 1


def unsigned_top(bits: Tensor) -> Tensor:
    """2^b - 1, the highest unsigned code of b bits. Any shape, kept."""
    return (1 << bits) - 1


def quantize_symmetric(x: Tensor, step: Tensor, bits: Tensor) -> Tensor:
    """D sign(x) min(floor(|x| / D + 1/2), L); 0 bits returns x. Any shape, kept; the step broadcasts."""
    return torch.where(bits > 0, x.sign() * uniform_codes(x.abs(), step, symmetric_top(bits)) * step, x)


def quantize_unsigned(x: Tensor, step: Tensor, bits: Tensor) -> Tensor:
    """D min(floor(x / D + 1/2), 2^b - 1), 0 for negative x; 0 bits returns x. Any shape, kept; the step broadcasts."""
    return torch.where(bits > 0, uniform_codes(x.clamp_min(0), step, unsigned_top(bits)) * step, x)


class _StepKeeper(TensorQuantizer):
    """Keeps the step of the training precision and, separately, that of an evaluation at another precision."""

    step: Tensor
    other_step: Tensor
    step_bits: Tensor

    def __init__(self, compile: bool) -> None:
        super().__init__(compile)
        self.register_buffer("step", torch.ones(1, 1))
        self.register_buffer("other_step", torch.ones(1, 1), persistent=False)
        self.register_buffer("step_bits", torch.tensor(NEVER))
        self.is_prepared = False

    @property
    def lacks_values(self) -> bool:
        return not self.is_prepared

    def prepare(self, x: Tensor, bits: int) -> None:
        self.is_prepared = True
        if bits == int(self.step_bits):  # a resumed run keeps its step
            return
        if bits:
            (self.step if self.training else self.other_step).copy_(self._optimal(x, bits))
        if self.training:
            self.step_bits.fill_(bits)

    def restart(self) -> None:
        self.step_bits.fill_(NEVER)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self.is_prepared |= int(state_dict.get(f"{prefix}step_bits", NEVER)) != NEVER
        if f"{prefix}step_bits" not in state_dict:  # the weights of a float network, to which the step does not belong
            self.restart()

    def _optimal(self, x: Tensor, bits: int) -> Tensor:
        raise NotImplementedError

    def _step(self, bits: Tensor) -> Tensor:
        return torch.where(bits == self.step_bits, self.step, self.other_step)


class UniformWeight(_StepKeeper):
    """Weights on symmetric levels with the L2-optimal step of the layer, which is computed when the bits change."""

    def rounded(self, x: Tensor, bits: Tensor) -> Tensor:
        function = kernel(quantize_symmetric, self.compile_kernel)
        return unflat(function(rows(x), self._step(bits), bits), like=x)

    def _optimal(self, x: Tensor, bits: int) -> Tensor:
        return optimal_step(rows(x).reshape(1, -1), (1 << (bits - 1)) - 1)


class UniformActivation(_StepKeeper):
    """Inputs on symmetric levels, or unsigned levels after a ReLU, with the L2-optimal step of one batch."""

    steps_are_independent = True

    def __init__(self, signed: bool = False, compile: bool = False) -> None:
        super().__init__(compile)
        self.signed, self.non_negative = signed, not signed
        if not signed:
            self.expect_signed()

    def accept_signed(self, x: Tensor) -> None:
        is_known = bool(self.signed_inputs)  # copied from another model, as its step
        super().accept_signed(x)
        self.signed = True
        if not is_known:
            self.restart()

    def forget_signed(self) -> None:
        super().forget_signed()
        self.signed = False

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        return with_gradient(self._quantize, self._gradient, x, self._step(bits), bits)

    def at_float(self, x: Tensor) -> Tensor:
        return x

    def _quantize(self, x: Tensor, step: Tensor, bits: Tensor) -> Tensor:
        return self.on_elements(quantize_symmetric if self.signed else quantize_unsigned, x, step.view(1), bits)

    def _gradient(self, gradient: Tensor, x: Tensor, step: Tensor, bits: Tensor) -> Tensor:
        high = step.view(1) * (symmetric_top(bits) if self.signed else unsigned_top(bits))
        low = -high if self.signed else torch.zeros_like(high)
        return self.on_elements(gradient_inside, gradient, flat(x), low, high, bits)

    def _optimal(self, x: Tensor, bits: int) -> Tensor:
        elements = rows(x)
        available = distributed.elements_of_batch(elements)
        chosen = min(available, CALIBRATION_ELEMENTS)
        elements = distributed.pick(elements, torch.arange(chosen, device=x.device) * available // chosen).view(1, -1)
        if self.signed:
            return optimal_step(elements, (1 << (bits - 1)) - 1)
        return optimal_step(elements.clamp_min(0), (1 << bits) - 1)


class UnitActivation(TensorQuantizer):
    """Inputs on 2^b levels from -1 to 1 if signed (tanh), else from 0 to 1 (sigmoid)."""

    samples_are_independent = True
    steps_are_independent = True

    def __init__(self, signed: bool = False, compile: bool = False) -> None:
        super().__init__(compile)
        self.low = -1.0 if signed else 0.0
        self.non_negative, self.fixed_range = not signed, (self.low, 1.0)
        if not signed:
            self.expect_signed()

    def accept_signed(self, x: Tensor) -> None:
        super().accept_signed(x)
        self.low, self.fixed_range = -1.0, (-1.0, 1.0)

    def forget_signed(self) -> None:
        super().forget_signed()
        self.low, self.fixed_range = 0.0, (0.0, 1.0)

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        low = computable(x.new_full((1,), self.low))
        return with_gradient(self._quantize, self._gradient, x, low, torch.ones_like(low), bits)

    def at_float(self, x: Tensor) -> Tensor:
        return x

    def _quantize(self, x: Tensor, low: Tensor, high: Tensor, bits: Tensor) -> Tensor:
        return self.on_elements(affine.fake_quantize, x, low, high - low, bits)

    def _gradient(self, gradient: Tensor, x: Tensor, low: Tensor, high: Tensor, bits: Tensor) -> Tensor:
        return self.on_elements(gradient_inside, gradient, flat(x), low, high, bits)


@dataclass
class UniformActivationOptions(QuantizerOptions):
    """Base of HLHLp's quantizers: uniform activations at the schedule's bits, float gradients, all layers quantized.

    Source: HLHLp, section 4.1 ("all layers in the models including the first and the last ones are quantized").
    """

    float_roles: ClassVar[Sequence[str] | None] = ()

    activation_levels: str = setting(
        "l2",
        "levels of quantized activations: l2, with the L2-optimal step of one batch, or unit, from -1 to 1 if signed"
        " (tanh), else from 0 to 1 (not specified by HLHLp 3.2)",
        choices=("l2", "unit"),
    )

    def bits(self, role: str) -> range:
        return range(2, 9) if role != "gradient" else range(0)

    def activation(self, compile: bool, signed: bool = False) -> TensorQuantizer:
        return (UniformActivation if self.activation_levels == "l2" else UnitActivation)(signed, compile)


@dataclass
class UniformL2(UniformActivationOptions):
    """Options of the uniform quantizer."""

    name: str = "uniform_l2"

    def weight(self, compile: bool) -> UniformWeight:
        return UniformWeight(compile)
