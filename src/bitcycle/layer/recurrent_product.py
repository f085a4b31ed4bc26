"""The two products of a recurrent layer as quantized layers: W x for a whole sequence and U h step by step.

Weights and biases remain in the recurrent layer, whose state dict thus equals that of the PyTorch layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.layer.bifurcation import Rounding, bifurcated
from bitcycle.layer.block_product import block_product, copies_of
from bitcycle.layer.quantized import QuantizedLayer
from bitcycle.quantizer import encode_bits
from bitcycle.randomness import hash_bits


class StepKeys(NamedTuple):
    """The int32 noise keys of a recurrent product, besides the training step.

    coarse, fine: [T], for the gradient of each time step and for its finer copy.
    whole: for the gradient of the weight, shared by all time steps.
    """

    coarse: Tensor
    fine: Tensor | None
    whole: Tensor

    def at(self, t: int) -> StepKeys:
        """The keys of time step t alone, [1]."""
        return StepKeys(self.coarse[t : t + 1], None if self.fine is None else self.fine[t : t + 1], self.whole)


class RecurrentProduct(QuantizedLayer):
    """A product for all gates of one layer and direction.

    Args:
        owner: the recurrent layer that holds weight and bias.
        side: ih or hh, as in the names of the owner's parameters.
        place: layer and direction, as in l0 or l0_reverse.
    """

    def __init__(self, owner: nn.RNNBase, side: str, place: str) -> None:
        nn.Module.__init__(self)
        self._owner = (owner,)  # in a tuple so that it is not registered as a submodule
        self.weight_name = f"weight_{side}_{place}"
        self.bias_name = f"bias_{side}_{place}" if owner.bias else None

    @property
    def weight(self) -> Tensor:
        """[gates, features]."""
        return getattr(self._owner[0], self.weight_name)

    @property
    def bias(self) -> Tensor | None:
        """[gates], if the owner has biases."""
        return None if self.bias_name is None else getattr(self._owner[0], self.bias_name)

    def quantized_weight(self, key: Tensor | None = None) -> Tensor:
        """The weight at the current bits; with block quantizers, the product quantizes it."""
        return self.weight if self.weight_quantizer.has_blocks else super().quantized_weight(key)

    def adapt(self, x: Tensor) -> None:
        super().adapt(x.flatten(0, 1))

    def step_keys(self, steps: int) -> StepKeys:
        """The keys of the given number of time steps."""
        numbers = torch.arange(steps, dtype=torch.int32, device=self.layer_key.device)
        coarse, fine = self.call_keys()
        return StepKeys(hash_bits(numbers, coarse), None if fine is None else hash_bits(numbers, fine), coarse)

    def product_of(self, x: Tensor, weight: Tensor, bias: Tensor | None, keys: StepKeys) -> Tensor:
        """x weight^T + bias of quantized operands, [T, N, features] -> [T, N, gates], with quantized gradients."""
        state, quantizer = self.precision, self.gradient_quantizer
        if self.weight_quantizer.has_blocks:
            return block_product(F.linear, x, weight, bias, copies_of(self, keys.coarse[0]))
        if keys.fine is None:
            return quantizer.quantize_sequence(
                F.linear(x, weight, bias), state.gradient_bits, state.step_key, keys.coarse
            )
        fine_bits = torch.where(state.gradient_bits > 0, self.fine_bits, 0)
        coarse, fine = self.rounding(state.gradient_bits, keys.coarse), self.rounding(fine_bits, keys.fine)
        return bifurcated(F.linear, x, weight, bias, coarse, fine)

    def rounding(self, bits: Tensor, keys: Tensor) -> Rounding:
        step_key = self.precision.step_key
        return lambda gradient: self.gradient_quantizer.quantize_steps(gradient, bits, step_key, keys)

    def quantized_inputs(self, x: Tensor, keys: StepKeys) -> Tensor:
        """x [T, N, features] quantized separately per time step; with block quantizers, the product quantizes it."""
        state = self.precision
        if self.activation_quantizer.has_blocks:
            return x
        if self.input_gradient_quantizer is not None:
            x = self.input_gradient_quantizer.quantize_sequence(x, state.gradient_bits, state.step_key, keys.coarse)
        return self.activation_quantizer.quantize_sequence(x, state.activation_bits)


class InputProduct(RecurrentProduct):
    """W x_t + b_W for all time steps at once, as x does not depend on the outputs."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, N, features] -> [T, N, gates]."""
        if not self.adapted:
            self.adapt(x)
        keys = self.step_keys(len(x))
        weight, bias = self.quantized_weight(keys.whole), self.quantized_bias()
        y = self.product_of(self.quantized_inputs(x, keys), weight, bias, keys)
        return self.precision.refuse_changes(y, self.look_at_gradient)


class HiddenProduct(RecurrentProduct):
    """U h + b_U of one time step."""

    def adapt_to(self, hidden_states: Callable[[], Tensor]) -> None:
        """Let the quantizers adapt to changed bits or mode, before the first time step.

        The first hidden state is zero and not representative. For quantizers that adapt to activations, `hidden_states` must
        return the hidden states [T, N, H] of a float32 computation.
        """
        if self.adapted:
            return
        looks = self.activation_quantizer.adapts
        if looks and encode_bits(self.precision.precision.activation) and not self.weight.is_meta:
            self.adapt(hidden_states())
        else:
            self.adapt(self.weight.new_zeros(1, 1, self.weight.shape[1]))

    def forward(self, h: Tensor, weight: Tensor, bias: Tensor | None, keys: StepKeys) -> Tensor:
        """h [N, H] -> [N, gates]; weight and bias are quantized, once for all time steps."""
        h = self.quantized_inputs(h.unsqueeze(0), keys)
        return self.product_of(h, weight, bias, keys).squeeze(0)
