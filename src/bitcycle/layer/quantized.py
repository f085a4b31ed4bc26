"""Drop-in layers whose weight, input and output gradient are quantized.

    y = product(Q_activation(x; b_a), Q_weight(W; b_w)) + bias,     dL/dy := Q_gradient(dL/dy; g) on the way back

The gradient is quantized once, at the layer's output, and serves both the input's and the weight's gradient, unless the
quantizer asks for a finer copy for the latter. Master weights, bias and updates are float32. Source: released code of CPT,
modules/quantize.py (QConv2d). A bias, which theirs cannot have, is kept in float32 unless the quantizer has something for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bitcycle.layer.bifurcation import Product, bifurcated
from bitcycle.layer.block_product import CONVOLUTION, LINEAR, block_product, copies_of
from bitcycle.layer.matrix_product import MatrixProduct, quantized_matrix_product
from bitcycle.layer.quantized_product import QuantizedProduct
from bitcycle.layer.state import PrecisionState
from bitcycle.quantizer import QuantizerOptions, encode_bits
from bitcycle.randomness import int32_key


class Computation(Protocol):
    """A way to compute a layer, quantizers included, that is not a product of quantized tensors."""

    def accepts(self, x: Tensor) -> bool:
        """Whether it can compute the layer's output for x at the current bits."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output for x and its bias, quantized if it is to be."""


class QuantizedLayer(QuantizedProduct):
    """The quantizing half of a quantized layer; the other half is an ordinary PyTorch layer."""

    fine_key: Tensor
    fine_bits: Tensor
    computation: Computation | None = None
    """Another way to compute the layer (compute=codes); it refers to the layer, hence is no submodule."""
    axes = LINEAR
    """Where input, weight and output have the dimensions that products sum over."""

    def attach(
        self,
        quantizer: str | QuantizerOptions,
        precision: PrecisionState | None = None,
        key: str = "",
        compile: bool = False,
        signed: bool = False,
    ) -> None:
        options = self.attach_output(quantizer, precision, key, compile)
        self.weight_quantizer = options.weight(compile)
        self.activation_quantizer = options.activation(compile, signed)
        self.bias_quantizer = None if self.bias is None else options.bias(compile)
        self.input_gradient_quantizer = options.input_gradient(compile)
        self.weight_gradient_quantizer = options.weight_gradient(compile)
        self.weight_quantizer.initialise(self.weight)  # type: ignore[arg-type]
        if options.fine_gradient_bits is not None:
            self._keep("fine_key", torch.tensor(int32_key("layer", key, "fine"), dtype=torch.int32))
            self._keep("fine_bits", torch.tensor(encode_bits(options.fine_gradient_bits)))

    def prepare_trace(self) -> None:
        """From now on compute the product as one that can be seen, as for a trace of the model's products."""
        self.computation = None

    def quantized_operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Input and weight at the current bits."""
        weight: Tensor = self.weight  # type: ignore[assignment]
        if self.prepared != (self.precision.precision, self.training):
            self._prepare(x, weight)
        state = self.precision
        if self.input_gradient_quantizer is not None:
            x = self.input_gradient_quantizer(x, state.gradient_bits, state.step_key, self.layer_key)
        return self.activation_quantizer(x, state.activation_bits), self.quantized_weight()

    def quantized_weight(self) -> Tensor:
        """The weight at the current bits."""
        weight, state = self.weight, self.precision
        if self.weight_gradient_quantizer is not None:
            weight = self.weight_gradient_quantizer(weight, state.gradient_bits, state.step_key, self.layer_key)
        return self.weight_quantizer(weight, state.weight_bits)  # type: ignore[no-any-return]

    def quantized_bias(self) -> Tensor | None:
        """The bias, at the bits of the weight where the quantizer has something for it."""
        bias: Tensor | None = self.bias  # type: ignore[assignment]
        if bias is None or self.bias_quantizer is None:
            return bias
        return self.bias_quantizer(bias, self.precision.weight_bits)  # type: ignore[no-any-return]

    def _prepare(self, x: Tensor, weight: Tensor) -> None:
        """Let the quantizers adapt to bits, or to a mode, that they have not seen last. Compares numbers of the host only."""
        precision = self.precision.precision
        if not weight.is_meta:  # without numbers there is nothing to adapt to
            self.activation_quantizer.prepare(x.detach(), encode_bits(precision.activation))
            self.weight_quantizer.prepare(weight.detach(), encode_bits(precision.weight))
        self.prepared = (precision, self.training)

    def restart(self) -> None:
        """Let the quantizers adapt anew at the next forward pass, whatever its bits."""
        self.weight_quantizer.restart()
        self.activation_quantizer.restart()
        self.prepared = None

    def begin_step(self, new_epoch: bool) -> None:
        """Let the weight's quantizer work before a training step."""
        weight: Tensor = self.weight  # type: ignore[assignment]
        self.weight_quantizer.begin_step(weight.detach(), new_epoch)

    def penalties(self, loss: Tensor | None = None) -> list[Tensor]:
        """Terms that the layer's quantizers add to the loss at the current bits."""
        state = self.precision
        found = (
            self.weight_quantizer.penalty(state.weight_bits),
            self.activation_quantizer.penalty(state.activation_bits),
        )
        return [term for term in found if term is not None]

    def quantized_product(self, x: Tensor, product: Product) -> Tensor:
        """product(x, weight, bias) of the quantized operands, with quantized gradients."""
        return self.masked(product, lambda masked_product: self._product(x, masked_product))

    def _product(self, x: Tensor, product: Product) -> Tensor:
        if self.computation is not None and self.computation.accepts(x):
            return self.computation(x, self.quantized_bias())
        if self.weight_quantizer.has_blocks:
            return block_product(product, x, self.weight, self.bias, copies_of(self))  # type: ignore[arg-type]
        x, weight = self.quantized_operands(x)
        bias = self.quantized_bias()
        if self.quantizer_options.fine_gradient_bits is None:
            return self.quantize_gradient_of(product(x, weight, bias))
        return bifurcated(product, x, weight, bias, self._coarse, self._fine)

    def _coarse(self, gradient: Tensor) -> Tensor:
        state = self.precision
        return self.gradient_quantizer.quantize(gradient, state.gradient_bits, state.step_key, self.layer_key)

    def _fine(self, gradient: Tensor) -> Tensor:
        state = self.precision
        bits = torch.where(state.gradient_bits > 0, self.fine_bits, 0)
        return self.gradient_quantizer.quantize(gradient, bits, state.step_key, self.fine_key)


