"""Products whose operands are quantized in blocks along the summed dimension, hence in two copies each.

    pass               sums over     copies with blocks along it
    y = x W            inputs        Q(x) along its features,    Q(W) along its inputs
    dL/dx = g W^T      outputs       Q(g) along its features,    Q'(W) along its outputs
    dL/dW = g^T x      samples       Q'(g) along its samples,    Q'(x) along its samples

With such blocks, the sum over a block is scaled once, as in hardware for MX formats. A convolution's features are the channels of
one pixel, its samples those of the batch at one pixel; a linear layer's samples are all its rows. Blocks do not cross groups, nor
the samples of different experts; a depthwise convolution, which does not sum over channels, has blocks along its channels in the
first two passes. Both copies are made from the float32 tensor at the bits of the forward pass, the second one on demand. The
gradient of a bias is the sum of the unquantized gradient.

The options of a recipe change the copies of the backward pass: both operands of a product are rotated by a random Hadamard
transform along what it sums over (`hadamard`), weights keep the values of the forward pass (`square_weights`), operands are
rounded stochastically (`stochastic_operands`) or have the bits of the gradient (`backward_bits`).

Source: Rouhani et al. 2023, "Microscaling data formats for deep learning", section 4 and figure 2; of the recipes, NVIDIA 2025,
"Pretraining large language models with NVFP4", section 4 and figure 5, and Tseng et al. 2025, "Training LLMs with MXFP4",
section 3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.conv import _ConvNd

from bitcycle.layer.memory_format import operands_of
from bitcycle.quantizer.block import BACKWARD_PRODUCTS, BlockOptions
from bitcycle.quantizer.hadamard import Rotation
from bitcycle.randomness import int32_key

ProductFunction = Callable[[Tensor, Tensor, Optional[Tensor]], Tensor]
Copy = Callable[[Tensor], Tensor]
Gradients = tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]
SECOND_COPY = int32_key("second copy of a gradient") >> 1
"""Offset of the noise key of the second copy."""
OPERAND_COPIES = tuple(int32_key(f"{operand} of a backward product") >> 1 for operand in ("weight", "activation"))
"""Offsets of the noise keys of weights and activations that are rounded stochastically."""
SIGNS = {name: int32_key("hadamard", name) for name in ("all", *BACKWARD_PRODUCTS)}
"""Keys of the random signs of Hadamard transforms: one for all products, or one for each."""


class Axes(NamedTuple):
    """The dimensions of a product's operands that are summed over.

    features: of x and y; inputs, outputs: of the weight; samples: of x and y, None for all of their rows.
    """

    features: int
    inputs: int
    outputs: int
    samples: int | None = None


LINEAR = Axes(-1, 1, 0)
CONVOLUTION = Axes(1, 1, 0, samples=0)
MATRIX = Axes(-1, -2, -1, samples=-2)


@dataclass
class Copies:
    """Functions that make the copies of the operands of one product: `forward_x` makes that of x for the forward pass.

    error_gradient and error_weight are those of dL/dx, update_gradient and update_x those of dL/dW. `features` is the
    dimension of y that a bias is added along.
    """

    features: int
    forward_x: Copy
    forward_weight: Copy
    error_gradient: Copy
    error_weight: Copy
    update_gradient: Copy
    update_x: Copy


class _BlockProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Callable[..., Tensor], copies: Copies
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.copies = product, copies
        ctx.bias_shape = None if bias is None else bias.shape
        operands = copies.forward_x(x), copies.forward_weight(weight)
        with torch.set_grad_enabled(any(ctx.needs_input_grad)):  # lets a trace see which operands need gradients
            for operand, original in zip(operands, (x, weight)):
                if torch.is_grad_enabled():
                    operand.requires_grad_(original.requires_grad)
            return product(*operands, bias).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x, weight), copies, product = ctx.saved_tensors, ctx.copies, ctx.product
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            quantized = copies.error_gradient(gradient)
            of_x = _gradients(product, quantized, x, copies.error_weight(weight), 0)
        if ctx.needs_input_grad[1]:
            quantized = copies.update_gradient(gradient)
            of_weight = _gradients(product, quantized, copies.update_x(x), weight, 1)
        if ctx.needs_input_grad[2]:
            of_bias = _bias_gradient(product, gradient, x, weight, ctx.bias_shape, copies.features)
        return of_x, of_weight, of_bias, None, None


def _gradients(
    product: Callable[..., Tensor], gradient: Tensor, x: Tensor, weight: Tensor, which: int
) -> Tensor | None:
    """The gradient of x (which=0) or of the weight (1) for any product(x, weight)."""
    layer = getattr(product, "__self__", None)
    x, weight = x.to(gradient.dtype), weight.to(gradient.dtype)  # under autocast as in the forward pass
    is_convolution = isinstance(layer, _ConvNd) and layer.padding_mode == "zeros" and isinstance(layer.padding, tuple)
    if product is F.linear or is_convolution:
        return product_gradients(gradient, x, weight, (which == 0, which == 1, False), layer)[which]
    operands = [operand.detach().requires_grad_(place == which) for place, operand in enumerate((x, weight))]
    with torch.enable_grad():  # recompute the product, which is arbitrary
        y = product(*operands, None)
    return torch.autograd.grad(y, operands[which], gradient)[0]


def _bias_gradient(
    product: Callable[..., Tensor], gradient: Tensor, x: Tensor, weight: Tensor, shape: torch.Size, features: int
) -> Tensor:
    """The gradient of a bias of this shape: the sum over all rows, or for each row of a bias over those that it is added to."""
    if len(shape) == 1:
        return gradient.movedim(features, -1).reshape(-1, *shape).sum(0)
    bias = gradient.new_zeros(shape, requires_grad=True)
    with torch.enable_grad():
        y = product(x.detach().to(gradient.dtype), weight.detach().to(gradient.dtype), bias)
    return torch.autograd.grad(y, bias, gradient)[0]


def product_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, ...], layer: object
) -> Gradients:
    """The `needed` gradients of input, weight and bias of a convolution padded with zeros or else a linear layer, as autograd
    computes them. Each has the shape of its operand."""
    if isinstance(layer, _ConvNd):
        sizes = [len(weight)] if needed[2] else None
        gradient, x, weight = operands_of(layer, gradient, x, weight)
        shape = (layer.stride, layer.padding, layer.dilation, layer.transposed, layer.output_padding, layer.groups)
        return torch.ops.aten.convolution_backward(gradient, x, weight, sizes, *shape, list(needed))
    rows = gradient.reshape(-1, gradient.shape[-1])
    return (
        gradient @ weight if needed[0] else None,
        rows.T @ x.reshape(-1, x.shape[-1]) if needed[1] else None,
        rows.sum(0) if needed[2] else None,
    )


def block_product(
    product: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, copies: Copies
) -> Tensor:
    """product(x, weight, bias) with separate copies for each of the three passes. Shapes are those of the product."""
    return _BlockProduct.apply(x, weight, bias, product, copies)


def copies_of(product: Any, key: Tensor, parts: Sequence[int] | None = None) -> Copies:
    """The copies of the operands of a quantized product at its current bits; `key` is the noise key of the gradient. The key
    is a scalar. `parts`: the numbers of rows that are summed over separately, one after the other; None: all together."""
    options, axes, groups = product.quantizer_options, product.axes, getattr(product, "groups", 1)
    inputs, outputs, is_depthwise = axes.inputs, axes.outputs, 1 < groups == getattr(product, "in_channels", 0)
    if is_depthwise:
        groups, inputs, outputs = 1, 0, 0
    state, gradients = product.precision, product.gradient_quantizer
    (weights, weight_bits), (activations, bits) = ((quantizer, now.clone()) for quantizer, now in product.operands())
    gradient_bits, key = state.gradient_bits.clone(), state.step_key ^ key
    back = (gradient_bits, gradient_bits) if options.backward_bits == "gradient" else (weight_bits, bits)
    weight_key, x_key = (key + offset if options.stochastic_operands else None for offset in OPERAND_COPIES)
    error_rotation, update_rotation = (_rotation(options, name, key) for name in BACKWARD_PRODUCTS)
    if is_depthwise:  # its dgrad sums over no channels
        error_rotation = None

    def rows(x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1]) if axes.samples is None else x

    def by_part(x: Tensor, quantize: Callable[[Tensor, int], Tensor]) -> Tensor:
        if parts is None or not any(parts):
            return quantize(rows(x), 0).view_as(x)
        pieces = enumerate(rows(x).split(list(parts)))
        return torch.cat([quantize(piece, place) for place, piece in pieces if len(piece)]).view_as(x)

    def update_gradient(g: Tensor, place: int) -> Tensor:
        return gradients.along(g, gradient_bits, samples, key + SECOND_COPY + place, rotation=update_rotation)

    def update_x(x: Tensor, place: int) -> Tensor:
        own = None if x_key is None else x_key + place
        return activations.along(x, back[1], samples, key=own, rotation=update_rotation)

    def weight(
        w: Tensor, dim: int, bits: Tensor, key: Tensor | None = None, rotation: Rotation | None = None
    ) -> Tensor:
        if options.square_weights and {inputs, outputs} == {0, 1}:
            return weights.in_squares(w, bits, (0, 1), groups)
        return weights.along(w, bits, dim, groups if dim == 0 else 1, key, rotation)

    samples = axes.samples or 0
    return Copies(
        features=axes.features,
        forward_x=lambda x: activations.along(x, bits, axes.features, groups),
        forward_weight=lambda w: weight(w, inputs, weight_bits),
        error_gradient=lambda g: gradients.along(g, gradient_bits, axes.features, key, groups, error_rotation),
        error_weight=lambda w: weight(w, outputs, back[0], weight_key, error_rotation),
        update_gradient=lambda g: by_part(g, update_gradient),
        update_x=lambda x: by_part(x, update_x),
    )


def _rotation(options: BlockOptions, product: str, key: Tensor) -> Rotation | None:
    """The rotation of both operands of one product of the backward pass; None if not requested."""
    if product not in options.hadamard:
        return None
    fixed = options.hadamard_signs == "fixed"
    return Rotation(options.hadamard_size, key.new_full((), SIGNS["all"]) if fixed else SIGNS[product] ^ key)
