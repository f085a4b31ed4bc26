"""Base classes of quantizers: one module for each role of a tensor, which receives the bits at every call."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor, nn

from bitcycle import distributed
from bitcycle.precision import FLOAT, Precision
from bitcycle.quantizer.autograd import backward_only, straight_through, twice_differentiable, with_gradient
from bitcycle.quantizer.codes import Codes, GradientCodes, WeightCodes
from bitcycle.quantizer.compile_utils import kernel
from bitcycle.quantizer.layout import flat, unflat
from bitcycle.settings import MISSING, SettingError, Settings, setting

ROLES = ("weight", "activation", "gradient")
INITIAL_BITS = 8
"""Initial bits of a converted model, or the quantizer's highest bits below that."""


class _Quantizer(nn.Module):
    """A module that keeps its state if a loaded state dict has none for it, as that of a float network."""

    is_quantizer = True
    """Marks quantizers, whose arithmetic is excluded from costs."""
    has_blocks = False
    """Whether it implements `along`, so that each product gets a copy with blocks along the dimension it sums over."""
    has_codes = False
    """Whether it implements `encode` (weights: `encode_weight` and `decode_weight`) and its gradient is straight-through."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        own = {**self._parameters, **self._buffers}
        if any(f"{prefix}{name}" in state_dict for name in own if name not in self._non_persistent_buffers_set):
            super()._load_from_state_dict(state_dict, prefix, *arguments)


class TensorQuantizer(_Quantizer):
    """Quantizes a tensor. `bits` is an int64 tensor; 0 means float32 and returns the tensor unchanged.

    Parameters of a quantizer are trained with those of the model, without weight decay. `compile` fuses each function into one
    kernel.
    """

    samples_are_independent = False
    """Whether in evaluation mode the result for a sample is independent of the other samples."""
    steps_are_independent = False
    """Whether a sequence is quantized as one tensor, as if its time steps were samples."""
    has_fixed_steps = False
    """Whether the levels depend on the bits alone, so that small inputs are all zero."""
    non_negative = False
    """Whether negative inputs are clipped. A layer with negative inputs calls `accept_signed`."""
    fixed_range: tuple[float, float] | None = None
    """Fixed clipping limits of inputs; None if they depend on data or training."""
    signed_inputs: Tensor
    """1 if signed inputs have been accepted, else 0; of quantizers that `expect_signed`."""

    def __init__(self, compile: bool = False) -> None:
        super().__init__()
        self.compile_kernel = compile

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        """x quantized, with its gradient; by default that of the rounded x, straight through."""
        return straight_through(self.rounded, x, bits)

    def at_float(self, x: Tensor) -> Tensor | None:
        """The result of `forward` at 0 bits without its computations; None if they are needed, as by an observed range."""
        return None

    def rounded(self, x: Tensor, bits: Tensor) -> Tensor:
        """x quantized. No gradient."""
        raise NotImplementedError

    def on_elements(self, function: Callable[..., Tensor], x: Tensor, *arguments: Any) -> Tensor:
        """function(elements of x as a vector, *arguments) in the shape of x; one kernel if this quantizer is compiled."""
        return unflat(kernel(function, self.compile_kernel)(flat(x), *arguments), like=x)

    def along(self, x: Tensor, bits: Tensor, dim: int, groups: int = 1) -> Tensor:
        """x quantized in blocks along `dim` that do not cross the borders of `groups` equal parts. No gradient."""
        raise NotImplementedError

    def encode(self, x: Tensor, bits: Tensor) -> Codes:
        """The result of `forward` for an activation x [N, ...] at 1 to 8 bits, as uint8 codes. No gradient."""
        raise NotImplementedError

    def encode_weight(self, x: Tensor, bits: Tensor) -> WeightCodes:
        """The codes of a weight at 1 to 8 bits."""
        raise NotImplementedError

    def decode_weight(self, weight: WeightCodes, bits: Tensor) -> Tensor:
        """The quantized weight from its codes, as `forward` returns it."""
        raise NotImplementedError

    def quantize_sequence(self, x: Tensor, bits: Tensor) -> Tensor:
        """x [T, N, F] quantized as by T successive calls: each time step has its own range and updates the observer."""
        if self.steps_are_independent:
            return self(x, bits)
        return torch.stack([self(step, bits) for step in x.unbind(0)])

    def prepare(self, x: Tensor, bits: int) -> None:
        """Adapt to x, which will be quantized to `bits` bits (0: float32) from now on.

        A layer calls this at the first forward pass and after each change of bits or mode (training or evaluation). In evaluation
        it must not change the state used in training, and a resumed run must keep its state.
        """

    def learns_from(self, x: Tensor, bits: int) -> bool:
        """Whether x can set a range: a quantizer that adapts learns nothing from zeros, such as a first hidden state."""
        return not (bits and self.adapts and x.numel()) or bool(distributed.all_max(x.detach().abs().amax()) != 0)

    @property
    def adapts(self) -> bool:
        """Whether `prepare` is needed in the current mode; queried when bits or mode change."""
        return self.non_negative or type(self).prepare is not TensorQuantizer.prepare

    def expect_signed(self) -> None:
        """Prepare for `accept_signed` at construction: averages of a model pair its buffers with their own, whose number must not
        change, and take all of them for numbers."""
        self.register_buffer("signed_inputs", torch.zeros(()))

    def accept_signed(self, x: Tensor) -> None:
        """Quantize signed inputs such as x from now on; recorded in the state dict. Raises SettingError if the quantizer does
        not support signed inputs."""
        self.non_negative = False
        self.signed_inputs.fill_(1)

    @property
    def lacks_values(self) -> bool:
        """Whether it has seen none of the values that determine its range in the current mode; not a tensor, as torch.export
        cannot read one."""
        return False

    def forget_signed(self) -> None:
        """Undo `accept_signed`, which must have been called."""
        self.signed_inputs.zero_()
        self.non_negative = True

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        name = f"{prefix}signed_inputs"
        if "signed_inputs" in self._buffers and any(f"{prefix}{other}" in state_dict for other in self._buffers):
            if self.non_negative and bool(state_dict.get(name, False)):
                self.accept_signed(state_dict[name])
            state_dict[name] = self.signed_inputs.clone()  # states of earlier versions lack it if inputs are not signed
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def restart(self) -> None:
        """Make `prepare` run again at the start of a new phase, even at the same bits."""

    def penalty(self, bits: Tensor) -> Tensor | None:
        """A term that training adds to the loss, or None."""
        return None


class FunctionQuantizer(TensorQuantizer):
    """A function of a tensor and its bits, straight-through or with a `gradient` as of `with_gradient`; not compiled."""

    def __init__(self, function: Callable[..., Tensor], gradient: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.function, self.gradient = function, gradient

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        if self.gradient is None:
            return straight_through(self.function, x, bits)
        return with_gradient(self.function, self.gradient, x, bits)


class GradientQuantizer(_Quantizer):
    """Identity in the forward pass; quantizes the gradient in the backward pass."""

    def __init__(self, stochastic: bool = True, compile: bool = False) -> None:
        super().__init__()
        self.stochastic, self.compile_kernel = stochastic, compile

    def forward(self, x: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        """x, whose gradient will be quantized with the noise of (step_key, layer_key)."""
        return backward_only(twice_differentiable(self.quantize), x, bits, step_key, layer_key)

    def quantize(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        """The gradient quantized with the noise of (step_key, layer_key); dimension 0 counts samples. Infinite and NaN elements
        do not become finite, so that torch.amp.GradScaler notices an overflow."""
        raise NotImplementedError

    def loses(self, gradient: Tensor, bits: int) -> bool:
        """Whether the gradient is too small for the quantization levels at `bits` bits."""
        return False

    def along(self, gradient: Tensor, bits: Tensor, dim: int, key: Tensor, groups: int = 1) -> Tensor:
        """The gradient quantized in blocks along `dim` (see `TensorQuantizer.along`), with the noise of `key`."""
        raise NotImplementedError

    def encode(
        self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor
    ) -> tuple[Tensor, GradientCodes]:
        """The result of `quantize`, and its codes at 1 to 8 bits."""
        raise NotImplementedError

    def quantize_sequence(self, x: Tensor, bits: Tensor, step_key: Tensor, layer_keys: Tensor) -> Tensor:
        """x [T, N, F], whose gradient will be quantized separately for each time step, with layer_keys [T]."""
        return backward_only(twice_differentiable(self.quantize_steps), x, bits, step_key, layer_keys)

    def quantize_steps(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_keys: Tensor) -> Tensor:
        """The gradient [T, N, F] of a recurrent layer, quantized separately for each of its T time steps."""
        steps = zip(gradient.unbind(0), layer_keys.unbind(0))
        return torch.stack([self.quantize(step, bits, step_key, key) for step, key in steps])


class FloatGradient(GradientQuantizer):
    """Leaves gradients in float32, for quantizers without gradient quantization."""

    def forward(self, x: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        return x

    def quantize(self, gradient: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        return gradient

    def quantize_sequence(self, x: Tensor, bits: Tensor, step_key: Tensor, layer_keys: Tensor) -> Tensor:
        return x


@dataclass
class QuantizerOptions(Settings):
    """Options common to all quantizers, and factories for the modules of a quantized layer."""

    float_roles: ClassVar[Sequence[str] | None] = None
    """Roles of the layers that stay float by default; None: those that the model's own rule names."""

    name: str = setting(MISSING, "the quantizer's name, as in quantizer=NAME")
    float_layers: Optional[list[str]] = setting(
        None,
        "layers that stay float: first, last, shortcut, depthwise, matmul, or patterns of module names; null: the papers'"
        " choice for this quantizer and network (dry_run=json lists the layers)",
    )
    float_share: float = setting(
        0.0,
        "share of the other layers with a weight that stays float, too, at the end of the network (NVFP4, section 4.1: 0.15)",
        minimum=0,
        maximum=1,
    )
    depthwise_bits: Optional[list[int]] = setting(
        None,
        "fixed bits [forward, gradient] of depthwise convolutions; null: those of the schedule (CPT, Better Schedules);"
        " FracTrain has [8, 16]",
        minimum=1,
        maximum=32,
    )
    layer_bits: Any = setting(
        None,
        "bits of layers apart from the schedule by role or name pattern, as {first: 8, layer4.*: [4, 8]}: all, [forward,"
        " gradient], [weight, activation, gradient], 32 (float), or schedule if float by default",
    )

    def validate(self) -> None:
        if self.layer_bits is not None and not isinstance(self.layer_bits, dict):
            raise SettingError("layer_bits", self.layer_bits, "is not a mapping", "write it as {first: 8}")
        for layer, bits in (self.layer_bits or {}).items():
            layer_precision(layer, bits)
        if self.depthwise_bits is not None and len(self.depthwise_bits) != 2:
            raise SettingError(
                "depthwise_bits", self.depthwise_bits, "needs two numbers", "write [forward, gradient], as [8, 16]"
            )

    def bits(self, role: str) -> Sequence[int]:
        """The bits supported for tensors of `role`, besides 32 (float32)."""
        return range(1, FLOAT)

    def check_bits(self, role: str, bits: int) -> None:
        """Check that this quantizer supports `bits` for tensors of `role`. Raises SettingError naming the quantizer, the bits
        it has and what to do."""
        offered = self.bits(role)
        if bits == FLOAT or bits in offered:
            return
        if not offered:
            problem = f"has no quantizer of {role}s, but {bits}-bit {role}s are requested"
            remedy = f"use a schedule with float {role}s (32 bits), or another quantizer"
            if role == "gradient":
                options = "schedule.gradient=32 with schedule=static, schedule.gradient_min=32 with cyclic ones"
                more = "schedule.gradient_stages=[32,32,32,32] with pfq"
                remedy = f"leave gradients float ({options}, {more}), or use another quantizer, as sbm"
            raise SettingError("name", self.name, problem, remedy)
        words = bits_in_words(offered)
        problem = f"quantizes {role}s to {words} bit{'s' if offered[-1] > 1 else ''}, not to {bits}"
        remedy = f"use {words} bits (or 32, float), for example schedule=static schedule.q_max={offered[-1]}"
        raise SettingError("name", self.name, problem, f"{remedy}, or choose another quantizer")

    def check(self, precisions: Iterable[Precision]) -> None:
        """Check that this quantizer supports the precisions of a run and of depthwise convolutions.

        Gradients at steps with float weights and activations are always float, hence not checked. Raises SettingError naming
        the quantizer, the bits it has and what to do.
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
        """Check that this quantizer supports a schedule from `lowest` to `highest` bits; `check` covers its single steps.
        Raises SettingError naming the quantizer, the bits it has and what to do."""

    def storage_bits(self, role: str) -> Mapping[int, Fraction]:
        """Scheduled bits -> stored bits per element of `role`, including its share of scales, where the two differ."""
        return {}

    def check_sharing(self) -> None:
        """Check that this quantizer supports data-parallel training. Raises SettingError naming the setting and what to do."""

    @property
    def initial_precision(self) -> Precision:
        """Initial precision of a converted model."""
        highest = (max((bits for bits in self.bits(role) if bits <= INITIAL_BITS), default=FLOAT) for role in ROLES)
        return Precision(*highest)

    def float_rule(self, model_rule: Sequence[str]) -> list[str]:
        """Roles and patterns of the layers that stay float in a model whose own rule is `model_rule`."""
        default = model_rule if self.float_roles is None else self.float_roles
        return list(default if self.float_layers is None else self.float_layers)

    def weight(self, compile: bool) -> TensorQuantizer:
        """A new quantizer of a layer's weight."""
        raise NotImplementedError

    def activation(self, compile: bool, signed: bool = False) -> TensorQuantizer:
        """A new quantizer of a layer's input, which is either `signed` or the (pooled) output of a ReLU."""
        raise NotImplementedError

    def row_activation(self, compile: bool) -> TensorQuantizer | None:
        """A new quantizer of activations and biases with one range per row (last dimension); None: not supported."""
        return None

    def gradient(self, compile: bool) -> GradientQuantizer:
        """A new quantizer of the gradient at a layer's output."""
        return FloatGradient()

    def position_gradient(self, compile: bool) -> GradientQuantizer:
        """The same for a layer whose output is [N, positions ..., F]: a linear layer, a recurrent one, a matrix product."""
        return self.gradient(compile)

    def matmul_operand(self, compile: bool) -> TensorQuantizer:
        """A new quantizer of an operand of a product of two activations; by default that of signed activations."""
        return self.activation(compile, signed=True)

    def bias(self, compile: bool) -> TensorQuantizer | None:
        """A new quantizer of a layer's bias; None leaves it in float32."""
        return None

    def configure_for(self, model: nn.Module) -> "QuantizerOptions":
        """These options with defaults that depend on the network resolved for `model`."""
        return self

    def as_released(self) -> "QuantizerOptions":
        """These options with the defaults of the reproduction, where those of `quantize_model` differ."""
        return self

    def input_gradient(self, compile: bool) -> GradientQuantizer | None:
        """A new quantizer of the gradient of a layer's input; None leaves it unquantized."""
        return None


