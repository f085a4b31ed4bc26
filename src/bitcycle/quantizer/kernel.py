"""Run a pure tensor function eagerly or compiled into one fused kernel, whichever is wanted and possible."""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled once for tensors of every size; precision enters as tensors and never recompiles it."""
    return torch.compile(function, dynamic=True)


def kernel(function: Callable[..., Any], compile: bool) -> Callable[..., Any]:
    """The compiled or the plain version of `function`."""
    return compiled(function) if compile else function


@functools.cache
def compiler_works(device_type: str) -> bool:
    """Whether torch.compile can build kernels here, tried on a small one; says in the log why not."""
    if device_type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        logger.warning("no C++ compiler (g++) found: quantizers run eagerly, with the same results but slower")
        return False
    try:
        compiled(_probe)(torch.zeros(8, device=device_type))
    except Exception as error:  # a broken tool chain raises anything at all, and eager mode is always right
        logger.warning(
            "torch.compile does not work here (%s): quantizers run eagerly, more slowly", str(error).split("\n")[0]
        )
        return False
    return True


def _probe(x: Tensor) -> Tensor:
    return x + 1
