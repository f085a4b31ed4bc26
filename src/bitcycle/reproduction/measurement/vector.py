"""Weights of a network as one vector."""

from collections.abc import Iterable

import torch
from torch import Tensor


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate tensors of any memory format to a vector."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def assign(vector: Tensor, tensors: Iterable[Tensor]) -> None:
    """Copy a vector into tensors; the inverse of `flatten`."""
    first = 0
    for tensor in tensors:
        tensor.copy_(vector[first : first + tensor.numel()].view(tensor.shape))
        first += tensor.numel()
