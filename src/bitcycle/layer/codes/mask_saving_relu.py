"""A ReLU that saves a mask of one byte per element for its backward pass.

    y = max(x, 0),     dL/dx = m dL/dy,     m = 0 where y = 0, else 1

torch.nn.ReLU saves y, at no extra cost if the next layer saves y as well. But if the next layer saves codes (compute=codes), the
ReLU alone needs four bytes per element. Results are identical, except that an infinite dL/dy at m = 0 gives nan instead of 0.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitcycle.layer.codes.gradients import library
from bitcycle.layer.relu import NotingReLU
from bitcycle.quantizer.compile_utils import kernel
from bitcycle.quantizer.layout import flat, unflat


class _MaskSavingRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool, compile: bool) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
        y = x.relu_() if inplace else x.relu()
        ctx.save_for_backward(y.to(torch.bool))
        ctx.compile = compile
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (passed,) = ctx.saved_tensors
        masked = kernel(_masked, ctx.compile)(flat(gradient), flat(passed.view(torch.uint8)))
        return unflat(masked, like=gradient), None, None


def _masked(gradient: Tensor, passed: Tensor) -> Tensor:
    return gradient * passed  # in eager mode five times faster than masked_fill or where


class MaskSavingReLU(NotingReLU):
    """A torch.nn.ReLU that saves a mask instead of its output; `compile_kernel` fuses its backward pass into one kernel."""

    compile_kernel = False

    def relu(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return super().relu(x)
        return _MaskSavingRelu.apply(x, self.inplace, self.compile_kernel)

    def operator(self, x: Tensor, added: Tensor | None) -> Callable[..., Tensor] | None:
        functions = library()
        return functions.relu_after_norm if functions is not None and super().operator(x, added) is not None else None
