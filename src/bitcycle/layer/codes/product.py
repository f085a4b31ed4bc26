"""compute=codes: the product of two quantized operands, computed exactly on their integer codes.

With x = s_x n + z_x and W_o = s_o m_o + z_o for each output channel o, and sums over the window of an output element:

    sum x W_o = s_x (s_o sum n m_o + z_o sum n) + z_x sum W_o + bias_o

Integer sums are exact in 32-bit integers on a CPU with the 8-bit instructions of oneDNN; without them a layer computes as in
compute=simulate, which takes less time. On a GPU they are exact up to float32 rounding: operands of up to 8 bits are exact in
TF32. Zero padding is x = 0, not n = 0: the three sums run over the elements inside the image, which must be handled
explicitly in the last one. Only one byte per element of the input is saved for the backward pass. There both gradients are
also sums of integers if layer and CPU support it (gradients.py); otherwise they are computed from decoded tensors as in
compute=simulate. So does, on a CPU, a layer that by its shape would take longer on codes.

Source: the identity is that of integer-only inference (Jacob et al. 2018, section 2.2), with ranges per output channel. Differs
from compute=simulate only in the rounding of float32 sums and, where the input's gradient is a sum of integers, in that of the
weight to 16 bits.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitcycle import distributed
from bitcycle.cpp.operators import cpp_operators
from bitcycle.device import tf32
from bitcycle.layer.codes.batch_norm import remember
from bitcycle.layer.codes.gradients import input_gradient, sums_input, sums_integers, weight_gradient
from bitcycle.layer.codes.support import convolve_8_bits, integer_products_work, library, no_zero_points
from bitcycle.layer.products.block_product import Gradients, product_gradients
from bitcycle.layer.products.convolution import QuantizedConv2d
from bitcycle.layer.products.quantized import QuantizedLayer, QuantizedLinear
from bitcycle.quantizer.codes import MOST_BITS, Codes, WeightCodes, decode
from bitcycle.quantizer.compile_utils import kernel
from bitcycle.quantizer.layout import flat, shaped
from bitcycle.quantizer.sbm import SbmActivation, SbmWeight
from bitcycle.quantizer.sbm_gradient import SbmGradient

MOST_TERMS = 2**31 // (255 * 128)
"""Maximum number of terms whose sum fits in a signed 32-bit integer for any codes."""

LARGEST_WEIGHT = 2
"""Largest weight, in elements per element of input and output, with which a C++ operator takes less time than floats."""
LEAST_INTENSITY = 256
"""Least number of multiplications per element of input, output and weight with which other products of codes do. Both measured
on one core of an Intel Xeon with AVX-512 VNNI; docs/speed.md."""

Geometry = tuple[list[int], list[int], list[int], int]
"""Stride, padding, dilation and groups of a convolution."""


class CodeProduct:
    """The computation of one quantized layer on integer codes: its product and the gradients.

    Attributes:
        layer: the quantized layer.
        compile: fuse the operations around the products into kernels.
        recomputes: whether batch norm may recompute the output (see batch_norm.py).
    """

    def __init__(self, layer: QuantizedLayer, compile: bool, recomputes: bool) -> None:
        self.layer, self.compile, self.recomputes = layer, compile, recomputes
        self.recipe: Callable[[], Tensor] | None = None
        """The recipe of the last output, until it is passed on."""
        self._pays: dict[torch.Size, bool] = {}

    def accepts(self, x: Tensor) -> bool:
        """Whether x and the weight have codes at the layer's current bits. Does not synchronise with the device."""
        state, weight = self.layer.precision, self.layer.weight
        return (
            1 <= state.precision.weight <= MOST_BITS
            and 1 <= state.precision.activation <= MOST_BITS
            and state.sample_mask is None
            and x.dtype == torch.float32
            and x.dim() > 1
            # autocast rounds the operands of simulated products, and their sums
            and not torch.is_autocast_enabled(x.device.type)
            and not torch.compiler.is_compiling()
            and not x.is_meta
            and weight[0].numel() <= MOST_TERMS
            and (not x.is_cpu or (integer_products_work() and self.pays(x)))
        )

    def pays(self, x: Tensor) -> bool:
        """Whether a training step on codes takes less time on this CPU than one on floats, by the shape of the layer's input x.

        The weight is encoded anew in each step: with one C++ operator (gradients.py), codes pay unless it is large for the number
        of samples. Otherwise they pay if there are many multiplications for each element that is encoded, decoded or corrected.
        """
        if (found := self._pays.get(x.shape)) is None:
            weight, outputs = self.layer.weight, self.output_elements(x)
            elements = x.numel() + outputs
            if sums_integers(self.layer, x):
                found = weight.numel() <= LARGEST_WEIGHT * elements
            else:
                found = outputs * weight[0].numel() >= LEAST_INTENSITY * (elements + weight.numel())
            self._pays[x.shape] = found
        return found

    def output_elements(self, x: Tensor) -> int:
        """Number of elements of the layer's output for an input x."""
        raise NotImplementedError

    def __call__(self, x: Tensor, bias: Tensor | None, key: Tensor) -> Tensor:
        """The layer's output: the product of quantized x and weight, with quantized gradients."""
        y = _CodeProduct.apply(x, self.layer.weight, bias, self, key)
        recipe, self.recipe = self.recipe, None
        return y if recipe is None or not y.requires_grad else remember(y, recipe)

    def product(self, codes: Codes, weight: WeightCodes, bias: Tensor | None) -> Tensor:
        """The layer's product of the codes of its input and weight."""
        raise NotImplementedError

    def decoded_weight(self, weight: WeightCodes) -> Tensor:
        """The quantized weight from its codes at the current bits."""
        return self.layer.weight_quantizer.decode_weight(weight, self.layer.precision.weight_bits)