class QuantizedConv2d(QuantizedLayer, nn.Conv2d):
    """A quantized torch.nn.Conv2d, grouped and depthwise included. Shapes as there: [N, C, H, W] -> [N, C', H', W']."""

    has_positions = False
    axes = CONVOLUTION

    def __init__(self, *arguments: Any, quantizer: str | QuantizerOptions = "sbm", **options: Any) -> None:
        nn.Conv2d.__init__(self, *arguments, **options)
        self.attach(quantizer)

    def forward(self, x: Tensor) -> Tensor:
        return self.quantized_product(x, self._conv_forward)


class QuantizedLinear(QuantizedLayer, nn.Linear):
    """A quantized torch.nn.Linear. Shapes as there: [..., F] -> [..., F']."""

    def __init__(self, *arguments: Any, quantizer: str | QuantizerOptions = "sbm", **options: Any) -> None:
        nn.Linear.__init__(self, *arguments, **options)
        self.attach(quantizer)

    def forward(self, x: Tensor) -> Tensor:
        return self.quantized_product(x, nn.functional.linear)


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


CONVERSIONS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Conv2d: quantized_conv2d,
    nn.Linear: quantized_linear,
    MatrixProduct: quantized_matrix_product,
}
"""Float layer type -> the function that makes the quantized layer from it. Subclasses are left alone: they may compute
something else, or have their weight read by a parent (as in torch.nn.MultiheadAttention)."""
