"""Base of all quantized products: their bits, their noise, and the quantizer of the gradient at their output."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bitcycle.layer.compilation import count_call, is_exporting, refuse_tracing
from bitcycle.layer.state import NO_BITS, HoldsTensors, PrecisionState
from bitcycle.layer.twin import modules_of
from bitcycle.quantizer import QuantizerOptions, TensorQuantizer, encode_bits, quantizer_options
from bitcycle.quantizer.autograd import backward_only, is_repeated
from bitcycle.randomness import hash_bits, int32_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Context:
    """The context in which quantizers are attached to a layer.

    Attributes:
        options: options of the quantizer.
        precision: the state that bits are read from.
        key: the layer's name in the model, on which noise depends besides seed and step.
        compile: fuse each quantizer into one kernel.
        signed: the layer's input is not the (pooled) output of a ReLU.
    """

    options: QuantizerOptions
    precision: PrecisionState
    key: str = ""
    compile: bool = False
    signed: bool = False

    @classmethod
    def standalone(cls, quantizer: str | QuantizerOptions) -> Context:
        """The context of a layer outside of any model, with its own bits."""
        options = quantizer_options(quantizer)
        return cls(options, PrecisionState(options.initial_precision))

    def part(self, name: str, signed: bool = True) -> Context:
        """The context of a part of the layer."""
        return replace(self, key=f"{self.key}.{name}", signed=signed)


class Noisy(HoldsTensors):
    """A module whose gradient is rounded with noise that differs between steps and between calls within a step.

    key of call n = layer_key for n = 0, else hash(n, layer_key)          n counts the calls with gradients in this step
    """

    precision: PrecisionState
    layer_key: Tensor
    call_count: Tensor
    call_step: Tensor

    def hold_keys(self, key: str) -> None:
        """Derive its noise key from the name `key` of this module in the model."""
        self.layer_number = int32_key("layer", key)
        self.register_state("layer_key", torch.tensor(self.layer_number, dtype=torch.int32))
        self.register_state("call_count", torch.zeros((), dtype=torch.int32))
        self.register_state("call_step", torch.zeros((), dtype=torch.int32))

    def call_key(self, state: PrecisionState | None = None) -> Tensor:
        """The int32 noise key of this call, besides that of the training step; must be called once per call. `state` counts the
        calls; None: the module's own state."""
        key = self.layer_key
        if not torch.is_grad_enabled() or is_exporting():
            return key
        if torch.compiler.is_compiling():
            number = self._next_call_in_graph()
            return torch.where(number > 0, hash_bits(number, key), key)
        calls = self.precision if state is None else state
        count = (calls.last_call if is_repeated() else calls.next_call)(self.layer_number)
        return hash_bits(torch.full_like(key, count), key) if count else key

    def _next_call_in_graph(self) -> Tensor:
        """The index of this call as a tensor, as a Python number would be a constant in a compiled graph."""
        number: Tensor = count_call(self.call_count, self.call_step, self.precision.step_number)
        return number


def separate_noise(model: nn.Module) -> None:
    """Give layers of the same name, in parts of the model that were converted separately, noise of their own."""
    numbers: dict[PrecisionState, set[int]] = {}
    for layer in modules_of(model, Noisy):
        numbers.setdefault(layer.precision, set()).add(layer.layer_number)
    taken: list[set[int]] = []
    for state, own in numbers.items():
        state.part = next((part for part, others in enumerate(taken) if not own & others), len(taken))
        if state.part == len(taken):
            taken.append(set())
        taken[state.part] |= own