def layer_precision(layer: str, bits: object) -> Precision | None:
    """The precision that an entry of `layer_bits` stands for; None: that of the schedule. Raises SettingError for anything but 1
    to 3 numbers of bits from 1 to 32, or the word schedule."""
    if bits == "schedule":
        return None
    numbers: list[Any] = list(bits) if isinstance(bits, list | tuple) else [bits]
    is_whole = all(isinstance(number, Integral) and not isinstance(number, bool) for number in numbers)
    if not 1 <= len(numbers) <= 3 or not is_whole or not all(1 <= number <= FLOAT for number in numbers):
        remedy = "use bits from 1 to 32 as 8, [forward, gradient] or [weight, activation, gradient], or schedule"
        raise SettingError("layer_bits", f"{layer}: {bits}", "is not a precision", remedy)
    numbers = [int(number) for number in numbers]
    return Precision(numbers[0], numbers[-2] if len(numbers) > 1 else numbers[0], numbers[-1])


def bits_in_words(bits: Sequence[int]) -> str:
    """Supported bits in words: `2`, `2 to 8`, or `4, 6 or 8`."""
    if len(bits) < 2 or bits[-1] - bits[0] == len(bits) - 1:
        return " to ".join(dict.fromkeys((str(bits[0]), str(bits[-1]))))
    return f"{', '.join(map(str, bits[:-1]))} or {bits[-1]}"
