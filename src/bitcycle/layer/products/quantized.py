"""Drop-in layers whose weight, input and output gradient are quantized.

    y = product(Q_activation(x; b_a), Q_weight(W; b_w)) + bias,     dL/dy := Q_gradient(dL/dy; g) in the backward pass

The gradient is quantized once, at the layer's output, and serves both the input's and the weight's gradient, unless the
quantizer requests a finer copy for the latter. Master weights, bias and updates are float32. Source: released code of CPT,
modules/quantize.py (QConv2d, which has no bias). A bias stays float32 unless the quantizer has a bias quantizer.
"""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bitcycle import distributed
from bitcycle.layer.compilation import has_numbers, is_exporting, not_compiled
from bitcycle.layer.products.block_product import LINEAR, ProductFunction, block_product, copies_of
from bitcycle.layer.products.matrix_product import QuantizedMatrixProduct
from bitcycle.layer.products.quantized_product import Context, QuantizedProduct
from bitcycle.module.layers import MatrixProduct
from bitcycle.quantizer import TensorQuantizer, encode_bits
from bitcycle.settings import SettingError

logger = logging.getLogger(__name__)

NOTICED_SHARE = 0.01
"""Fraction of clipped inputs above which a layer logs a warning."""


class Computation(Protocol):
    """An alternative computation of a layer, including its quantizers."""

    def accepts(self, x: Tensor) -> bool:
        """Whether it can compute the layer's output for x at the current bits."""

    def __call__(self, x: Tensor, bias: Tensor | None, key: Tensor) -> Tensor:
        """The layer's output for x and its (quantized) bias, with the noise of `key`."""


