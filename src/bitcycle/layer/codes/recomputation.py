"""Batch norm that does not keep its input where a layer of integer codes can compute it again (compute=codes, recompute).

Of a convolution and the batch norm behind it training keeps two tensors for the backward pass, the inputs of both. compute=codes
makes the first a quarter of its size; what remains is mostly the second, which the codes determine. The product is computed once
more when the backward pass arrives there, with the same numbers, bit for bit. Not in the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_Recipe = Callable[[], Tensor]


def remember(y: Tensor, recipe: _Recipe) -> Tensor:
    """y, of which batch norm learns how to compute it again."""
    y.recipe = recipe  # type: ignore[attr-defined]
    return y


class RecomputingBatchNorm2d(nn.BatchNorm2d):
    """A torch.nn.BatchNorm2d that keeps the recipe of its input instead of the input."""

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


def recomputing_batch_norm(norm: nn.BatchNorm2d) -> RecomputingBatchNorm2d:
    """The recomputing twin of a batch norm, with its parameters, buffers, mode and hooks."""
    twin = RecomputingBatchNorm2d(norm.num_features, device="meta")
    twin.__dict__.update(norm.__dict__)
    return twin
