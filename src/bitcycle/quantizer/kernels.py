"""Run a pure tensor function eagerly, compiled into one fused kernel, or as a C++ operator.

The operators are for float32 tensors on a CPU and bitwise identical to their Python functions:

affine.cpp    affine.py: one operator quantizes a tensor, updates the observer and is one autograd node, instead of a dozen
              PyTorch operators or a compiled kernel with Python overhead; relu.h and batch_norm.h what is between quantizers
block.cpp     block.py with mx.py and nvfp4.py: without the copies into and out of blocks

Kernels compute on views of tensors as flat vectors or as rows, in channels-last order, without copying channels-last tensors.
The views are detached: quantizers define their own gradients, and compiled kernels would otherwise be recompiled for views of
different bases. Half-precision tensors are copied to float32, in which all quantizers compute.
"""

import functools
import logging
import shutil
from collections.abc import Callable, Hashable
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitcycle import distributed
from bitcycle.cpp_extension import operators

logger = logging.getLogger(__name__)

PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that are no subclasses with operations of their own."""


class Kernel:
    """A function of tensors, compiled for tensors of any size; precision is a tensor, so its changes never recompile.

    On a CPU the compiled code is called directly: torch.compile takes four times as long for a vector of 1,024 elements, mostly
    for checking guards. Here the check is one dictionary lookup by data types, numbers of dimensions, and dimensions of zero or
    one element. All other cases (GPUs, strided tensors, gradients through the function, tensors without values) use
    torch.compile.
    """

    compilations = 0
    """Number of compilations for direct calls, over all kernels."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.general = torch.compile(function, dynamic=True)
        self.direct: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """The function's result."""
        key = _signature(arguments)
        if key is None:
            return self.general(*arguments)
        code = self.direct.get(key)
        if code is None:
            code = self.direct[key] = self._build(arguments)
        return code(*arguments)

    def _build(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        Kernel.compilations += 1
        try:
            return _compile_for(self.function, arguments)
        except Exception as error:  # prototype APIs of PyTorch, which other versions may lack
            reason = str(error).split("\n")[0]
            logger.info("%s is called through torch.compile, which is slower (%s)", self.function.__name__, reason)
            return self.general


def _signature(arguments: tuple[Any, ...]) -> Hashable | None:
    """What compiled code depends on; None if it must not be called directly."""
    if torch._C._len_torch_dispatch_stack():  # a dispatch mode is recording operations
        return None
    parts: list[Hashable] = [torch.get_num_threads()]
    with_gradients = torch.is_grad_enabled()
    for argument in arguments:
        if not isinstance(argument, Tensor):
            parts.append(argument)
        elif (
            type(argument) not in PLAIN
            or not argument.is_cpu
            or not argument.is_contiguous()
            or (with_gradients and argument.requires_grad)
        ):
            return None
        else:
            parts.append((argument.dtype, tuple([min(size, 2) for size in argument.shape])))
    return tuple(parts)


def _compile_for(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """Compiled code of the function for arguments with the same signature as these."""
    from torch._inductor import standalone_compile
    from torch.fx.experimental import _config
    from torch.fx.experimental.proxy_tensor import make_fx

    places = [place for place, argument in enumerate(arguments) if isinstance(argument, Tensor)]

    def of_tensors(*tensors: Tensor) -> Any:
        values = list(arguments)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        return function(*values)

    examples = [arguments[place].detach() for place in places]
    config: Any = _config
    with config.patch(use_duck_shape=False), torch.no_grad():  # sizes that are equal now may differ later
        graph = make_fx(of_tensors, tracing_mode="symbolic")(*examples)
        code = standalone_compile(graph, examples, dynamic_shapes="from_graph")
    single = isinstance(graph.graph.output_node().args[0], torch.fx.Node)

    def call(*values: Any) -> Any:
        found = code(*[values[place] for place in places])
        return found[0] if single and isinstance(found, (tuple, list)) else found

    return call


@functools.cache
def compiled(function: Callable[..., Any]) -> Kernel:
    """`function` compiled once for tensors of any size."""
    return Kernel(function)


def kernel(function: Callable[..., Any], compile: bool) -> Callable[..., Any]:
    """The compiled or the plain version of `function`."""
    if compile and not torch.compiler.is_compiling():  # inside a compiled graph it is compiled as part of it
        return compiled(function)
    return function


@functools.cache
def compiler_works(device_type: str) -> bool:
    """Whether torch.compile works here, tested on a small kernel; logs the reason if not."""
    if device_type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        logger.warning("no C++ compiler (g++) found: quantizers run eagerly, with the same results but slower")
        return False
    try:
        torch.compile(lambda x: x + 1, dynamic=True)(torch.zeros(8, device=device_type))
    except Exception as error:  # a broken toolchain can raise anything, and eager mode always works
        logger.warning(
            "torch.compile does not work here (%s): quantizers run eagerly, more slowly", str(error).split("\n")[0]
        )
        return False
    return True


AFFINE, BLOCK = (Path(__file__).with_name(name) for name in ("affine.cpp", "block.cpp"))


class GradientRange(IntEnum):
    """Granularity of the ranges of a gradient."""

    TENSOR = 0
    POSITION = 1
    """One range per position between the first and the last dimension."""
    STEP = 2
    """One range per index of the first dimension."""
    SEQUENCE = 3
    """One range per index of all dimensions but the last."""


def apply_to(x: Tensor) -> bool:
    """Whether operators apply to x, a float32 tensor on a CPU, and no trace records operations."""
    return (
        x.is_cpu
        and x.dtype == torch.float32
        and type(x) in PLAIN
        and not torch._C._len_torch_dispatch_stack()
        and not torch.compiler.is_compiling()
    )


def cpp_operators(x: Tensor, compile: bool, source: Path = AFFINE) -> Any | None:
    """The operators, if enabled and applicable to x; None otherwise."""
    return operators(source) if compile and apply_to(x) else None


def batch_operators(x: Tensor, compile: bool) -> Any | None:
    """The operators that take statistics of x, if x is the whole batch; None otherwise."""
    return cpp_operators(x, compile) if distributed.current_shard() is None else None


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
    """A weight as a matrix with one row per output channel."""
    return computable((weight.movedim(1, -1) if weight.dim() >= 4 else weight).reshape(weight.shape[0], -1))


def samples(x: Tensor) -> Tensor:
    """Activations or gradients as a matrix with one row per sample (dimension 0); a vector is one sample."""
    return rows(x) if x.dim() > 1 else computable(x.view(1, -1))


def computable(view: Tensor) -> Tensor:
    """A detached view, as a float32 copy if it is in half precision."""
    return view.detach().float() if view.dtype in HALF else view.detach()
