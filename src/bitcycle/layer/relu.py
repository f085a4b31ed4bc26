"""ReLU of networks with compute=simulate as a C++ operator on a CPU (quantizer/relu.h), with identical results.

It notes the range of its output for the quantizer that reads it next, saves a mask of one byte per element for the backward pass,
as the next layer saves the quantized output instead, and masks the gradient in place if nobody else holds it.
"""

import torch
from torch import Tensor, nn

from bitcycle.layer.twin import replace_modules, twin_of
from bitcycle.quantizer.cpp_operators import cpp_operators


class NotingReLU(nn.ReLU):
    """A torch.nn.ReLU that is an operator in training where there is one."""

    def forward(self, x: Tensor) -> Tensor:
        trains = torch.is_grad_enabled() and x.requires_grad
        dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
        functions = cpp_operators(x, trains and dense)
        return super().forward(x) if functions is None else functions.mask_saving_relu(x, self.inplace)


def note_ranges(model: nn.Module) -> nn.Module:
    """The model with each torch.nn.ReLU as a NotingReLU."""
    return replace_modules(model, lambda module: twin_of(module, NotingReLU) if type(module) is nn.ReLU else module)
