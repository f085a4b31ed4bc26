"""Drop-in layers whose weight, input and output gradient are quantized.

    y = product(Q_activation(x; b_a), Q_weight(W; b_w)) + bias,     dL/dy := Q_gradient(dL/dy; g) on the way back

The gradient is quantized once, at the layer's output, and serves both the input's and the weight's gradient. Master weights,
bias and updates are float32. Source: released code of CPT, modules/quantize.py (QConv2d). Differs from it in that a bias,
which theirs cannot have, is kept in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bitcycle.layer.state import PrecisionState
from bitcycle.quantizer import QuantizerOptions, quantizer_options
from bitcycle.randomness import int32_key


class QuantizedLayer(nn.Module):
    """The quantizing half of a quantized layer; the other half is an ordinary PyTorch layer."""

    layer_key: Tensor

    def attach(
        self,
        quantizer: str | QuantizerOptions,
        precision: PrecisionState | None = None,
        key: str = "",
        compile: bool = False,
    ) -> None:
        """Give the layer its quantizers.

        Args:
            quantizer: name or options.
            precision: where the layer reads its bits; its own, 8 bits, if None.
            key: what the layer's noise depends on, beside seed and step: its name in the model.
            compile: fuse each quantizer into one kernel.
        """
        options = quantizer_options(quantizer)
        self.precision = precision if precision is not None else PrecisionState()
        self.weight_quantizer = options.weight(compile)
        self.activation_quantizer = options.activation(compile)
        self.gradient_quantizer = options.gradient(compile)
        self.register_buffer("layer_key", torch.tensor(int32_key("layer", key), dtype=torch.int32), persistent=False)

    def quantized_operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Input and weight at the current bits."""
        weight: Tensor = self.weight  # type: ignore[assignment]
        return (
            self.activation_quantizer(x, self.precision.activation_bits),
            self.weight_quantizer(weight, self.precision.weight_bits),
        )

    def quantize_gradient_of(self, y: Tensor) -> Tensor:
        """y, whose gradient will be quantized."""
        state = self.precision
        return self.gradient_quantizer(y, state.gradient_bits, state.step_key, self.layer_key)  # type: ignore[no-any-return]


class QuantizedConv2d(QuantizedLayer, nn.Conv2d):
    """A quantized torch.nn.Conv2d, grouped and depthwise included. Shapes as there: [N, C, H, W] -> [N, C', H', W']."""

    def __init__(self, *arguments: Any, quantizer: str | QuantizerOptions = "sbm", **options: Any) -> None:
        nn.Conv2d.__init__(self, *arguments, **options)
        self.attach(quantizer)

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.quantized_operands(x)
        return self.quantize_gradient_of(self._conv_forward(x, weight, self.bias))


class QuantizedLinear(QuantizedLayer, nn.Linear):
    """A quantized torch.nn.Linear. Shapes as there: [..., F] -> [..., F']."""

    def __init__(self, *arguments: Any, quantizer: str | QuantizerOptions = "sbm", **options: Any) -> None:
        nn.Linear.__init__(self, *arguments, **options)
        self.attach(quantizer)

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.quantized_operands(x)
        return self.quantize_gradient_of(nn.functional.linear(x, weight, self.bias))


def quantized_conv2d(layer: nn.Conv2d) -> QuantizedConv2d:
    """A quantized layer around the parameters of `layer` (the same tensors, so that optimizers keep their hold)."""
    converted = QuantizedConv2d(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        groups=layer.groups,
        bias=layer.bias is not None,
        padding_mode=layer.padding_mode,
        device="meta",
    )
    converted.weight, converted.bias = layer.weight, layer.bias
    return converted


def quantized_linear(layer: nn.Linear) -> QuantizedLinear:
    """A quantized layer around the parameters of `layer` (the same tensors, so that optimizers keep their hold)."""
    converted = QuantizedLinear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    converted.weight, converted.bias = layer.weight, layer.bias
    return converted


CONVERSIONS = {nn.Conv2d: quantized_conv2d, nn.Linear: quantized_linear}
"""Float layer type -> the function that makes the quantized layer from it. Subclasses are left alone: they may compute
something else, or have their weight read by a parent (as in torch.nn.MultiheadAttention)."""
