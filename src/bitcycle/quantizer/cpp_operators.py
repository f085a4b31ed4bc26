"""Quantizers as operators in C++ for float32 tensors on a CPU: the numbers of their Python functions, bit for bit.

affine.cpp    affine.py: one operator quantizes a tensor, moves the observer and is a node of autograd, where PyTorch runs a
              dozen operators or one compiled kernel with Python around it
block.cpp     block.py with mx.py and nvfp4.py: without the copies into and out of blocks
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitcycle.cpp_extension import is_compiled, operators

_PLAIN = (Tensor, torch.nn.Parameter)
AFFINE, BLOCK = (Path(__file__).with_name(name) for name in ("affine.cpp", "block.cpp"))


class GradientRange(IntEnum):
    """What has a range of its own in a gradient."""

    TENSOR = 0
    POSITION = 1
    """Each place between the first and the last dimension."""
    STEP = 2
    """Each index of the first dimension."""
    SEQUENCE = 3
    """Each pair of indices of all dimensions but the last."""


def are_available(source: Path) -> bool:
    """Whether the operators of a file can be had on this machine; compiles them if need be."""
    return operators(source) is not None


def are_compiled(source: Path) -> bool:
    """Whether the operators of a file were compiled before, so that having them costs no time."""
    return is_compiled(source)


def cpp_operators(x: Tensor, compile: bool, source: Path = AFFINE) -> Any | None:
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
    return operators(source)
