"""The product of two activations, as in attention, as a quantizable layer.

    y = Q_operand(a; b_a) Q_operand(b; b_a),     dL/dy := Q_gradient(dL/dy; g) in the backward pass

Both operands, and the cost, have the bits of activations. With SBM each row of a and of b (last dimension) has its own range, in
training as in evaluation, and the gradient [N, heads, T, F] has one range per head and position.
Source: released code of Better Schedules, cpt_xnli. Differs from it only in the noise of the gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bitcycle.layer.compilation import has_numbers, not_compiled
from bitcycle.layer.products.block_product import MATRIX, block_product, copies_of
from bitcycle.layer.products.quantized_product import Context, QuantizedProduct
from bitcycle.module.layers import MatrixProduct
from bitcycle.quantizer import TensorQuantizer, encode_bits


class QuantizedMatrixProduct(QuantizedProduct, MatrixProduct):
    """A quantized `MatrixProduct` of operands that are always treated as signed; dimension 0 is the sample dimension."""

    axes = MATRIX

    def attach(self, context: Context) -> None:
        super().attach(context)
        self.left_quantizer, self.right_quantizer = (context.options.matmul_operand(context.compile) for _ in range(2))
        self.look_again()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.masked(_multiply, lambda product: self._product(a, b, product))

    def operands(self) -> tuple[tuple[TensorQuantizer, Tensor], ...]:
        bits = self.precision.activation_bits
        return (self.right_quantizer, bits), (self.left_quantizer, bits)

    def _product(self, a: Tensor, b: Tensor, product: Callable[..., Tensor]) -> Tensor:
        if not (a.numel() and b.numel()):
            return product(a, b)
        key = self.call_key()
        if self.left_quantizer.has_blocks:
            return block_product(lambda left, right, _bias: product(left, right), a, b, None, copies_of(self, key))
        if not self.adapted:
            self.adapt(a, b)
        bits = self.precision.activation_bits
        left, right = self.left_quantizer(a, bits), self.right_quantizer(b, bits)
        return self.quantize_gradient_of(product(left, right), key)

    @not_compiled
    def adapt(self, a: Tensor, b: Tensor) -> None:
        """Let the quantizers adapt to changed bits or mode."""
        if has_numbers(a):
            bits = encode_bits(self.precision.precision.activation)
            operands = ((self.left_quantizer, a), (self.right_quantizer, b))
            self.adapted = all(quantizer.learns_from(x, bits) for quantizer, x in operands)
            if self.adapted:
                for quantizer, x in operands:
                    quantizer.prepare(x.detach(), bits)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """torch.matmul under a name that is not redirected (`by_matmul`)."""
    y: Tensor = torch.ops.aten.matmul(a, b)
    return y
