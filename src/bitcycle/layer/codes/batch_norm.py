"""Batch norm that works with the convolutions and ReLUs of compute=codes (batch_norm.h).

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

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from bitcycle.layer.batch_norm import TrainedBatchNorm2d
from bitcycle.layer.codes.gradients import library
from bitcycle.quantizer.cpp_operators import apply_to


class CodeBatchNorm2d(TrainedBatchNorm2d):
    """A torch.nn.BatchNorm2d in a network that computes codes."""

    def operator(self, x: Tensor) -> Callable[..., Tensor] | None:
        functions = library() if apply_to(x) else None
        return None if functions is None else functions.batch_norm


_Recipe = Callable[[], Tensor]


def remember(y: Tensor, recipe: _Recipe) -> Tensor:
    """y, annotated with the recipe by which batch norm can recompute it."""
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
