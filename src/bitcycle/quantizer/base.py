"""What every quantizer provides: one module for each role, told the bits at every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from torch import Tensor, nn

from bitcycle.settings import MISSING, SettingError, Settings, setting

ROLES = ("weight", "activation", "gradient")


class TensorQuantizer(nn.Module):
    """Maps a tensor onto 2^bits levels. `bits` is an int64 tensor; 0 means float32 and leaves the tensor as it is."""

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        """x quantized, with the straight-through gradient."""
        raise NotImplementedError


class GradientQuantizer(nn.Module):
    """Identity in the forward direction; quantizes the gradient that comes back."""

    def forward(self, x: Tensor, bits: Tensor, step_key: Tensor, layer_key: Tensor) -> Tensor:
        """x, whose gradient will be quantized with the noise of (step_key, layer_key)."""
        raise NotImplementedError


@dataclass
class QuantizerOptions(Settings):
    """Options that every quantizer has, and the three modules that a quantized layer is made of."""

    name: str = setting(MISSING, "the quantizer's name, as in quantizer=NAME")
    float_layers: Optional[list[str]] = setting(
        None,
        "layers that stay float: first, last, shortcut, depthwise, or patterns of module names; null means the papers' choice:"
        " [last] for CIFAR networks, [first, last, shortcut] for all others",
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

    def weight(self, compile: bool) -> TensorQuantizer:
        """A new quantizer of a layer's weight."""
        raise NotImplementedError

    def activation(self, compile: bool) -> TensorQuantizer:
        """A new quantizer of a layer's input."""
        raise NotImplementedError

    def gradient(self, compile: bool) -> GradientQuantizer:
        """A new quantizer of the gradient at a layer's output."""
        raise NotImplementedError
