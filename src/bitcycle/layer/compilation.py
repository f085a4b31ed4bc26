"""Helpers around torch.compile that avoid importing the compiler, which takes two seconds, unless it is used."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, _compile

from bitcycle.settings import SettingError

P = ParamSpec("P")
R = TypeVar("R")


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable`, which imports the compiler only when the function is called."""
    disable: Any = vars(_compile)["_disable_dynamo"]
    disabled: Callable[P, R] = disable(function)
    return disabled


@torch.library.custom_op("bitcycle::count_call", mutates_args=("count", "last"))
def count_call(count: Tensor, last: Tensor, step: Tensor) -> Tensor:
    """The number of earlier calls in a step, which it counts: `count` is that of step `last`.

    An operator, as the compiler would compute the number again in the backward pass from the count, which has changed by then
    (PyTorch 2.13).
    """
    number = torch.where(last == step, count, 0)
    count.copy_(number + 1)
    last.copy_(step)
    return number


@count_call.register_fake
def _(count: Tensor, last: Tensor, step: Tensor) -> Tensor:
    return torch.empty_like(count)


def is_exporting() -> bool:
    """Whether torch.export traces. PyTorch's own function says so in every compiled graph of PyTorch 2.11."""
    return bool(torch.compiler._is_exporting_flag)


def has_numbers(x: Tensor) -> bool:
    """Whether a tensor has values: not on the meta device, and not a fake tensor of the compiler or torch.export."""
    return not x.is_meta and not hasattr(x, "fake_mode")


def refuse_tracing() -> None:
    """Reject tracers that would freeze the current bits, or the ranges of one batch, into a graph. Raises SettingError under
    torch.jit.trace, torch.fx.symbolic_trace and the transforms of torch.func."""
    symbolic = torch.fx._symbolic_trace.is_fx_symbolic_tracing()
    if tracer := "torch.jit.trace" if torch.jit._trace.is_tracing() else "torch.fx.symbolic_trace" if symbolic else "":
        remedy = "use torch.export.export or torch.compile, or bitcycle.export_onnx"
        raise SettingError("model", tracer, "cannot follow layers whose bits change", remedy)
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        remedy = "use backward, torch.autograd.grad or torch.autograd.functional"
        raise SettingError("model", "torch.func", "its transforms cannot follow the gradients of quantizers", remedy)
