"""What every quantizer provides: one module for each role, told the bits at every call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Optional

import torch
from torch import Tensor, nn

from bitcycle.quantizer.autograd import backward_only
from bitcycle.quantizer.codes import Codes, GradientCodes, WeightCodes
from bitcycle.schedule import FLOAT, Precision
from bitcycle.settings import MISSING, SettingError, Settings, setting

ROLES = ("weight", "activation", "gradient")
INITIAL_BITS = 8
"""Bits of a converted model before anybody sets others, or the most that its quantizer offers below."""


class TensorQuantizer(nn.Module):
    """Maps a tensor onto few levels. `bits` is an int64 tensor; 0 means float32 and leaves the tensor as it is.

    Parameters of a quantizer are trained with those of the model, without weight decay.
    """

    is_quantizer = True
    """Its arithmetic is no product of the network: costs leave it out."""
    works_each_step = False
    """Whether `begin_step` does anything."""
    samples_are_independent = False
    """Whether in evaluation mode the result of a sample does not depend on the others of its batch."""
    has_blocks = False
    """Whether it has `along`, so that each of a layer's products gets a copy with blocks along the dimension it sums over."""
    has_codes = False
    """Whether it has `encode` (activations) or `encode_weight` and `decode_weight`; its gradient passes straight through."""
    steps_are_independent = False
    """Whether the result of a time step of a sequence depends on nothing but this step, and leaves nothing behind."""
    non_negative = False
    """Whether negative inputs are cut off. A layer that meets some calls `accept_signed`."""
    fixed_range: tuple[float, float] | None = None
    """Limits that inputs are cut at, where neither data nor training decides them."""

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        """x quantized, with its straight-through gradient."""
        raise NotImplementedError

    def along(self, x: Tensor, bits: Tensor, dim: int, groups: int = 1) -> Tensor:
        """x quantized in blocks along `dim`, which none crosses from one of `groups` equal parts to the next. No gradient."""
        raise NotImplementedError

    def encode(self, x: Tensor, bits: Tensor) -> Codes:
        """What `forward` does to an activation x [N, ...] at 1 to 8 bits, as uint8 codes. No gradient."""
        raise NotImplementedError

    def encode_weight(self, x: Tensor, bits: Tensor) -> WeightCodes:
        """The codes of a weight at 1 to 8 bits."""
        raise NotImplementedError

    def decode_weight(self, weight: WeightCodes, bits: Tensor) -> Tensor:
        """The quantized weight from its codes, as `forward` returns it."""
        raise NotImplementedError

    def quantize_sequence(self, x: Tensor, bits: Tensor) -> Tensor:
        """x [T, N, F] quantized as by T calls, one for each time step: each with its own range, observed in turn."""
        if self.steps_are_independent:
            return self(x, bits)
        return torch.stack([self(step, bits) for step in x.unbind(0)])

    def initialise(self, x: Tensor) -> None:
        """See the weight once, when the layer gets its quantizers: its shape, and its initial values."""

    def prepare(self, x: Tensor, bits: int) -> None:
        """Adapt to x, as it will be quantized to `bits` bits (0: float32) from now on.

        A layer calls this at the first forward pass, and at the first one at other bits or in another mode (training or
        evaluation). What evaluation computes here must leave training as it was, and a resumed run must keep what it had.
        """

    @property
    def adapts(self) -> bool:
        """Whether `prepare` has work to do in the present mode; a layer asks when bits or mode change."""
        return self.non_negative or type(self).prepare is not TensorQuantizer.prepare

    def accept_signed(self, x: Tensor) -> None:
        """Quantize signed inputs such as x from now on; the state dict says so.

        Raises:
            SettingError (a ValueError): if the quantizer has no form for them.
        """
        self.non_negative = False
        self.register_buffer("signed_inputs", torch.ones((), dtype=torch.bool, device=x.device))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """A state dict of the float network has none of a quantizer's keys, which then keeps what it has."""
        if f"{prefix}signed_inputs" in state_dict and "signed_inputs" not in self._buffers:
            self.accept_signed(state_dict[f"{prefix}signed_inputs"])
        own = {**self._parameters, **self._buffers}
        if any(f"{prefix}{name}" in state_dict for name in own if name not in self._non_persistent_buffers_set):
            super()._load_from_state_dict(state_dict, prefix, *arguments)

    def restart(self) -> None:
        """Forget for which bits `prepare` was called: what follows is a new phase, even at the same bits."""

    def begin_step(self, x: Tensor, new_epoch: bool) -> None:
        """Work on the weight x itself, or on step sizes, before a training step; called if `works_each_step`."""

    def penalty(self, bits: Tensor) -> Tensor | None:
        """A term that training adds to the loss, or None."""
        return None


