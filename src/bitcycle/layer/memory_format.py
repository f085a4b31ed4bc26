"""Memory formats of convolutions: channels last, where they are fastest, except where PyTorch's weight gradient is wrong.

On a CPU without AVX-512, the weight gradient of a 1x1 convolution with a stride, of an input with channels last and fewer than
eight channels, writes past the end of its workspace: a crash with one thread, wrong gradients with several (oneDNN, issue 6035;
PyTorch 2.13). That of a transposed convolution with fewer than eight output channels does, too. Networks with contiguous images
never get there; here, quantizers and `channels_last` reorder the images, so these layers get contiguous operands, on every CPU.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import make_contiguous_strides_for
from torch.nn.modules.conv import _ConvNd

_BLOCK = 8
"""Channels that the kernel processes together."""


def channels_last(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on a device, with the memory format in which convolutions are fastest."""
    move: Any = model.to
    moved: nn.Module = move(device, memory_format=torch.channels_last)
    for module in moved.modules():
        # a quantized layer guards its own product, whose operands are not those of the layer
        if isinstance(module, _ConvNd) and needs_contiguous(module) and not hasattr(module, "weight_quantizer"):
            module.weight.data = contiguous(module.weight.data)
            module.register_forward_pre_hook(_with_contiguous_input)
    return moved


def needs_contiguous(layer: object) -> bool:
    """Whether the weight gradient of a layer is wrong for operands with channels last."""
    if not isinstance(layer, _ConvNd) or math.prod(layer.kernel_size) > 1 or max(layer.stride) == 1:
        return False
    channels = layer.out_channels if layer.transposed else layer.in_channels
    return channels // layer.groups < _BLOCK


def operands_of(layer: object, *operands: Tensor) -> tuple[Tensor, ...]:
    """The operands of a convolution, contiguous if its weight gradient would be wrong otherwise."""
    on_cpu = all(operand.device.type == "cpu" for operand in operands)
    return tuple(map(contiguous, operands)) if on_cpu and needs_contiguous(layer) else operands


def contiguous(x: Tensor) -> Tensor:
    """x with the strides of a new tensor. `x.contiguous()` keeps those of channels last where a dimension has one element."""
    if x.stride() == tuple(make_contiguous_strides_for(x.shape)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _with_contiguous_input(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *others = inputs
    return *operands_of(layer, x), *others
