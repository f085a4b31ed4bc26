"""The affine quantizers as operators in C++ (affine.cpp) for float32 tensors on a CPU: the numbers of affine.py, bit for bit.

One operator quantizes a tensor, moves the observer and is a node of autograd, where PyTorch runs a dozen operators or one
compiled kernel with Python around it.
"""

from __future__ import annotations

import functools
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitcycle.cpp_extension import is_compiled, operators

_PLAIN = (Tensor, torch.nn.Parameter)


class GradientRange(IntEnum):
    """What has a range of its own in a gradient."""

    TENSOR = 0
    POSITION = 1
    """Each place between the first and the last dimension."""
    STEP = 2
    """Each index of the first dimension."""
    SEQUENCE = 3
    """Each pair of indices of all dimensions but the last."""


_SOURCE = Path(__file__).with_name("affine.cpp")


@functools.cache
def _operators() -> Any | None:
    return operators(_SOURCE)


def are_available() -> bool:
    """Whether the operators can be had on this machine; compiles them if need be."""
    return _operators() is not None


def are_compiled() -> bool:
    """Whether the operators were compiled before, so that having them costs no time."""
    return is_compiled(_SOURCE)


def affine_operators(x: Tensor, compile: bool) -> Any | None:
    """The operators, if they can take x and are wanted; None where operations are to be seen, as by a trace."""
    if (
        not compile
        or not x.is_cpu
        or x.dtype != torch.float32
        or type(x) not in _PLAIN
        or torch._C._len_torch_dispatch_stack()
        or torch.compiler.is_compiling()
    ):
        return None
    return _operators()
