"""Batch norm that recomputes its input from integer codes instead of saving it (compute=codes, recompute).

For a convolution followed by batch norm, training saves the inputs of both for the backward pass. compute=codes reduces the first
to a quarter of its size, so that most of the memory is used by the second, which is determined by the codes. The backward pass
recomputes the product, bit for bit. Not in the authors' code.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from bitcycle.layer.codes.batch_norm import CodeBatchNorm2d

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