class CodeConvolution(CodeProduct):
    """The computation of a `QuantizedConv2d` on codes."""

    layer: QuantizedConv2d

    def __call__(self, x: Tensor, bias: Tensor | None, key: Tensor) -> Tensor:
        if not self._has_operator(x):
            return super().__call__(x, bias, key)
        layer, state, functions = self.layer, self.layer.precision, library()
        assert functions is not None
        activation = cast("SbmActivation", layer.activation_quantizer)
        if activation.training:
            activation.record(state.activation_bits)
        ranges = activation.ranges() if activation.training else activation.range_of_codes(x)
        return functions.convolve_codes(
            *(x, layer.weight, bias, state.weight_bits, state.activation_bits, state.gradient_bits),
            *(state.step_key, key, *ranges),
            *(activation.momentum, activation.training, layer.gradient_quantizer.stochastic),
            *(layer.stride[0], layer.padding[0]),
        )

    def _has_operator(self, x: Tensor) -> bool:
        """Whether the C++ operator, a single autograd node, can compute the layer."""
        layer = self.layer
        kinds = (SbmActivation, SbmWeight, SbmGradient)
        return (
            not self.recomputes
            and 1 <= layer.precision.precision.gradient <= MOST_BITS
            and (type(layer.activation_quantizer), type(layer.weight_quantizer), type(layer.gradient_quantizer))
            == kinds
            and sums_integers(layer, x)
            and cpp_operators(x, self.compile) is not None
            and distributed.current_shard() is None
        )

    def output_elements(self, x: Tensor) -> int:
        layer, (stride, padding, dilation, _) = self.layer, _geometry(self.layer)
        sizes = zip(x.shape[-2:], layer.kernel_size, stride, padding, dilation)
        positions = math.prod(
            (size + 2 * edge - gap * (kernel - 1) - 1) // step + 1 for size, kernel, step, edge, gap in sizes
        )
        return layer.out_channels * positions * x.shape[:-3].numel()

    def product(self, codes: Codes, weight: WeightCodes, bias: Tensor | None) -> Tensor:
        """The convolution [N, C, H, W] -> [N, O, H', W'] of codes with the weight [O, C / groups, k, k] of a layer."""
        layer = self.layer
        y = convolve_integers(codes.integers, weight.integers, codes.scale * weight.scale, layer)
        rest = y.new_zeros(1, *y.shape[1:]) if bias is None else bias.view(-1, 1, 1).expand(1, *y.shape[1:])
        if _begins_above_zero(codes):
            inside = torch.ones(1, 1, *codes.integers.shape[2:], device=y.device)
            sums = self.decoded_weight(weight).sum(1, keepdim=True)
            rest = rest + codes.zero_point * F.conv2d(inside, sums, None, *_geometry(layer)[:3])
        rest = rest.contiguous(memory_format=torch.channels_last)
        images = (_by_group(image, layer.groups) for image in (y, _window_sums(codes.integers, self), rest))
        kernel(_add_offsets, self.compile)(*images, (codes.scale * weight.zero_point).view(layer.groups, -1))
        return y


