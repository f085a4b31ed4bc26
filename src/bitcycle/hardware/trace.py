"""Traces any model with a sample input and lists the products that it computes.

A copy of the model runs one forward pass in evaluation mode, on the device where it lies (the meta device included, where
nothing is computed). Every product reaches PyTorch's dispatcher as one of a few basic operations, whichever layer or
function it came from; fused kernels (recurrent layers, attention) are taken apart for the occasion. What quantizers compute
(least squares, say) is left out: it simulates what the hardware gets for nothing. Of a block that training computes once for
each of several precisions, of which each sample uses one (DFQ), the products are listed once.

What it cannot see: shapes that change from batch to batch (the sample stands for all), the half of causal attention that a
kernel may skip (all of it counts), and backward passes written by hand in an autograd function (each product counts with
the gradients that its operands ask for).
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from bitcycle.hardware.operation import FLOAT_PRECISION, MatrixProduct, Operation, Workload
from bitcycle.hardware.product import PRODUCTS, Product
from bitcycle.hardware.unknown import Unknown, unknown_arithmetic
from bitcycle.schedule import Precision
from bitcycle.settings import SettingError

aten = torch.ops.aten


def trace(model: nn.Module, *inputs: Any, samples: int | None = None, **keywords: Any) -> Workload:
    """The products of one forward pass of `model(*inputs, **keywords)` in evaluation mode.

    Lookups in embeddings are listed with no multiply-accumulates; elementwise operations, reductions, normalisations and
    views are not listed. Arithmetic of other kinds (distances, Fourier transforms, operations of other libraries) is listed
    as `unknown`, counts as float32 if its multiplications can be counted, and is warned of once.

    Args:
        model: any module; not changed. Its quantized layers are recognised, all others count as float32.
        inputs, keywords: as for the forward pass; tensors need the right shape and type only.
        samples: how many samples the input holds; None means the first dimension of the first tensor.

    Raises:
        SettingError (a ValueError): for a sample input without samples, and for a model on the meta device whose shapes
            depend on values.
    """
    with torch.inference_mode(False), torch.enable_grad():
        inputs, keywords = tree_map_only(Tensor, _plain, (inputs, keywords))
        tensors = [leaf for leaf in tree_leaves((inputs, keywords)) if isinstance(leaf, Tensor)]
        samples = _samples(tensors) if samples is None else samples
        if samples < 1:
            raise SettingError("samples", samples, "costs are counted for each sample", "give an input of one or more")
        recorder = _Recorder(tensors)
        model = copy.deepcopy(model, _computed_tensors(model)).eval()
        for module in model.modules():
            # of layer.Gates and QuantizedLayer; known by the attribute, as hardware knows no layers
            getattr(module, "prepare_trace", _nothing)()
            if getattr(module, "is_quantizer", False):  # a quantizer.TensorQuantizer
                module.forward = partial(_unquantized, module)
        devices = sorted({p.get_device() for p in model.parameters() if p.is_cuda})
        with torch.random.fork_rng(devices), _taken_apart(model), _follow_modules(model, recorder), recorder:
            try:
                model(*inputs, **keywords)
            except RuntimeError as error:
                if _lacks_values(error, tensors):
                    raise _without_values(error, model) from error
                raise
    return recorder.workload(samples)


def _computed_tensors(model: nn.Module) -> dict[int, Tensor]:
    """What deepcopy cannot copy and takes from here: tensors with a history, as `torch.nn.utils.weight_norm` keeps them."""
    kept = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    return {id(tensor): tensor.detach() for tensor in kept if not tensor.is_leaf}


def _nothing() -> None:
    """Default preparation of modules for tracing."""


def _unquantized(quantizer: nn.Module, x: Tensor, *bits: Tensor) -> Tensor:
    """Replacement of a quantized tensor: x itself, with a gradient if x or the quantizer requires one."""
    wants = x.requires_grad or any(parameter.requires_grad for parameter in quantizer.parameters())
    return x.detach().requires_grad_() if wants and not x.requires_grad else x


def _plain(tensor: Tensor) -> Tensor:
    """The tensor as an ordinary one without history."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def _samples(tensors: list[Tensor]) -> int:
    return next((tensor.shape[0] for tensor in tensors if tensor.dim()), 1)


