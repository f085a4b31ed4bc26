"""ReLU as a C++ operator on a CPU (cpp/relu.h), with identical results.

It records the range of its output for the quantizer that reads it next, saves a mask of one byte per element for the backward
pass, as the next layer saves the quantized output instead, and masks the gradient in place if its reference count is one.
Residual blocks call `add_relu`, which is then one operator instead of two.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bitcycle.cpp.operators import apply_to, cpp_operators
from bitcycle.layer.batch_norm import TrainedBatchNorm2d
from bitcycle.layer.twin import replace_kinds


class RecordingReLU(nn.ReLU):
    """A torch.nn.ReLU of x, or of the sum x + added, that is an operator in training where there is one."""

    takes_added = True
    compile_kernel = True

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        relu = self.operator(x, added)
        return self.relu(x if added is None else x + added) if relu is None else relu(x, added, self.inplace)

    def relu(self, x: Tensor) -> Tensor:
        """The ReLU without an operator."""
        return super().forward(x)

    def operator(self, x: Tensor, added: Tensor | None) -> Callable[..., Tensor] | None:
        """The operator for these tensors, if there is one."""
        dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
        fit = added is None or (x.shape == added.shape and x.stride() == added.stride())
        trains = self.training or (torch.is_grad_enabled() and x.requires_grad)
        functions = cpp_operators(x, self.compile_kernel and dense and fit and trains)
        if functions is None or not (added is None or apply_to(added)):
            return None
        operator: Callable[..., Tensor] = functions.mask_saving_relu
        return operator


def use_operators(model: nn.Module) -> nn.Module:
    """The model with operators for each torch.nn.ReLU and torch.nn.BatchNorm2d."""
    return replace_kinds(model, {nn.ReLU: RecordingReLU, nn.BatchNorm2d: TrainedBatchNorm2d})
