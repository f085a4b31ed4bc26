"""Batch normalisation over a batch that is sharded between processes, and as a C++ operator.

    n = sum_r n_r,   m = sum_r n_r m_r / n,   v = sum_r n_r (v_r + (m_r - m)^2) / n        over shards r, per channel
    y = g (x - m) / sqrt(v + e) + b
    dL/dx = g / sqrt(v + e) (dL/dy - mean(dL/dy) - (x - m) mean(dL/dy (x - m)) / (v + e))   means over the whole batch

On a GPU it is torch.nn.SyncBatchNorm, which computes the same and is only available there.

With compute=simulate, batch norm on a CPU is a C++ operator (cpp/batch_norm.h) with identical results: it adds the same
numbers in the same order as PyTorch, in half of the time. A ReLU in place becomes part of it in the backward pass, and the
quantizer that reads the gradient next knows its range.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bitcycle import distributed
from bitcycle.cpp.operators import cpp_operators
from bitcycle.layer.twin import replace_modules, twin_of


def count_batch(norm: _BatchNorm) -> float:
    """Count a batch; returns its share of the new running statistics."""
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    return 1 / float(norm.num_batches_tracked or 1) if norm.momentum is None else norm.momentum


class SharedBatchNorm(_BatchNorm):
    """Batch normalisation of [N, C, ...]; in training on a sharded batch, with the statistics of the whole batch."""

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"expected [N, C, ...], got {x.dim()} dimensions")

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or distributed.current_shard() is None:
            return super().forward(x)
        y, mean, variance, elements = _Normalise.apply(x, self.weight, self.bias, self.eps)
        if self.track_running_stats:
            assert self.running_mean is not None and self.running_var is not None
            share = count_batch(self)
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(variance * (elements / (elements - 1)), share)
        return y


class _Normalise(torch.autograd.Function):
    """y, and mean, biased variance and number of elements per channel of the whole batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        over = [dimension for dimension in range(x.dim()) if dimension != 1]
        variance, mean = torch.var_mean(x, over, correction=0)
        elements = torch.full_like(mean, x.numel() // x.shape[1])
        elements, mean, variance = distributed.all_gather(torch.stack([elements, mean, variance])).unbind(1)
        count = elements.sum(0)
        mean_of_all = (elements * mean).sum(0) / count
        variance = (elements * (variance + (mean - mean_of_all).square())).sum(0) / count
        inverse = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean_of_all, inverse, count)
        ctx.over = over
        ctx.mark_non_differentiable(mean_of_all, variance, count)
        scale = inverse if weight is None else inverse * weight
        shift = -mean_of_all * scale if bias is None else bias - mean_of_all * scale
        return x * _channels(scale, x) + _channels(shift, x), mean_of_all, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient, (x, weight, mean, inverse, count) = gradients[0], ctx.saved_tensors
        centred = x - _channels(mean, x)
        of_bias, of_scale = gradient.sum(ctx.over), (gradient * centred).sum(ctx.over)
        sums = distributed.all_sum(torch.stack([of_bias, of_scale])) / count
        of_x = gradient - _channels(sums[0], x) - centred * _channels(sums[1] * inverse.square(), x)
        of_x = of_x * _channels(inverse if weight is None else inverse * weight, x)
        if weight is None:
            return of_x, None, None, None
        return of_x, of_scale * inverse, of_bias, None


def _channels(values: Tensor, like: Tensor) -> Tensor:
    """Values [C] broadcast along dimension 1 of a tensor."""
    return values.view(-1, *[1] * (like.dim() - 2))


def share_batch_norm(model: nn.Module) -> nn.Module:
    """The model with batch norms over the whole batch, which share the original parameters and buffers."""
    if next(model.parameters()).is_cuda:  # PyTorch has its own for CUDA only
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return replace_modules(model, lambda m: twin_of(m, SharedBatchNorm) if isinstance(m, _BatchNorm) else m)


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
