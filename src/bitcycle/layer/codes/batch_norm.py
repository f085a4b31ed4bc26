"""Batch norm that works with the convolutions and ReLUs of compute=codes (batch_norm.h).

In training on a CPU, the moments of its channels are those that the preceding convolution has summed, a ReLU in place becomes
part of it in the backward pass, and the range of its gradient is known to the convolution that quantizes it. Equal to
torch.nn.BatchNorm2d up to the rounding of float32 sums; otherwise it is one.
"""

import torch
from torch import Tensor, nn

from bitcycle.layer.codes.weight_gradient import library
from bitcycle.quantizer.cpp_operators import apply_to


class CodeBatchNorm2d(nn.BatchNorm2d):
    """A torch.nn.BatchNorm2d in a network that computes codes."""

    def forward(self, x: Tensor) -> Tensor:
        if not self._has_operator(x):
            return super().forward(x)
        functions, running = library(), (self.running_mean, self.running_var)
        assert functions is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        return functions.batch_norm(x, self.weight, self.bias, *running, momentum, self.eps)

    def _has_operator(self, x: Tensor) -> bool:
        tensors = (self.weight, self.bias, self.running_mean, self.running_var)
        return (
            self.training
            and self.track_running_stats
            and all(each is not None and each.dtype == torch.float32 and each.is_contiguous() for each in tensors)
            and x.dim() == 4
            and x.numel() > x.shape[1]
            and x.is_contiguous(memory_format=torch.channels_last)
            and apply_to(x)
            and library() is not None
        )
