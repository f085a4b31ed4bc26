"""Batch norm and ReLU that work with the convolutions of compute=codes (batch_norm.h).

In training on a CPU, the moments of its channels are those that the preceding convolution has summed, a ReLU in place becomes
part of it in the backward pass, and the range of its gradient is known to the convolution that quantizes it. Equal to
torch.nn.BatchNorm2d up to the rounding of float32 sums; otherwise it is one.

With `recompute`, it recomputes its input from integer codes instead of saving it. For a convolution followed by batch norm,
training saves the inputs of both for the backward pass. compute=codes reduces the first to a quarter of its size, so that most of
the memory is used by the second, which is determined by the codes. The backward pass recomputes the product, bit for bit. Not in
the authors' code.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from bitcycle.cpp.operators import apply_to
from bitcycle.layer.batch_norm import TrainedBatchNorm2d
from bitcycle.layer.codes.support import integer_products_work, library
from bitcycle.layer.relu import RecordingReLU
from bitcycle.quantizer.compile_utils import kernel
from bitcycle.quantizer.layout import flat, unflat


class CodeBatchNorm2d(TrainedBatchNorm2d):
    """A torch.nn.BatchNorm2d in a network that computes codes."""

    def operator(self, x: Tensor) -> Callable[..., Tensor] | None:
        functions = library()
        if functions is None:
            return super().operator(x)
        return functions.batch_norm if apply_to(x) else None


_Recipe = Callable[[], Tensor]


def remember(y: Tensor, recipe: _Recipe) -> Tensor:
    """y, annotated with the recipe by which batch norm can recompute it. Any shape, kept."""
    y.recipe = recipe  # type: ignore[attr-defined]
    return y


class RecomputingBatchNorm2d(CodeBatchNorm2d):
    """A batch norm that saves the recipe of its input instead of the input."""

    def forward(self, x: Tensor) -> Tensor:
        recipe: _Recipe | None = getattr(x, "recipe", None)
        if recipe is None:
            return super().forward(x)
        address, shape = x.data_ptr(), x.shape

        def pack(kept: Tensor) -> Any:
            return recipe if kept.data_ptr() == address and kept.shape == shape else kept

        def unpack(kept: Any) -> Tensor:
            return kept if isinstance(kept, Tensor) else kept()

        with saved_tensors_hooks(pack, unpack):
            return super().forward(x)


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


class MaskSavingReLU(RecordingReLU):
    """A torch.nn.ReLU that saves a mask of one byte per element for its backward pass, which `compile_kernel` fuses.

        y = max(x, 0),     dL/dx = m dL/dy,     m = 0 where y = 0, else 1

    torch.nn.ReLU saves y, at no extra cost if the next layer saves y as well. But if the next layer saves codes (compute=codes),
    the ReLU alone needs four bytes per element. Results are identical, except that an infinite dL/dy at m = 0 gives nan instead
    of 0.
    """

    compile_kernel = False

    def relu(self, x: Tensor) -> Tensor:
        saves = torch.is_grad_enabled() and x.requires_grad
        if not saves or (x.is_cpu and not integer_products_work()):  # no codes are saved there
            return super().relu(x)
        return _MaskSavingRelu.apply(x, self.inplace, self.compile_kernel)

    def operator(self, x: Tensor, added: Tensor | None) -> Callable[..., Tensor] | None:
        functions, found = library(), super().operator(x, added)
        return found if functions is None or found is None else functions.relu_after_norm
