"""Autograd helpers: straight-through and custom gradients of quantizers, and quantization of gradients."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

NO_BACKWARD_PASS = -1
"""PyTorch's id of the graph task outside of backward passes."""


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[..., Any], *arguments: Any) -> Any:
        outputs = function(x, *arguments)
        if isinstance(outputs, tuple):
            ctx.mark_non_differentiable(*outputs[1:])
        ctx.argument_count = len(arguments)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None, *([None] * ctx.argument_count)


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: Callable[..., Tensor], gradient: Callable[..., Any], *arguments: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, *arguments)  # x costs no extra memory: ReLU and the optimizer hold it anyway
        ctx.gradient = gradient
        return function(x, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *arguments = ctx.saved_tensors
        found = ctx.gradient(gradients[0], x, *arguments)
        of_x, *of_arguments = found if isinstance(found, tuple) else (found,)
        return of_x, None, None, *of_arguments, *([None] * (len(arguments) - len(of_arguments)))


class _BackwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        ctx.function, ctx.arguments = function, arguments
        return x.detach()  # shares memory but is not a view, which a subsequent in-place ReLU could not modify

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.function(gradients[0], *ctx.arguments), None, *([None] * len(ctx.arguments))


def straight_through(function: Callable[..., Any], x: Tensor, *arguments: Any) -> Any:
    """function(x, *arguments) with a straight-through (first) result: dL/dx = dL/dy, without a clipping mask. Any shapes;
    dL/dy has that of x."""
    return _StraightThrough.apply(x, function, *arguments)


def with_gradient(
    function: Callable[..., Tensor], gradient: Callable[..., Any], x: Tensor, *arguments: Tensor
) -> Tensor:
    """function(x, *arguments) with a custom gradient: dL/dx = gradient(dL/dy, x, *arguments), or a tuple of dL/dx and the
    gradients of the first arguments. Any shapes; gradients have those of their operands."""
    return _Replaced.apply(x, function, gradient, *arguments)


def gradient_inside(gradient: Tensor, x: Tensor, low: Tensor | float, high: Tensor | float, bits: Tensor) -> Tensor:
    """The gradient where low <= x <= high, else 0; at 0 bits the gradient. Gradient and x have the same shape, `bits` is a
    scalar."""
    return torch.where(((x >= low) & (x <= high)) | (bits == 0), gradient, 0)


def backward_only(function: Callable[..., Tensor], x: Tensor, *arguments: Any) -> Tensor:
    """x itself; in the backward pass its gradient is replaced by function(dL/dx, *arguments). Any shape, kept."""
    return _BackwardOnly.apply(x, function, *arguments)


def is_recomputation() -> bool:
    """Whether this forward pass is part of a backward pass, as with activation checkpointing, and must not change state."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != NO_BACKWARD_PASS


def is_computed_again() -> bool:
    """Whether reentrant activation checkpointing, whose forward pass has no gradients, will compute this code once more."""
    return not torch.compiler.is_compiling() and _runs_within(CheckpointFunction.forward)


def is_repeated() -> bool:
    """Whether this forward pass repeats one that had gradients, as in activation checkpointing that is not reentrant."""
    return is_recomputation() and not _runs_within(CheckpointFunction.backward)


def _runs_within(function: Any) -> bool:
    """Whether a function is among the callers of this code."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def is_differentiated_backward() -> bool:
    """Whether this is the backward pass of `create_graph`, in which a custom gradient must keep the graph of dL/dy."""
    return torch.is_grad_enabled() and is_recomputation()


def twice_differentiable(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """function(gradient, *arguments), straight-through if the backward pass is itself differentiated (create_graph). Any
    shape."""

    def differentiable(gradient: Tensor, *arguments: Any) -> Tensor:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _StraightThrough.apply(gradient, function, *arguments)
        return function(gradient, *arguments)

    return differentiable