class QuantizedLayer(QuantizedProduct):
    """Mixin that quantizes an ordinary PyTorch layer."""

    weight: Any  # a Tensor; declared differently by PyTorch's layers
    bias: Any
    computation: Computation | None = None
    """Alternative computation of the layer (compute=codes); not a submodule, as it refers to the layer."""
    weight_name: Any = "weight"
    """Name of its weight parameter, in the layer or in the enclosing recurrent layer or attention."""
    computes_weight = False
    """Whether its forward multiplies by a weight that it computes from its own, as a standardized one."""
    axes = LINEAR
    """The dimensions of input, weight and output that products sum over."""

    def attach(self, context: Context) -> None:
        super().attach(context)
        options, compile = context.options, context.compile
        self.weight_quantizer = options.weight(compile)
        self.activation_quantizer = options.activation(compile, context.signed)
        self.bias_quantizer = None if self.bias is None else options.bias(compile)
        self.input_gradient_quantizer = options.input_gradient(compile)
        self.observed_bits, self.has_warned = set[int](), False
        self.look_again()

    def prepare_trace(self) -> None:
        """Compute the product by visible operations from now on, for tracing."""
        self.computation, self.adapted = None, True

    def operands(self) -> tuple[tuple[TensorQuantizer, Tensor], ...]:
        bits = self.precision
        return (self.weight_quantizer, bits.weight_bits), (self.activation_quantizer, bits.activation_bits)

    def quantized_operands(self, x: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Input and weight at the current bits; `key` is the noise key of this call."""
        state = self.precision
        if self.input_gradient_quantizer is not None:
            x = self.input_gradient_quantizer(x, state.gradient_bits, state.step_key, key)
        # a compiled graph serves all bits: it contains the quantizer, and may not depend on their numbers
        is_float = not torch.compiler.is_compiling() and encode_bits(state.precision.activation) == 0
        left_out = self.activation_quantizer.at_float(x) if is_float else None
        quantized = self.activation_quantizer(x, state.activation_bits) if left_out is None else left_out
        return quantized, self.quantized_weight()

    def quantized_weight(self) -> Tensor:
        """The weight at the current bits."""
        return self.rows_of(self.weight_quantizer(self.rows_of(self.weight), self.precision.weight_bits))

    def rows_of(self, weight: Tensor) -> Tensor:
        """The weight with its output channels in dimension 0, as quantizers expect it; the function is its own inverse."""
        return weight

    def quantized_bias(self, *given: Tensor | None) -> Tensor | None:
        """The bias, or the `given` one, at the bits of the weight if there is a bias quantizer."""
        bias: Tensor | None = given[0] if given else self.bias
        if bias is None or self.bias_quantizer is None:
            return bias
        return self.bias_quantizer(bias, self.precision.weight_bits)

    @not_compiled
    def adapt(self, x: Tensor) -> None:
        """Let the quantizers adapt to changed bits or mode. Raises SettingError if x has negative values and the quantizer
        does not support them, or in torch.export if it has not adapted before."""
        weight: Tensor = self.weight
        precision = self.precision.precision
        if not (has_numbers(weight) and has_numbers(x)):  # without values there is nothing to adapt to
            self._refuse_export()
            return
        bits = encode_bits(precision.activation)
        self.adapted = self.activation_quantizer.learns_from(x, bits)  # else the next batch decides
        if self.adapted:
            self._observe_inputs(x.detach(), bits)
            self.activation_quantizer.prepare(x.detach(), bits)
        self.weight_quantizer.prepare(self.rows_of(weight.detach()), encode_bits(precision.weight))

    def _refuse_export(self) -> None:
        """Refuse that torch.export makes ranges constants that no batch has determined. Raises SettingError."""
        activation, bits = self.activation_quantizer, self.precision.precision
        is_undecided = activation.non_negative and not self.observed_bits
        found = (
            (activation.lacks_values or is_undecided, bits.activation),
            (self.weight_quantizer.lacks_values, bits.weight),
        )
        if is_exporting() and any(lacks and encode_bits(number) for lacks, number in found):
            problem = f"layer {self.name!r} has no range to export, as the network has not run in this mode"
            raise SettingError("model", "torch.export", problem, "run it on a batch before torch.export.export")

    def _observe_inputs(self, x: Tensor, bits: int) -> None:
        """Check, once for each number of bits, whether the activation's quantizer would clip its input."""
        quantizer = self.activation_quantizer
        if not bits or bits in self.observed_bits or not x.numel():
            return
        self.observed_bits.add(bits)
        if quantizer.non_negative and bool(distributed.all_max(-x.amin()) > 0):
            try:
                quantizer.accept_signed(x)
            except SettingError as error:
                problem = f"{error.problem}: {self.name!r}, down to {float(x.amin()):.3g}"
                raise SettingError("quantizer", self.quantizer_options.name, problem, error.remedy) from None
        if quantizer.fixed_range is not None and not self.has_warned:
            low, high = quantizer.fixed_range
            cut = float(((x < low) | (x > high)).float().mean())
            self.has_warned = cut > NOTICED_SHARE
            if self.has_warned:
                logger.warning(
                    "layer %r: %s clips %.0f %% of the input, outside of %g to %g; train with it from the start, list the"
                    " layer in float_layers, or use quantizer=sbm",
                    *(self.name, self.quantizer_options.name, 100 * cut, low, high),
                )

    def restart(self) -> None:
        self.observed_bits.clear()
        super().restart()

    def quantized_product(
        self, x: Tensor, product: ProductFunction, *bias: Tensor | None, parts: Sequence[int] | None = None
    ) -> Tensor:
        """product(x, weight, bias) of the quantized operands, with quantized gradients; `bias`: in place of the layer's own;
        `parts`: numbers of rows, one after the other, each multiplied by a weight of its own, as of experts."""
        return self.masked(product, lambda masked_product: self._product(x, masked_product, *bias, parts=parts))

    def _product(
        self, x: Tensor, product: ProductFunction, *bias: Tensor | None, parts: Sequence[int] | None = None
    ) -> Tensor:
        if not x.numel():
            return product(x, self.weight, *(bias or (self.bias,)))
        if not self.adapted:
            self.adapt(x)
        key = self.call_key()
        if self.computation is not None and self.computation.accepts(x):
            return self.computation(x, self.quantized_bias(*bias), key)
        if self.weight_quantizer.has_blocks:
            return block_product(product, x, self.weight, self.quantized_bias(*bias), copies_of(self, key, parts))
        x, weight = self.quantized_operands(x, key)
        return self.quantize_gradient_of(product(x, weight, self.quantized_bias(*bias)), key)


class QuantizedLinear(QuantizedLayer, nn.Linear):
    """A quantized torch.nn.Linear: [..., F] -> [..., F']."""

    is_read = False
    """Whether the module that contains it reads its weight, and redirects F.linear (`by_function`)."""

    def forward(self, input: Tensor, *bias: Tensor | None) -> Tensor:
        """The layer's output; `bias`: in place of the layer's own, from a function that reads its weight."""
        return self.computed_by(_linear if self.is_read else nn.functional.linear, input, *bias)

    def computed_by(self, multiply: ProductFunction, input: Tensor, *bias: Tensor | None) -> Tensor:
        """The output for an input by `multiply`; `bias`: in place of the layer's own."""
        return self.quantized_product(input, multiply, *bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear under a name that is not redirected."""
    y: Tensor = torch.ops.aten.linear(x, weight, bias)
    return y


CONVERSIONS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: QuantizedLinear,
    MatrixProduct: QuantizedMatrixProduct,
}
"""Float layer type -> its quantized counterpart, a subclass. Other subclasses are not converted: they may compute
something else, or have their weight read by a parent (as in torch.nn.MultiheadAttention)."""