class GradientQuantizer(nn.Module):
    """Identity in the forward direction; quantizes the gradient that comes back."""

    is_quantizer = True
    """Its arithmetic is no product of the network: costs leave it out."""
    has_blocks = False
    """Whether it has `along`, as its weights and activations have."""
    has_codes = False
    """Whether it has `encode`."""

    def forward(self, x: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        """x, whose gradient will be quantized with the noise of (step_key, layer_key)."""
        return backward_only(self.quantize, x, bits, step_key, layer_key)

    def quantize(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        """The gradient quantized with the noise of (step_key, layer_key); dimension 0 counts samples."""
        raise NotImplementedError

    def loses(self, gradient: Tensor, bits: int) -> bool:
        """Whether the gradient is too small for the levels of so many bits."""
        return False

    def along(self, gradient: Tensor, bits: Tensor, dim: int, key: Tensor, groups: int = 1) -> Tensor:
        """The gradient quantized in blocks along `dim` (see `TensorQuantizer.along`), with the noise of `key`."""
        raise NotImplementedError

    def encode(
        self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor
    ) -> tuple[Tensor, GradientCodes]:
        """What `quantize` returns, and its codes at 1 to 8 bits."""
        raise NotImplementedError

    def quantize_sequence(self, x: Tensor, bits: Tensor, step_key: Tensor, layer_keys: Tensor) -> Tensor:
        """x [T, N, F], the gradient of each of whose time steps will be quantized on its own, with layer_keys [T]."""
        return backward_only(self.quantize_steps, x, bits, step_key, layer_keys)

    def quantize_steps(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_keys: Tensor) -> Tensor:
        """The gradient [T, N, F] of T time steps of a recurrent layer, each quantized on its own."""
        steps = zip(gradient.unbind(0), layer_keys.unbind(0))
        return torch.stack([self.quantize(step, bits, step_key, key) for step, key in steps])


class FloatGradient(GradientQuantizer):
    """Leaves gradients in float32: for quantizers that have none of their own."""

    def forward(self, x: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        return x

    def quantize(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        return gradient

    def quantize_sequence(self, x: Tensor, bits: Tensor, step_key: Tensor, layer_keys: Tensor) -> Tensor:
        return x

    def quantize_steps(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_keys: Tensor) -> Tensor:
        return gradient


@dataclass
class QuantizerOptions(Settings):
    """Options that every quantizer has, and the modules that a quantized layer is made of."""

    name: str = setting(MISSING, "the quantizer's name, as in quantizer=NAME")
    float_layers: Optional[list[str]] = setting(
        None,
        "layers that stay float: first, last, shortcut, depthwise, or patterns of module names; null means the papers' choice for"
        " this quantizer and network (README; dry_run=json lists the layers)",
    )
    depthwise_bits: Optional[list[int]] = setting(
        None,
        "fixed bits [forward, gradient] of depthwise convolutions; null means those of the schedule (CPT, Better Schedules);"
        " FracTrain has [8, 16]",
        minimum=1,
        maximum=32,
    )

    def validate(self) -> None:
        if self.depthwise_bits is not None and len(self.depthwise_bits) != 2:
            raise SettingError(
                "depthwise_bits", self.depthwise_bits, "needs two numbers", "write [forward, gradient], as [8, 16]"
            )

    def bits(self, role: str) -> Sequence[int]:
        """The bits to which tensors of `role` can be quantized; float32 (32) is possible everywhere."""
        return range(1, FLOAT)

    def check_bits(self, role: str, bits: int) -> None:
        """Refuse bits that this quantizer does not have.

        Raises:
            SettingError (a ValueError): naming the quantizer, the bits it has and what to do.
        """
        offered = self.bits(role)
        if bits in (0, FLOAT) or bits in offered:
            return
        if not offered:
            problem = f"has no quantizer of {role}s, but {bits}-bit {role}s are asked for"
            raise SettingError("name", self.name, problem, _float_remedy(role))
        words = bits_in_words(offered)
        problem = f"quantizes {role}s to {words} bit{'s' if offered[-1] > 1 else ''}, not to {bits}"
        remedy = f"use a schedule of {words} or 32 bits, as schedule=static schedule.q_max={offered[-1]}"
        raise SettingError("name", self.name, problem, f"{remedy}, or another quantizer")

    def check(self, precisions: Iterable[Precision]) -> None:
        """Refuse what this quantizer cannot do among the precisions of a run, and of depthwise convolutions.

        Gradients of float layers are float whatever their bits, hence not checked.

        Raises:
            SettingError (a ValueError): naming the quantizer, the bits it has and what to do.
        """
        if self.depthwise_bits is not None:
            forward, gradient = self.depthwise_bits
            precisions = [*precisions, Precision(forward, forward, gradient)]
        for precision in precisions:
            self.check_bits("weight", precision.weight)
            self.check_bits("activation", precision.activation)
            if min(precision.weight, precision.activation) < FLOAT:
                self.check_bits("gradient", precision.gradient)

    def check_ends(self, lowest: Precision, highest: Precision) -> None:
        """Refuse a schedule that goes from `lowest` to `highest` bits, beyond what `check` says of its single steps.

        Raises:
            SettingError (a ValueError): naming the quantizer, the bits it has and what to do.
        """

    def storage_bits(self, role: str) -> Mapping[int, Fraction]:
        """Scheduled bits -> bits that an element of `role` is stored in, with its share of a scale, where the two differ."""
        return {}

    def check_sharing(self) -> None:
        """Refuse what this quantizer cannot do where several processes share a batch.

        Raises:
            SettingError (a ValueError): naming the setting and what to do.
        """

    @property
    def initial_precision(self) -> Precision:
        """Precision of a converted model until somebody sets another."""
        highest = (max((bits for bits in self.bits(role) if bits <= INITIAL_BITS), default=FLOAT) for role in ROLES)
        return Precision(*highest)

    def float_rule(self, model_rule: Sequence[str]) -> list[str]:
        """Roles and patterns of the layers that stay float in a model whose own rule is `model_rule`."""
        return list(model_rule) if self.float_layers is None else list(self.float_layers)

    def weight(self, compile: bool) -> TensorQuantizer:
        """A new quantizer of a layer's weight."""
        raise NotImplementedError

    def activation(self, compile: bool, signed: bool = False) -> TensorQuantizer:
        """A new quantizer of a layer's input, which is `signed`, or the output of a ReLU (or a pooled one)."""
        raise NotImplementedError

    def row_activation(self, compile: bool) -> TensorQuantizer | None:
        """A new quantizer of activations, and of biases, with one range for each row (the last dimension); None: it has none."""
        return None

    def gradient(self, compile: bool) -> GradientQuantizer:
        """A new quantizer of the gradient at a layer's output."""
        return FloatGradient()

    def position_gradient(self, compile: bool) -> GradientQuantizer:
        """The same for a layer whose output is [N, positions ..., F]: a linear layer, a recurrent one, a matrix product."""
        return self.gradient(compile)

    def matmul_operand(self, compile: bool) -> TensorQuantizer:
        """A new quantizer of one operand of a product of two activations, whose sum runs over a dimension of each.

        Activations with sign, unless a quantizer has something of its own for them.
        """
        return self.activation(compile, signed=True)

    def bias(self, compile: bool) -> TensorQuantizer | None:
        """A new quantizer of a layer's bias; None leaves it in float32."""
        return None

    def configure_for(self, model: nn.Module) -> QuantizerOptions:
        """These options with what they leave to the network decided as `model` says."""
        return self

    def input_gradient(self, compile: bool) -> GradientQuantizer | None:
        """A new quantizer of the gradient that a layer hands to its input; None leaves it as it is."""
        return None

    def weight_gradient(self, compile: bool) -> GradientQuantizer | None:
        """A new quantizer of the gradient of a layer's weight; None leaves it as it is."""
        return None

    @property
    def needs_epochs(self) -> bool:
        """Whether something happens at the beginning of each epoch, so that its length must be known."""
        return False

    @property
    def fine_gradient_bits(self) -> int | None:
        """Bits of a finer copy of the output's gradient for the weight's gradient; None: one copy serves both products."""
        return None


def bits_in_words(bits: Sequence[int]) -> str:
    """The bits that a quantizer has: `2`, `2 to 8`, or `4, 6 or 8`."""
    if len(bits) < 2 or bits[-1] - bits[0] == len(bits) - 1:
        return " to ".join(dict.fromkeys((str(bits[0]), str(bits[-1]))))
    return f"{', '.join(map(str, bits[:-1]))} or {bits[-1]}"


def _float_remedy(role: str) -> str:
    if role == "gradient":
        return "leave gradients float: schedule.gradient=32 with schedule=static, schedule.gradient_min=32 with cyclic ones"
    return f"use a schedule with float {role}s (32 bits), or another quantizer"
