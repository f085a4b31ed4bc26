"""Quantized convolutions and transposed convolutions in one to three dimensions, with any number of groups; embeddings.

A transposed convolution's weight [in, out / groups, ...] is also quantized with one range per output channel.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

from bitcycle import distributed
from bitcycle.layer.compilation import has_numbers, refuse_tracing
from bitcycle.layer.memory_format import operands_of
from bitcycle.layer.products.block_product import CONVOLUTION, Axes, ProductFunction
from bitcycle.layer.products.quantized import CONVERSIONS, QuantizedLayer
from bitcycle.module.layers import QuantizableEmbedding


def _laid_out(y: Tensor, x: Tensor, layer: QuantizedLayer) -> Tensor:
    """The layer's output y in the memory format of PyTorch's layer, as quantized operands have channels last, and networks take
    views; with compute=codes, whose operators read each other's outputs, it remains channels last."""
    contiguous = all(suggest_memory_format(operand) == torch.contiguous_format for operand in (x, layer.weight))
    return y.contiguous() if contiguous and layer.computation is None else y


def _is_unbatched(x: Tensor, layer: Any) -> bool:
    """Whether x is one sample without a batch dimension, as PyTorch's layers accept. Raises SettingError under tracers, whose x
    has no number of dimensions."""
    refuse_tracing()
    return x.dim() == len(layer.kernel_size) + 1


class QuantizedConvolution(QuantizedLayer):
    """Mixin that quantizes convolutions in any number of dimensions; shapes as in PyTorch."""

    has_positions = False
    axes = CONVOLUTION
    kernel_size: tuple[int, ...]

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolve: Any = super()._conv_forward  # type: ignore[misc]
        return convolve(*operands_of(self, x, weight), bias)

    def forward(self, input: Tensor) -> Tensor:
        return self.computed_by(self._conv_forward, input)

    def computed_by(self, convolve: ProductFunction, input: Tensor, *bias: Tensor | None) -> Tensor:
        """The output for an input by `convolve`; `bias`: in place of the layer's own."""
        if _is_unbatched(input, self):
            return self.computed_by(convolve, input.unsqueeze(0), *bias).squeeze(0)
        return _laid_out(self.quantized_product(input, convolve, *bias), input, self)


class QuantizedConv1d(QuantizedConvolution, nn.Conv1d):
    """A quantized torch.nn.Conv1d: [N, C, L] -> [N, C', L']."""


class QuantizedConv2d(QuantizedConvolution, nn.Conv2d):
    """A quantized torch.nn.Conv2d, grouped and depthwise included: [N, C, H, W] -> [N, C', H', W']."""


class QuantizedConv3d(QuantizedConvolution, nn.Conv3d):
    """A quantized torch.nn.Conv3d: [N, C, D, H, W] -> [N, C', D', H', W']."""


class QuantizedTransposedConvolution(QuantizedLayer):
    """Mixin that quantizes transposed convolutions in any number of dimensions; shapes as in PyTorch."""

    has_positions = False
    axes = Axes(1, 0, 1, samples=0)
    kernel_size: tuple[int, ...]
    _output_padding: Any

    def rows_of(self, weight: Tensor) -> Tensor:
        """[in, out / groups, ...] <-> [out, in / groups, ...]."""
        return weight.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(0, 1)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        dimensions = len(self.kernel_size)
        if _is_unbatched(input, self):
            return self.forward(input.unsqueeze(0), output_size).squeeze(0)
        padding = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, dimensions, self.dilation
        )
        geometry = (self.stride, self.padding, padding, self.groups, self.dilation)
        convolve: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dimensions - 1]

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return convolve(*operands_of(self, x, weight), bias, *geometry)

        y = self.quantized_product(input, product)
        return _laid_out(y, input, self)


class QuantizedConvTranspose1d(QuantizedTransposedConvolution, nn.ConvTranspose1d):
    """A quantized torch.nn.ConvTranspose1d: [N, C, L] -> [N, C', L']."""


class QuantizedConvTranspose2d(QuantizedTransposedConvolution, nn.ConvTranspose2d):
    """A quantized torch.nn.ConvTranspose2d: [N, C, H, W] -> [N, C', H', W']."""


class QuantizedConvTranspose3d(QuantizedTransposedConvolution, nn.ConvTranspose3d):
    """A quantized torch.nn.ConvTranspose3d: [N, C, D, H, W] -> [N, C', D', H', W']."""


class QuantizedEmbedding(QuantizedLayer, QuantizableEmbedding):
    """The quantized counterpart of `QuantizableEmbedding`. Shapes as of torch.nn.Embedding: [...] -> [..., E]."""

    bias = None

    def forward(self, input: Tensor) -> Tensor:
        if self.max_norm is not None and has_numbers(input):
            torch.embedding_renorm_(self.weight.detach(), input.contiguous(), self.max_norm, self.norm_type)
        if not self.adapted:
            with distributed.sharded(0):  # all processes have the whole table
                self.adapt(self.weight)
        self.call_key()  # counts the call
        return F.embedding(
            input,
            self.quantized_weight(),
            self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
        )


CONVERSIONS |= {
    nn.Conv1d: QuantizedConv1d,
    nn.Conv2d: QuantizedConv2d,
    nn.Conv3d: QuantizedConv3d,
    nn.ConvTranspose1d: QuantizedConvTranspose1d,
    nn.ConvTranspose2d: QuantizedConvTranspose2d,
    nn.ConvTranspose3d: QuantizedConvTranspose3d,
    QuantizableEmbedding: QuantizedEmbedding,
}
