"""Quantizers as C++ operators for float32 tensors on a CPU, bitwise identical to their Python functions unless stated.

affine.cpp    affine.py: one operator quantizes a tensor, updates the observer and is one autograd node, instead of a dozen
              PyTorch operators or a compiled kernel with Python overhead; relu.h and batch_norm.h what is between quantizers
block.cpp     block.py with mx.py and nvfp4.py: without the copies into and out of blocks
multibit.cpp  multibit.py: a vector at a time; equal but for the rounding of least squares in float64
"""

from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitcycle import distributed
from bitcycle.cpp.extension import operators

AFFINE, BLOCK, MULTIBIT, CODES = (
    Path(__file__).parent / name for name in ("affine.cpp", "block.cpp", "multibit.cpp", "codes/product.cpp")
)
PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that are no subclasses with operations of their own."""


class GradientRange(IntEnum):
    """Granularity of the ranges of a gradient."""

    TENSOR = 0
    POSITION = 1
    """One range per position between the first and the last dimension."""
    SEQUENCE = 2
    """One range per index of all dimensions but the last."""


def apply_to(x: Tensor) -> bool:
    """Whether operators apply to x, a float32 tensor on a CPU, and no trace records operations. x has any shape."""
    return (
        x.is_cpu
        and x.dtype == torch.float32
        and type(x) in PLAIN
        and not torch._C._len_torch_dispatch_stack()
        and not torch.compiler.is_compiling()
    )


def cpp_operators(x: Tensor, compile: bool, source: Path = AFFINE) -> Any | None:
    """The operators, if enabled and applicable to x; None otherwise. x has any shape."""
    return operators(source) if compile and apply_to(x) else None


def batch_operators(x: Tensor, compile: bool) -> Any | None:
    """The operators that take statistics of x, if x is the whole batch; None otherwise. x has any shape."""
    return cpp_operators(x, compile) if distributed.current_shard() is None else None
