"""Gradients through rounding: straight through in the forward direction, quantized in the backward direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
        ctx: Any, x: Tensor, function: Callable[..., Tensor], gradient: Callable[..., Tensor], *arguments: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, *arguments)  # x costs no memory: ReLU and the optimizer hold it anyway
        ctx.gradient = gradient
        return function(x, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *arguments = ctx.saved_tensors
        return ctx.gradient(gradients[0], x, *arguments), None, None, *([None] * len(arguments))


class _BackwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        ctx.function, ctx.arguments = function, arguments
        return x.detach()  # the same memory, yet no view, which an in-place ReLU behind the layer could not change

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.function(gradients[0], *ctx.arguments), None, *([None] * len(ctx.arguments))


def straight_through(function: Callable[..., Any], x: Tensor, *arguments: Any) -> Any:
    """function(x, *arguments), whose (first) result has the gradient of x: dL/dx = dL/dy, without a clipping mask."""
    return _StraightThrough.apply(x, function, *arguments)


def with_gradient(
    function: Callable[..., Tensor], gradient: Callable[..., Tensor], x: Tensor, *arguments: Tensor
) -> Tensor:
    """function(x, *arguments), whose gradient is what we say: dL/dx = gradient(dL/dy, x, *arguments)."""
    return _Replaced.apply(x, function, gradient, *arguments)


def backward_only(function: Callable[..., Tensor], x: Tensor, *arguments: Any) -> Tensor:
    """x itself; its gradient is replaced by function(dL/dx, *arguments) on the way back."""
    return _BackwardOnly.apply(x, function, *arguments)