class Quantized(nn.Module):
    """Mixin of a float module's quantized counterpart: made by conversion, or from the module's arguments and a quantizer."""

    def __init__(self, *arguments: Any, quantizer: str | QuantizerOptions = "sbm", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.attach(Context.standalone(quantizer))

    def attach(self, context: Context) -> None:
        """Attach bits, noise and quantizers."""
        raise NotImplementedError


class QuantizedProduct(Quantized, Noisy):
    """A product of two tensors; base class of quantized layers and matrix products."""

    _adapted_in: bool | None = None
    """The mode in which the quantizers were prepared, as trainers may assign `training` without `train`; None: in none."""
    has_positions = True
    """Whether the output has shape [N, positions ..., F], in contrast to images."""

    @property
    def adapted(self) -> bool:
        """Whether the quantizers are prepared for bits and mode; compiled graphs depend on this flag instead of the bits."""
        return self._adapted_in == self.training

    @adapted.setter
    def adapted(self, value: bool) -> None:
        self._adapted_in = self.training if value else None

    def attach(self, context: Context) -> None:
        options = self.quantizer_options = context.options
        self.precision = context.precision
        self.gradient_quantizer = (options.position_gradient if self.has_positions else options.gradient)(
            context.compile
        )
        self.name, self.observed_gradient_bits = context.key, {0}
        self.hold_keys(context.key)
        self.adapted = False
        self.precision.readers.add(self)
        self.register_load_state_dict_post_hook(_forget_preparation)

    def operands(self) -> tuple[tuple[TensorQuantizer, Tensor], ...]:
        """The quantizers of its two operands with their current bits, that of the weight (or the right operand) first."""
        raise NotImplementedError

    def look_again(self) -> None:
        """After a change of bits or mode, let the quantizers adapt at the next forward pass if necessary."""
        self.adapted = not any(quantizer.adapts for quantizer, _ in self.operands())

    def read_from(self, state: PrecisionState) -> None:
        """Read bits and noise from `state` from now on."""
        self.precision = state
        self.look_again()

    def train(self, mode: bool = True) -> QuantizedProduct:
        # those of a model that was in evaluation mode before its conversion are new, in training mode
        changes = any(module.training != mode for module in (self, *(quantizer for quantizer, _ in self.operands())))
        super().train(mode)
        if changes:
            self.look_again()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.precision.readers.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedProduct:
        replica = self.__new__(type(self))
        memo[id(self)] = replica
        state = copy.deepcopy(self.__dict__, memo)
        replica.__setstate__(state)  # which torch's copy of a parametrized layer does not call
        return replica

    def restart(self) -> None:
        """Let the quantizers adapt again at the next forward pass, whatever its bits."""
        for quantizer, _ in self.operands():
            quantizer.restart()
        self.look_again()

    def penalties(self, loss: Tensor | None = None) -> list[Tensor]:
        """Terms that the operands' quantizers add to the loss at the current bits."""
        found = (quantizer.penalty(bits) for quantizer, bits in self.operands())
        return [term for term in found if term is not None]

    def quantize_gradient_of(self, y: Tensor, key: Tensor) -> Tensor:
        """y, whose gradient will be quantized with the noise of this call's key."""
        state = self.precision
        return self.gradient_quantizer(y, state.gradient_bits, state.step_key, key)

    def look_at_gradient(self, gradient: Tensor) -> None:
        """Warn if the first gradient at each number of bits is too small for its quantizer: once for all layers."""
        bits = encode_bits(self.precision.precision.gradient)
        if bits in self.observed_gradient_bits:
            return
        self.observed_gradient_bits.add(bits)
        if bits and gradient.numel() and self.gradient_quantizer.loses(gradient, bits):
            level = logging.DEBUG if self.precision.has_small_gradients else logging.WARNING
            self.precision.has_small_gradients = True
            logger.log(
                level,
                "layer %r: its gradients are below %.1e, too small for %d bits of steps of at least 1e-8, as in the released"
                " code; use Sbm(least_step='relative') (quantizer.least_step=relative), or scale the loss; further such"
                " layers are logged at level DEBUG",
                *(self.name, float(gradient.abs().amax()), bits),
            )

    def masked(self, product: Callable[..., Tensor], compute: Callable[[Callable[..., Tensor]], Tensor]) -> Tensor:
        """compute(product), with gradients only from the samples selected by the current mask."""
        refuse_tracing()
        mask = self.precision.sample_mask
        if mask is None:
            return self.precision.refuse_changes(compute(product), self.look_at_gradient)
        # on both sides of the gradient's quantizer, which turns zeros into noise and takes the range of the rest
        return masked_gradient(compute(lambda *operands: masked_gradient(product(*operands), mask)), mask)


def masked_gradient(y: Tensor, mask: Tensor) -> Tensor:
    """y [N, ...], whose gradient is multiplied by mask [N]."""
    return backward_only(torch.mul, y, mask.view(-1, *[1] * (y.dim() - 1)))


def _forget_preparation(layer: Any, _incompatible_keys: Any) -> None:
    """Let the quantizers adapt again, as a loaded state may hold step sizes for other bits. Raises RuntimeError if the state's
    tensors were assigned to a layer on the meta device."""
    if layer.layer_key.is_meta and not all(parameter.is_meta for parameter in layer.parameters(recurse=False)):
        raise RuntimeError(NO_BITS)
    layer.look_again()


def penalty(model: nn.Module, loss: Tensor | None = None) -> Tensor | None:
    """The sum of the penalties of a converted model at the current bits, after a forward pass; None if there are none. The
    loss and the sum are scalars.

    A module contributes if its class has a method `penalties(loss)` that returns a list of terms, which may be relative to the
    loss without penalties. Custom training loops must add the sum to the loss.
    """
    parts: list[Any] = [module for module in model.modules() if hasattr(type(module), "penalties")]
    terms: list[Tensor] = [term for part in parts for term in part.penalties(loss)]
    return torch.stack(terms).sum() if terms else None