def _lacks_values(error: RuntimeError, inputs: list[Tensor]) -> bool:
    return any(tensor.is_meta for tensor in inputs) and "meta" in str(error).lower()


def _without_values(error: RuntimeError, model: nn.Module) -> SettingError:
    problem = f"cannot be traced on the meta device, as values decide its shapes ({str(error).splitlines()[0]})"
    return SettingError("model", type(model).__name__, problem, "trace it on the CPU with a real sample")


@contextmanager
def _taken_apart(model: nn.Module) -> Iterator[None]:
    """Attention and recurrent layers as the products they are made of; by one thread, since samples are small."""
    backends: list[Any] = [torch.backends.mkldnn, torch.backends.cudnn]
    enabled = [backend.enabled for backend in backends]
    fast, threads = torch.backends.mha.get_fastpath_enabled(), torch.get_num_threads()
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    try:
        for backend, was_enabled in zip(backends, enabled):
            backend.enabled = was_enabled and not recurrent
        torch.backends.mha.set_fastpath_enabled(False)
        torch.set_num_threads(1)  # threads that wait for each other on a busy machine take a hundred times longer
        with sdpa_kernel([SDPBackend.MATH]), _eagerly(model):
            yield
    finally:
        for backend, was_enabled in zip(backends, enabled):
            backend.enabled = was_enabled
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.set_num_threads(threads)