class CodeLinear(CodeProduct):
    """The computation of a `QuantizedLinear` on codes."""

    def output_elements(self, x: Tensor) -> int:
        return x.shape[:-1].numel() * len(self.layer.weight)

    def product(self, codes: Codes, weight: WeightCodes, bias: Tensor | None) -> Tensor:
        """The product [..., F] -> [..., O] of codes with the transposed weight [O, F] of a layer."""
        rows = codes.integers.flatten(0, -2)
        y = multiply_integers(rows, weight.integers, codes.scale * weight.scale)
        window = kernel(_row_sums, self.compile)(rows)
        rest = y.new_zeros(y.shape[1]) if bias is None else bias
        if _begins_above_zero(codes):
            rest = rest + codes.zero_point * self.decoded_weight(weight).sum(1)
        images = (y[:, None, None], window[:, None, None, None], rest[None, None, None])
        kernel(_add_offsets, self.compile)(*images, (codes.scale * weight.zero_point)[None])
        return y.view(*codes.integers.shape[:-1], -1)


def code_product(layer: QuantizedLayer, compile: bool = False, recomputes: bool = False) -> CodeProduct | None:
    """The computation of a layer on codes; None if the layer or its quantizers do not support it."""
    quantizers = (layer.weight_quantizer, layer.activation_quantizer)
    if layer.input_gradient_quantizer is not None or not all(each.has_codes for each in quantizers):
        return None
    if type(layer) is QuantizedLinear:
        return CodeLinear(layer, compile, recomputes)
    if type(layer) is QuantizedConv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        return CodeConvolution(layer, compile, recomputes)
    return None


class _CodeProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: CodeProduct, key: Tensor) -> Tensor:
        layer, state = product.layer, product.layer.precision
        codes = layer.activation_quantizer.encode(x, state.activation_bits)
        weight_codes = layer.weight_quantizer.encode_weight(weight, state.weight_bits)
        ctx.save_for_backward(*codes, *weight_codes)
        ctx.product, ctx.noise = product, (state.gradient_bits, state.step_key, key)
        ctx.gradient_number = state.precision.gradient
        compute = functools.partial(product.product, codes, weight_codes, bias)
        product.recipe = compute if product.recomputes else None
        return compute()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        codes, weight_codes = Codes(*ctx.saved_tensors[:3]), WeightCodes(*ctx.saved_tensors[3:])
        weight = ctx.product.decoded_weight(weight_codes)
        backward = _backward_of_integers if _sums_integers(ctx, codes.integers) else _backward_of_decoded
        return *backward(ctx.product, codes, weight, gradient, ctx.noise, ctx.needs_input_grad[:3]), None, None


def _sums_integers(ctx: Any, integers: Tensor) -> bool:
    layer = ctx.product.layer
    has_codes = 1 <= ctx.gradient_number <= MOST_BITS and layer.gradient_quantizer.has_codes
    return bool(has_codes and sums_integers(layer, integers))


def _backward_of_decoded(
    product: CodeProduct, codes: Codes, weight: Tensor, gradient: Tensor, noise: Any, needed: tuple[bool, ...]
) -> Gradients:
    gradient = product.layer.gradient_quantizer.quantize(gradient, *noise)
    decoder = kernel(decode, product.compile)
    x = shaped(decoder(flat(codes.integers), codes.scale, codes.zero_point), like=codes.integers)
    return product_gradients(gradient, x, weight, needed, product.layer)


