"""Products whose operands are quantized in blocks along the summed dimension, hence in two copies each.

    pass               sums over     copies with blocks along it
    y = x W            inputs        Q(x) along its features,    Q(W) along its inputs
    dL/dx = g W^T      outputs       Q(g) along its features,    Q'(W) along its outputs
    dL/dW = g^T x      samples       Q'(g) along its samples,    Q'(x) along its samples

With such blocks, the sum over a block is scaled once, as in hardware for MX formats. A convolution's features are the channels of
one pixel, its samples those of the batch at one pixel; a linear layer's samples are all its rows. Blocks do not cross groups; a
depthwise convolution, which does not sum over channels, has blocks along its channels in the first two passes. Both copies are
made from the float32 tensor at the bits of the forward pass, the second one on demand. The gradient of a bias is the sum of the
unquantized gradient.

Source: Rouhani et al. 2023, "Microscaling data formats for deep learning", section 4 and figure 2.

Products with two copies of the gradient only, a coarse one for the product with the weight and a finer one for that with the
input (gradient bifurcation):

    y = product(x, W) + bias:     dL/dx from Q(dL/dy; g),     dL/dW and dL/dbias from Q(dL/dy; g_fine)

Source: the SBM paper ("scalable methods for 8-bit training of neural networks", gradients bifurcation). Paper and code of CPT
and FracTrain use a single copy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.conv import _ConvNd

from bitcycle.randomness import int32_key

Copy = Callable[[Tensor], Tensor]
Gradients = tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]
SECOND_COPY = int32_key("second copy of a gradient") >> 1
"""Offset of the noise key of the second copy."""


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
            of_bias = gradient.movedim(copies.features, -1).reshape(-1, *ctx.bias_shape).sum(0)
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


def product_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, ...], layer: object
) -> Gradients:
    """The `needed` gradients of input, weight and bias of a convolution padded with zeros or else a linear layer, as autograd
    computes them."""
    if isinstance(layer, _ConvNd):
        sizes = [len(weight)] if needed[2] else None
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
    """product(x, weight, bias) with separate copies for each of the three passes."""
    return _BlockProduct.apply(x, weight, bias, product, copies)


def copies_of(product: Any, key: Tensor) -> Copies:
    """The copies of the operands of a quantized product at its current bits; `key` is the noise key of the gradient."""
    axes, groups = product.axes, getattr(product, "groups", 1)
    inputs, outputs = axes.inputs, axes.outputs
    if 1 < groups == product.in_channels:  # depthwise
        groups, inputs, outputs = 1, 0, 0
    state, gradients = product.precision, product.gradient_quantizer
    (weights, weight_bits), (activations, bits) = ((quantizer, now.clone()) for quantizer, now in product.operands())
    gradient_bits, key = state.gradient_bits.clone(), state.step_key ^ key

    def rows(x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1]) if axes.samples is None else x

    samples = axes.samples or 0
    return Copies(
        features=axes.features,
        forward_x=lambda x: activations.along(x, bits, axes.features, groups),
        forward_weight=lambda w: weights.along(w, weight_bits, inputs, groups if inputs == 0 else 1),
        error_gradient=lambda g: gradients.along(g, gradient_bits, axes.features, key, groups),
        error_weight=lambda w: weights.along(w, weight_bits, outputs, groups if outputs == 0 else 1),
        update_gradient=lambda g: gradients.along(rows(g), gradient_bits, samples, key + SECOND_COPY).view_as(g),
        update_x=lambda x: activations.along(rows(x), bits, samples).view_as(x),
    )


Product = Callable[[Tensor, Tensor, Optional[Tensor]], Tensor]
Rounding = Callable[[Tensor], Tensor]


class _Bifurcated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, coarse: Rounding, fine: Rounding
    ) -> Tensor:
        # A separate graph of the product, whose backward pass can run twice, once for each copy of the gradient.
        operands: list[Any] = [
            t if t is None else t.detach().requires_grad_(t.requires_grad) for t in (x, weight, bias)
        ]
        with torch.enable_grad():
            y = product(*operands)
        ctx.operands, ctx.y, ctx.coarse, ctx.fine = operands, y, coarse, fine
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found: list[Any] = [None] * 6
        for rounding, places in ((ctx.coarse, (0,)), (ctx.fine, (1, 2))):
            if wanted := [place for place in places if ctx.needs_input_grad[place]]:
                inputs = [ctx.operands[place] for place in wanted]
                gradients = torch.autograd.grad(ctx.y, inputs, rounding(gradient), retain_graph=True)
                for place, of_input in zip(wanted, gradients):
                    found[place] = of_input
        return tuple(found)


def bifurcated(
    product: Product, x: Tensor, weight: Tensor, bias: Tensor | None, coarse: Rounding, fine: Rounding
) -> Tensor:
    """product(x, weight, bias), whose output gradient is rounded by `coarse` for x and by `fine` for weight and bias."""
    return _Bifurcated.apply(x, weight, bias, product, coarse, fine)
