"""Batch norm that works with the convolutions and ReLUs of compute=codes (batch_norm.h).

In training on a CPU, the moments of its channels are those that the preceding convolution has summed, a ReLU in place becomes
part of it in the backward pass, and the range of its gradient is known to the convolution that quantizes it. Equal to
torch.nn.BatchNorm2d up to the rounding of float32 sums; otherwise it is one.
"""

from collections.abc import Callable

from torch import Tensor

from bitcycle.layer.codes.weight_gradient import library
from bitcycle.layer.exact_batch_norm import TrainedBatchNorm2d
from bitcycle.quantizer.cpp_operators import apply_to


class CodeBatchNorm2d(TrainedBatchNorm2d):
    """A torch.nn.BatchNorm2d in a network that computes codes."""

    def operator(self, x: Tensor) -> Callable[..., Tensor] | None:
        functions = library() if apply_to(x) else None
        return None if functions is None else functions.batch_norm
