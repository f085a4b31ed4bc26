"""Views of tensors as flat vectors or as rows, in channels-last order, without copying channels-last tensors.

The views are detached: quantizers define their own gradients, and compiled kernels would otherwise be recompiled for views of
different bases. Only in a backward pass that is itself differentiated does a gradient keep its graph. Half-precision tensors are
copied to float32, in which all quantizers compute.
"""

import torch
from torch import Tensor

from bitcycle.quantizer.autograd import is_differentiated_backward

HALF = (torch.float16, torch.bfloat16)


def flat(x: Tensor) -> Tensor:
    """All elements as a vector; tensors of four or more dimensions in channels-last order (N, H, W, C)."""
    return computable((x.movedim(1, -1) if x.dim() >= 4 else x).reshape(-1))


def unflat(vector: Tensor, like: Tensor) -> Tensor:
    """The inverse of `flat`, in the shape and type of `like`."""
    return shaped(vector.to(like.dtype), like)


def shaped(vector: Tensor, like: Tensor) -> Tensor:
    """The inverse of `flat`, in the shape of `like` and the type of the vector."""
    if like.dim() < 4:
        return vector.view(like.shape)
    return vector.view(like.movedim(1, -1).shape).movedim(-1, 1)


def rows(weight: Tensor) -> Tensor:
    """A weight as a matrix with one row per output channel. [O, ...] becomes [O, F]."""
    return computable((weight.movedim(1, -1) if weight.dim() >= 4 else weight).reshape(weight.shape[0], -1))


def samples(x: Tensor) -> Tensor:
    """Activations or gradients as a matrix with one row per sample (dimension 0); a vector is one sample."""
    return rows(x) if x.dim() > 1 else computable(x.view(1, -1))


def computable(view: Tensor) -> Tensor:
    """A detached view (attached in a backward pass that is differentiated), as a float32 copy if it is in half precision. Any
    shape, kept."""
    x = view if is_differentiated_backward() else view.detach()
    return x.float() if x.dtype in HALF else x