def _backward_of_integers(
    product: CodeProduct, codes: Codes, weight: Tensor, gradient: Tensor, noise: Any, needed: tuple[bool, ...]
) -> Gradients:
    layer = cast("QuantizedConv2d", product.layer)
    gradient, gradient_codes = layer.gradient_quantizer.encode(gradient, *noise)
    of_weight = weight_gradient(codes, gradient_codes, layer) if needed[1] else None
    of_x = input_gradient(gradient_codes, weight, layer) if needed[0] and sums_input(layer) else None
    rest = (needed[0] and of_x is None, False, needed[2])
    if not any(rest):
        return of_x, of_weight, None
    x = torch.empty_like(codes.integers, dtype=gradient.dtype)  # only its shape is used
    found, _, of_bias = product_gradients(gradient, x, weight, rest, layer)
    return found if of_x is None else of_x, of_weight, of_bias


def _begins_above_zero(codes: Codes) -> bool:
    """Whether the codes have a nonzero offset; assumed on a GPU to avoid synchronisation, as an offset of 0 is also correct."""
    return codes.zero_point.device.type != "cpu" or bool(codes.zero_point != 0)


def _add_offsets(y: Tensor, window: Tensor, rest: Tensor, offsets: Tensor) -> Tensor:
    """Add offsets to the scaled integer sums y [N, positions, groups, O / groups] in place; the others broadcast to it."""
    return y.add_(offsets * window + rest)


def _geometry(layer: QuantizedConv2d) -> Geometry:
    assert not isinstance(layer.padding, str), "such layers do not compute codes"
    return list(layer.stride), list(layer.padding), list(layer.dilation), layer.groups


def _by_group(image: Tensor, groups: int) -> Tensor:
    """[N, G, H, W], channels-last, as a view [N, H W, groups, G / groups]."""
    return image.movedim(1, -1).reshape(len(image), -1, groups, image.shape[1] // groups)


def _window_sums(integers: Tensor, product: CodeConvolution) -> Tensor:
    """The sums of the codes in each window, [N, groups, H', W']."""
    layer = product.layer
    if layer.groups > 1:
        ones = torch.ones(layer.groups, *layer.weight.shape[1:], dtype=torch.int8, device=integers.device)
        return convolve_integers(integers, ones, torch.ones(layer.groups, device=integers.device), layer)
    pixels = integers.movedim(1, -1)
    sums = kernel(_row_sums, product.compile)(pixels.reshape(-1, pixels.shape[-1])).view(pixels.shape[:-1])
    stride, (high, wide), dilation, _ = _geometry(layer)
    sums = F.pad(sums, (wide, wide, high, high))
    for dimension in (1, 2):  # separable: sum over rows, then over columns
        size, step, gap = (numbers[dimension - 1] for numbers in (layer.kernel_size, stride, dilation))
        last = sums.shape[dimension] - gap * (size - 1)
        terms = [sums.narrow(dimension, gap * i, last) for i in range(size)]
        every = (slice(None),) * dimension + (slice(None, None, step),)
        sums = functools.reduce(torch.add, (term[every] for term in terms))
    return sums[:, None]


def _row_sums(rows: Tensor) -> Tensor:
    """The sums of the rows of uint8 [N, F]; exact, as rows whose weighted sums fit in 32 bits have sums exact in float32."""
    return rows.to(torch.float32).sum(1)


def convolve_integers(integers: Tensor, weight: Tensor, scales: Tensor, layer: QuantizedConv2d) -> Tensor:
    """The convolution of uint8 [N, C, H, W] with int8 weights times scales [O], float32 and channels-last."""
    if integers.device.type == "cpu" and integer_products_work():
        integers = integers.contiguous(memory_format=torch.channels_last)
        return convolve_8_bits(integers, weight, scales, _geometry(layer))
    x, floats = integers.to(torch.float32), weight.to(torch.float32)
    with tf32():
        y = F.conv2d(x, floats, None, *_geometry(layer))
    return (y * scales.view(-1, 1, 1)).contiguous(memory_format=torch.channels_last)


def multiply_integers(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The product of uint8 [N, F] with int8 [O, F] transposed times scales [O], in float32."""
    if rows.device.type == "cpu" and integer_products_work():
        packed, zeros = torch.ops.onednn.qlinear_prepack(weight, list(rows.shape)), no_zero_points(weight)
        return torch.ops.onednn.qlinear_pointwise(
            *(rows, 1.0, 0, packed, scales, zeros, None), *(1.0, 0, torch.float32, "none", [], "")
        )
    with tf32():
        return F.linear(rows.to(torch.float32), weight.to(torch.float32)) * scales
