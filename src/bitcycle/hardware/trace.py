"""Trace any model once with a sample input and list the products that it computes.

A copy of the model runs one forward pass in evaluation mode, on the device where it lies (the meta device included, where
nothing is computed). Every product reaches PyTorch's dispatcher as one of a few basic operations, whichever layer or
function it came from, so nothing has to be known about the model.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from bitcycle.hardware.operation import FLOAT_PRECISION, MatrixProduct, Operation, Workload
from bitcycle.schedule import Precision

aten = torch.ops.aten


def trace(model: nn.Module, *inputs: Any, samples: int | None = None, **keywords: Any) -> Workload:
    """The products of one forward pass of `model(*inputs, **keywords)` in evaluation mode.

    Args:
        model: any module; not changed. Its quantized layers are recognised, all others count as float32.
        inputs, keywords: as for the forward pass; tensors need the right shape and type only.
        samples: how many samples the input holds; None means the first dimension of the first tensor.
    """
    model = copy.deepcopy(model).eval()
    inputs, keywords = tree_map_only(Tensor, torch.detach, (inputs, keywords))
    if samples is None:
        tensors = [value for value in (*inputs, *keywords.values()) if isinstance(value, Tensor) and value.dim()]
        samples = tensors[0].shape[0] if tensors else 1
    recorder = _Recorder()
    with torch.enable_grad(), _follow_modules(model, recorder), recorder:
        model(*inputs, **keywords)
    return recorder.workload(samples)


@contextmanager
def _follow_modules(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Tell the recorder which module is running, and whether its input needs a gradient."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(recorder.entering(name, module)))
        handles.append(module.register_forward_hook(recorder.leaving, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder(TorchDispatchMode):
    """Collects operations as they reach the dispatcher."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing the compiler takes seconds

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.counts: Counter[str] = Counter()
        self.stack: list[tuple[str, nn.Module, bool]] = []
        self.names: Counter[str] = Counter()

    def entering(self, name: str, module: nn.Module) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            tensors = [value for value in inputs if isinstance(value, Tensor)]
            needs_gradient = any(tensor.requires_grad for tensor in tensors) if tensors else True
            self.stack.append((name, module, needs_gradient))

        return hook

    def leaving(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, (nn.AvgPool2d, nn.AdaptiveAvgPool2d)) and isinstance(output, Tensor):
            self.counts["pooled_inputs"] += inputs[0].numel()
            self.counts["pooled_outputs"] += output.numel()
        self.stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket
        if name in _PRODUCTS:
            self._record(*_PRODUCTS[name](args, output), args)
        elif name in _BATCH_NORMS:
            self.counts["batch_norm_elements"] += output[0].numel()
        elif name in _RELUS:
            self.counts["relu_elements"] += output.numel()
        return output

    def _record(
        self, kind: str, product: MatrixProduct, groups: int, input_positions: int, operands: Any, args: Any
    ) -> None:
        moving, held, output = operands
        name, module, needs_gradient = self.stack[-1] if self.stack else ("", nn.Identity(), True)
        self.names[name] += 1
        suffix = f"#{self.names[name]}" if self.names[name] > 1 else ""
        self.operations.append(
            Operation(
                name=(name or type(module).__name__) + suffix,
                kind=kind,
                macs=math.prod(product) * groups,
                product=product,
                groups=groups,
                input_positions=input_positions,
                weight_elements=held.numel() if kind != "matmul" else 0,
                input_elements=moving.numel() + (held.numel() if kind == "matmul" else 0),
                output_elements=output.numel(),
                needs_input_gradient=needs_gradient,
                fixed_precision=_fixed_precision(module),
            )
        )

    def workload(self, samples: int) -> Workload:
        return Workload(tuple(self.operations), samples, **self.counts)


def _fixed_precision(module: nn.Module) -> Precision | None:
    """Bits that no schedule changes: those of a fixed layer, float32 for a layer that is not quantized, else None."""
    state = getattr(
        module, "precision", None
    )  # a layer.PrecisionState; named by its attributes, as hardware knows no layers
    if state is None or not hasattr(state, "fixed"):
        return FLOAT_PRECISION
    return state.precision if state.fixed else None


Described = tuple[str, MatrixProduct, int, int, tuple[Tensor, Tensor, Tensor]]


def _convolution(args: Any, output: Tensor) -> Described:
    x, weight, groups = args[0], args[1], args[8]
    transposed = args[6]
    small = x if transposed else output  # a transposed convolution is the error product of a convolution
    positions = small.shape[0] * math.prod(small.shape[2:])
    out_channels = (weight.shape[1] * groups if transposed else weight.shape[0]) // groups
    in_channels = x.shape[1] // groups
    product = MatrixProduct(positions, out_channels, in_channels, math.prod(weight.shape[2:]))
    return "conv", product, groups, x.shape[0] * math.prod(x.shape[2:]), (x, weight, output)


def _matrix_product(x: Tensor, y: Tensor, output: Tensor, groups: int) -> Described:
    # A weight reaches the dispatcher as a parameter or a (quantized, transposed) copy of one: it has two dimensions. Batched
    # products multiply two activations, as in attention.
    kind = "linear" if groups == 1 else "matmul"
    product = MatrixProduct(x.shape[-2], y.shape[-1], x.shape[-1])
    return kind, product, groups, x.shape[-2], (x, y, output)


_PRODUCTS: dict[Any, Callable[[Any, Any], Described]] = {
    aten.convolution: _convolution,
    aten.mm: lambda args, output: _matrix_product(args[0], args[1], output, 1),
    aten.addmm: lambda args, output: _matrix_product(args[1], args[2], output, 1),
    aten.bmm: lambda args, output: _matrix_product(args[0], args[1], output, args[0].shape[0]),
    aten.baddbmm: lambda args, output: _matrix_product(args[1], args[2], output, args[1].shape[0]),
}
_BATCH_NORMS = {
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training,
    aten._batch_norm_with_update,
    aten._batch_norm_no_update,
    aten.cudnn_batch_norm,
}
_RELUS = {aten.relu, aten.relu_, aten.hardtanh, aten.hardtanh_}
