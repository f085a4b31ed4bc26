"""What layers do with and without the compiler, whose import takes two seconds that a plan or a plain run need not pay."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import Tensor
from torch._compile import _disable_dynamo  # type: ignore[attr-defined, unused-ignore]

P = ParamSpec("P")
R = TypeVar("R")


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable`, which imports the compiler only when the function is called."""
    return _disable_dynamo(function)  # type: ignore[no-any-return, unused-ignore]


def has_numbers(x: Tensor) -> bool:
    """Whether a tensor holds numbers: not on the meta device, and no fake one of the compiler or torch.export."""
    return not x.is_meta and not hasattr(x, "fake_mode")
