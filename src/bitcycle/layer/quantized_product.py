"""What every quantized product has: where it reads its bits, and the quantizer of the gradient at its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitcycle.layer.state import PrecisionState
from bitcycle.quantizer import QuantizerOptions, quantizer_options
from bitcycle.quantizer.autograd import backward_only
from bitcycle.randomness import int32_key
from bitcycle.schedule import Precision


class QuantizedProduct(nn.Module):
    """A product of two tensors, of which the quantized layers and matrix products derive."""

    layer_key: Tensor
    has_positions = True
    """Whether the output is [N, positions ..., F], else an image or such like."""

    def attach(
        self,
        quantizer: str | QuantizerOptions,
        precision: PrecisionState | None = None,
        key: str = "",
        compile: bool = False,
        signed: bool = False,
    ) -> None:
        """Give the product its quantizers.

        Args:
            quantizer: name or options.
            precision: where it reads its bits; its own, at the quantizer's initial precision, if None.
            key: what its noise depends on, beside seed and step: its name in the model.
            compile: fuse each quantizer into one kernel.
            signed: its input is something else than the (pooled) output of a ReLU.
        """
        raise NotImplementedError

    def attach_output(
        self, quantizer: str | QuantizerOptions, precision: PrecisionState | None, key: str, compile: bool
    ) -> QuantizerOptions:
        """Give the product its bits, its noise and the quantizer of its output's gradient; returns the options."""
        options = quantizer_options(quantizer)
        self.quantizer_options = options
        self.precision = precision if precision is not None else PrecisionState(options.initial_precision)
        self.gradient_quantizer = (options.position_gradient if self.has_positions else options.gradient)(compile)
        self._keep("layer_key", torch.tensor(int32_key("layer", key), dtype=torch.int32))
        self.prepared: tuple[Precision, bool] | None = None
        self.register_load_state_dict_post_hook(_forget_preparation)
        return options

    def _keep(self, name: str, value: Tensor) -> None:
        self.register_buffer(name, value, persistent=False)

    def restart(self) -> None:
        """Let the quantizers adapt anew at the next forward pass, whatever its bits."""
        raise NotImplementedError

    def quantize_gradient_of(self, y: Tensor) -> Tensor:
        """y, whose gradient will be quantized."""
        state = self.precision
        return self.gradient_quantizer(y, state.gradient_bits, state.step_key, self.layer_key)  # type: ignore[no-any-return]

    def masked(self, product: Callable[..., Tensor], compute: Callable[[Callable[..., Tensor]], Tensor]) -> Tensor:
        """compute(product), past which only the gradients of the samples come that count now."""
        mask = self.precision.sample_mask
        if mask is None:
            return compute(product)
        # on both sides of the gradient's quantizer, which makes noise of zeros and a range of the rest
        return masked_gradient(compute(lambda *operands: masked_gradient(product(*operands), mask)), mask)


def masked_gradient(y: Tensor, mask: Tensor) -> Tensor:
    """y [N, ...], whose gradient is multiplied by mask [N]."""
    return backward_only(torch.mul, y, mask.view(-1, *[1] * (y.dim() - 1)))


def _forget_preparation(layer: nn.Module, _incompatible_keys: Any) -> None:
    """A loaded state may hold step sizes for other bits: look again."""
    layer.prepared = None  # type: ignore[assignment]
