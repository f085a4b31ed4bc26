"""Run a pure tensor function eagerly or compiled into one fused kernel."""

import functools
import logging
import shutil
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from bitcycle.cpp.operators import PLAIN

logger = logging.getLogger(__name__)


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
        self.direct: dict[Hashable, Callable[..., Any]] = {}

    @functools.cached_property
    def general(self) -> Callable[..., Any]:
        """The function behind PyTorch's guards, for tensors on any device."""
        return exactly_compiled(self.function)

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


EXACT = {"eager_numerics.division_rounding": True, "emulate_precision_casts": True}
"""Options of the compiler with which kernels on a GPU round as PyTorch's own: divisions are not approximate, and products are not
fused with sums. Versions of PyTorch without one of them are found out by `compiler_works`."""


def exactly_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for tensors of any size, with those of the options `EXACT` that this version of PyTorch has."""
    from torch._inductor import list_options

    known = list_options()
    return torch.compile(
        function, dynamic=True, options={name: value for name, value in EXACT.items() if name in known}
    )


def _rounded_twice(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Operations of quantizers that compilers like to round differently: a division, and a sum of products."""
    return x / y, x * y + x


@functools.cache
def compiler_works(device_type: str) -> bool:
    """Whether torch.compile works on a device and changes no bit of a small kernel's results; logs the reason if not."""
    if device_type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        logger.warning("no C++ compiler (g++) found: quantizers run eagerly, with the same results but slower")
        return False
    try:
        # no powers of two, so that every operation rounds
        x = torch.arange(1, 4097, device=device_type, dtype=torch.float32) / 3
        found, wanted = exactly_compiled(_rounded_twice)(x, x.flip(0)), _rounded_twice(x, x.flip(0))
    except Exception as error:  # a broken toolchain can raise anything, and eager mode always works
        logger.warning(
            "torch.compile does not work here (%s): quantizers run eagerly, more slowly", str(error).split("\n")[0]
        )
        return False
    if not all(map(torch.equal, found, wanted)):
        logger.warning("torch.compile rounds differently on this device: quantizers run eagerly, more slowly")
        return False
    return True
