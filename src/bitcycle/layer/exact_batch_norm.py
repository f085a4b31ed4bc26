"""Batch norm of networks with compute=simulate as a C++ operator on a CPU (quantizer/batch_norm.h), with identical results.

It adds the same numbers in the same order as PyTorch, in half of the time; a ReLU in place becomes part of it in the backward
pass, and the quantizer that reads the gradient next knows its range.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitcycle.layer.batch_norm import count_batch
from bitcycle.quantizer.cpp_operators import cpp_operators

_CHANNELS = 16


class TrainedBatchNorm2d(nn.BatchNorm2d):
    """A torch.nn.BatchNorm2d that is an operator in training where there is one."""

    def forward(self, x: Tensor) -> Tensor:
        operator = self.operator(x) if self._has_statistics(x) else None
        if operator is None:
            return super().forward(x)
        return operator(x, self.weight, self.bias, self.running_mean, self.running_var, count_batch(self), self.eps)

    def _has_statistics(self, x: Tensor) -> bool:
        tensors = (self.weight, self.bias, self.running_mean, self.running_var)
        return (
            self.training
            and self.track_running_stats
            and all(each is not None and each.dtype == torch.float32 and each.is_contiguous() for each in tensors)
            and x.dim() == 4
            and x.numel() > x.shape[1]
            and x.is_contiguous(memory_format=torch.channels_last)
        )

    def operator(self, x: Tensor) -> Callable[..., Tensor] | None:
        """The operator for x, if there is one."""
        functions = exact_batch_norm(x)
        return None if functions is None else functions.trained_batch_norm


def exact_batch_norm(x: Tensor, *gradient: Tensor) -> Any | None:
    """The operators if they apply to x [N, C, H, W] and its gradient with PyTorch's results, else None."""
    fit = x.dim() == 4 and x.shape[1] % _CHANNELS == 0 and x.numel() > x.shape[1] * torch.get_num_threads()
    layout = torch.channels_last
    fit = fit and all(y.is_contiguous(memory_format=layout) and not y.is_contiguous() for y in (x, *gradient))
    functions = cpp_operators(x, fit)
    return functions if functions is not None and _is_exact() else None


@functools.cache
def _is_exact() -> bool:
    """Whether the operators exist on this CPU and round as the kernels of this PyTorch."""
    functions, generator = cpp_operators(torch.empty(0), True), torch.Generator().manual_seed(0)
    if functions is None or not hasattr(functions, "normalise_batch"):
        return False
    x, g = torch.randn(2, 4, 9, 7, 48, generator=generator).movedim(-1, 2)
    weight, bias, mean, variance = torch.rand(4, 48, generator=generator)
    running = (mean.clone(), variance.clone())
    with torch.no_grad():
        found = (*functions.normalise_batch(x, weight, bias, mean, variance, 0.3, 1e-5), mean, variance)
        expected = (*torch.native_batch_norm(x, weight, bias, *running, True, 0.3, 1e-5), *running)
        statistics = (x, weight, *expected[1:3])
        gradients = functions.differentiate_batch(g, *statistics, None, False)
        options = (None, None, *statistics[2:], True, 1e-5, [True] * 3)
        their_gradients = torch.ops.aten.native_batch_norm_backward(g, x, weight, *options)
    return all(map(torch.equal, (*found, *gradients), (*expected, *their_gradients)))