def _eagerly(model: nn.Module) -> AbstractContextManager[None]:
    """Compiled functions run uncompiled, lest the recorder be compiled with them; where nothing is compiled, as it is."""
    will_compile = any(
        getattr(module, "compile_kernel", False) for module in model.modules()
    )  # a quantizer.TensorQuantizer
    if not will_compile and "torch._dynamo" not in sys.modules:  # importing the compiler takes seconds
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def _follow_modules(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Context in which the recorder follows the running module."""
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(recorder.entering(name, module)).remove)
            hooks.callback(module.register_forward_hook(recorder.leaving, always_call=True).remove)
        yield


class _Recorder(TorchDispatchMode):
    """Collects operations as they reach the dispatcher, and follows which tensors come from the input."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing the compiler takes seconds

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.counts: Counter[str] = Counter()
        self.stack: list[tuple[str, nn.Module]] = []
        self.names: Counter[str] = Counter()
        self.warned: set[str] = set()
        self.from_input = WeakTensorKeyDictionary()
        self._mark(inputs)

    def entering(self, name: str, module: nn.Module) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.stack.append((name, module))

        return hook

    def leaving(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, (nn.AvgPool2d, nn.AdaptiveAvgPool2d)) and isinstance(output, Tensor):
            self.counts["pooled_inputs"] += inputs[0].numel()
            self.counts["pooled_outputs"] += output.numel()
        self.stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        output = func(*args, **keywords)
        if not self._in_quantizer():
            self._record(func, args, keywords, output)
        if any(tensor in self.from_input for tensor in _tensors((args, *keywords.values()))):
            self._mark(_tensors((output,)))
        return output

    def _in_quantizer(self) -> bool:
        return bool(self.stack) and getattr(self.stack[-1][1], "is_quantizer", False)  # a quantizer.TensorQuantizer

    def _mark(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.from_input[tensor] = True

    def _record(self, func: Any, args: Any, keywords: Any, output: Any) -> None:
        name = func.overloadpacket
        if name in PRODUCTS:
            product = PRODUCTS[name](args, output, self.from_input.__contains__)
            if product is not None:
                self._add_product(product)
        elif name in _BATCH_NORMS:
            self.counts["batch_norm_elements"] += output[0].numel()
        elif name is aten.native_layer_norm:
            self.counts["layer_norm_elements"] += output[0].numel()
        elif name in _RELUS:
            self.counts["relu_elements"] += output.numel()
        elif (unknown := unknown_arithmetic(func, args, keywords, output)) is not None:
            self._add_unknown(unknown, list(_tensors((args,))), list(_tensors((output,))))

    def _add_product(self, product: Product) -> None:
        name, module = self._running()
        moving, held = product.moving, product.held
        without_weight = product.kind in ("matmul", "aggregation")
        wanted = torch.is_grad_enabled() or moving.requires_grad  # gradients are off where features are frozen
        self.operations.append(
            Operation(
                name=name,
                kind=product.kind,
                macs=product.macs,
                product=product.shape,
                groups=product.groups,
                input_positions=product.input_positions,
                weight_elements=0 if without_weight else held.numel(),
                input_elements=moving.numel() + (held.numel() if product.kind == "matmul" else 0),
                output_elements=product.output.numel(),
                needs_input_gradient=moving.requires_grad,
                fixed_precision=_fixed_precision(module),
                needs_weight_gradient=held.requires_grad and wanted,
                storage=_storage(module),
            )
        )

    def _add_unknown(self, unknown: Unknown, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        name, _ = self._running()
        needs_gradient = any(tensor.requires_grad for tensor in inputs)
        macs = unknown.macs or 0
        self.operations.append(
            Operation(
                name=name,
                kind="unknown",
                macs=macs,
                product=MatrixProduct(1, 1, macs),
                groups=1,
                input_positions=1,
                weight_elements=0,
                input_elements=sum(tensor.numel() for tensor in inputs),
                output_elements=sum(tensor.numel() for tensor in outputs),
                needs_input_gradient=needs_gradient,
                fixed_precision=FLOAT_PRECISION,
                needs_weight_gradient=needs_gradient,
            )
        )
        if unknown.name not in self.warned:
            self.warned.add(unknown.name)
            warnings.warn(_warning(unknown, name), stacklevel=2)

    def _running(self) -> tuple[str, nn.Module]:
        """The module that is running and a name for its next operation."""
        name, module = self.stack[-1]
        name = name or type(module).__name__
        self.names[name] += 1
        return (f"{name}#{self.names[name]}" if self.names[name] > 1 else name), module

    def workload(self, samples: int) -> Workload:
        return Workload(tuple(self.operations), samples, **self.counts)


def _warning(unknown: Unknown, name: str) -> str:
    counted = "not counted in the cost" if unknown.macs is None else f"counted as {unknown.macs} float32 products"
    hint = "; give its formula with torch.utils.flop_counter.register_flop_formula" if unknown.macs is None else ""
    return f"{unknown.name} in {name!r} is arithmetic that the cost models do not know: {counted}{hint}"


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """All tensors in (nested) arguments or results."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(tuple(value))


def _fixed_precision(module: nn.Module) -> Precision | None:
    """Bits that no schedule changes: those of a fixed layer, float32 for a layer that is not quantized, else None."""
    # a layer.PrecisionState; known by its attributes, as hardware knows no layers
    state = getattr(module, "precision", None)
    if state is None or not hasattr(state, "fixed"):
        return FLOAT_PRECISION
    return state.precision if state.fixed else None


def _storage(module: nn.Module) -> tuple[Mapping[int, Fraction], ...]:
    """What a number of scheduled bits is stored in, for each role; empty where it is itself."""
    options = getattr(module, "quantizer_options", None)  # a quantizer.QuantizerOptions
    if options is None or _fixed_precision(module) == FLOAT_PRECISION:
        return ()
    tables = tuple(options.storage_bits(role) for role in Precision._fields)
    return tables if any(tables) else ()


_BATCH_NORMS = {
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training,
    aten._batch_norm_with_update,
    aten._batch_norm_no_update,
    aten.cudnn_batch_norm,
}
_RELUS = {aten.relu, aten.relu_, aten.hardtanh, aten.hardtanh_}
