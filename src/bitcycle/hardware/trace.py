"""Tracing of any model with a sample input: lists the products that it computes.

A copy of the model runs one forward pass in evaluation mode on the model's device (including the meta device, where
nothing is computed). Every product reaches PyTorch's dispatcher as one of a few basic operations, whatever layer or
function computes it; fused kernels (recurrent layers, attention) are decomposed. Arithmetic inside quantizers (such as
least squares) is skipped, as it simulates what the hardware does at no cost. If training computes a block at several
precisions and each sample uses one of them (DFQ), the block's products are listed once. The heads of torchvision's
two-stage detectors run in training mode if targets are given, as the number of their boxes depends on the mode.

Limitations: shapes that change between batches (the sample input represents all), the half of causal attention that a
kernel may skip (all of it is counted), and custom backward passes of autograd functions (each product is counted with
the gradients that its operands require).
"""

import copy
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from fractions import Fraction
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from bitcycle.hardware.calls import followed
from bitcycle.hardware.operation import FLOAT_PRECISION, Operation, ProductShape, Workload
from bitcycle.hardware.product import PRODUCTS, Product
from bitcycle.hardware.unknown import Unknown, unknown_arithmetic
from bitcycle.precision import Precision
from bitcycle.randomness import random_state_kept
from bitcycle.settings import SettingError

aten = torch.ops.aten


def trace(model: nn.Module, *inputs: Any, samples: int | None = None, **keywords: Any) -> Workload:
    """Return the products of one forward pass of `model(*inputs, **keywords)` in evaluation mode.

    Embedding lookups are listed with zero multiply-accumulates. Elementwise operations, reductions, normalisations and
    views are not listed. Other arithmetic (distances, Fourier transforms, operations of other libraries) is listed as
    `unknown`, counted as float32 if its number of multiplications is known, and reported by one warning.

    Args:
        model: any module; it is not changed. Quantized layers are recognised, all others count as float32.
        inputs, keywords: arguments of the forward pass; only shapes and types of tensors matter.
        samples: number of samples in the input; None means the first dimension of the first tensor.

    Raises:
        SettingError (a ValueError): for a sample input without samples, for a model on the meta device whose shapes depend on
            values, and for a model that cannot be copied.
    """
    with torch.inference_mode(False), torch.enable_grad():
        inputs, keywords = tree_map_only(Tensor, _plain, (inputs, keywords))
        tensors = _tensors((inputs, keywords))
        if samples is None:
            samples = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 1)
        if samples < 1:
            raise SettingError("samples", samples, "costs are counted per sample", "give an input of one or more")
        has_targets = model.training and (len(inputs) > 1 or "targets" in keywords)
        model = _copied(model).eval()
        recorder = _Recorder(model, tensors)
        for module in model.modules():
            # of layer.Gates and QuantizedLayer; found by attribute, as `hardware` does not import `layer`
            getattr(module, "prepare_trace", lambda: None)()
            if type(module).__name__ == "RoIHeads":  # of torchvision, whose boxes training samples by the targets
                module.training = has_targets
            if getattr(module, "is_quantizer", False):  # a quantizer.TensorQuantizer
                module.forward = partial(_unquantized, module)
        with random_state_kept(), _taken_apart(model), _follow_modules(model, recorder), recorder:
            try:
                model(*inputs, **keywords)
            except RuntimeError as error:
                if not any(tensor.is_meta for tensor in tensors) or "meta" not in str(error).lower():
                    raise
                reason = str(error).splitlines()[0]
                problem = f"cannot be traced on the meta device, as its shapes depend on values ({reason})"
                remedy = "trace it on the CPU with a real sample"
                raise SettingError("model", type(model).__name__, problem, remedy) from error
    return recorder.workload(samples)


def _copied(model: nn.Module) -> nn.Module:
    """A copy of the model, with copies of what deepcopy cannot copy: generators, and tensors with a grad_fn, as kept by
    `torch.nn.utils.weight_norm` (as plain tensors). A forward that was assigned to a module and wraps its own, as those of
    torch.compile and torch.autocast, is replaced by the copy's own: it would run the model itself, whose layers are not watched.
    Raises SettingError if the model has other such parts, as with FSDP."""
    kept = [value for module in model.modules() for value in tree_leaves(list(vars(module).values()))]
    copies: dict[int, Any] = {id(x): x.detach() for x in kept if isinstance(x, Tensor) and not x.is_leaf}
    copies |= {id(x): x.clone_state() for x in kept if isinstance(x, torch.Generator)}
    try:
        copied = copy.deepcopy(model, copies)
    except Exception as error:
        problem = f"cannot be copied for the trace of its products ({error})"
        remedy = (
            "trace it before it is wrapped: PrecisionController(..., workload=bitcycle.hardware.trace(model, sample))"
        )
        raise SettingError("model", type(model).__name__, problem, f"{remedy}, and step(t, samples=...)") from error
    for module in model.modules():
        forward, twin = vars(module).get("forward"), copies.get(id(module))
        wrapped = inspect.unwrap(forward) if isinstance(forward, FunctionType) else None  # deepcopy keeps functions
        if isinstance(wrapped, MethodType) and wrapped.__self__ is module and twin is not None:
            vars(twin)["forward"] = MethodType(wrapped.__func__, twin)
    return copied


def _unquantized(quantizer: nn.Module, x: Tensor, *bits: Tensor) -> Tensor:
    """Replacement for a quantizer: returns x itself, which requires a gradient if x or the quantizer does."""
    wants = x.requires_grad or any(parameter.requires_grad for parameter in quantizer.parameters())
    return x.detach().requires_grad_() if wants and not x.requires_grad else x


def _plain(tensor: Tensor) -> Tensor:
    """The tensor as an ordinary tensor that requires a gradient if it did, apart from the graph that it is part of."""
    plain = tensor.clone() if tensor.is_inference() else tensor.detach()
    return plain.requires_grad_().clone() if tensor.requires_grad else plain  # the clone may be changed in place


@contextmanager
def _taken_apart(model: nn.Module) -> Iterator[None]:
    """Context that decomposes attention, recurrent and checkpointed layers into products; in one thread, as samples are small."""
    backends: list[Any] = [torch.backends.mkldnn, torch.backends.cudnn]
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    checkpoint: Any = torch.utils.checkpoint
    with ExitStack() as stack:
        for backend in backends:
            stack.callback(setattr, backend, "enabled", backend.enabled)
            backend.enabled = backend.enabled and not recurrent
        stack.callback(setattr, checkpoint, "CheckpointFunction", checkpoint.CheckpointFunction)
        checkpoint.CheckpointFunction = _NotCheckpointed
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # contending threads on a busy machine can be a hundred times slower
        with sdpa_kernel([SDPBackend.MATH]), _eagerly(model):
            yield


class _NotCheckpointed:
    """Reentrant checkpointing without the checkpoints, in which the recorder would see no tensor that requires a gradient."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *arguments: Any) -> Any:
        return function(*arguments)


def _eagerly(model: nn.Module) -> AbstractContextManager[None]:
    """Context that runs compiled functions eagerly, so that the recorder is not compiled with them."""
    # an attribute of quantizer.TensorQuantizer
    compiles = any(getattr(module, "compile_kernel", False) for module in model.modules())
    if not compiles and "torch._dynamo" not in sys.modules:  # importing the compiler takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextmanager
def _follow_modules(model: nn.Module, recorder: "_Recorder") -> Iterator[None]:
    """Context in which the recorder tracks the running module."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(followed(module, partial(recorder.enter, module), partial(recorder.leave, module)))
        yield


class _Recorder(TorchDispatchMode):
    """Records operations at the dispatcher and tracks the tensors that depend on the input."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the compiler takes seconds to import

    def __init__(self, model: nn.Module, inputs: list[Tensor]) -> None:
        super().__init__()
        self.module_names = {module: name or type(module).__name__ for name, module in model.named_modules()}
        self.operations: list[Operation] = []
        self.counts: Counter[str] = Counter()
        self.stack: list[nn.Module] = []
        self.calls: Counter[str] = Counter()
        self.warned: set[str] = set()
        self.from_input = WeakTensorKeyDictionary()
        self._mark(inputs)

    def enter(self, module: nn.Module, *_: Any) -> None:
        self.stack.append(module)

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if isinstance(module, (nn.AvgPool2d, nn.AdaptiveAvgPool2d)) and isinstance(output, Tensor):
            self.counts["pooled_inputs"] += (*inputs, *keywords.values())[0].numel()
            self.counts["pooled_outputs"] += output.numel()
        self.stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func.overloadpacket in _BATCH_NORMS and args[0].is_meta:  # its Python reference would take milliseconds
            output: Any = (torch.empty_like(args[0]), *(args[0].new_empty(0) for _ in func._schema.returns[1:]))
        else:
            output = func(*args, **keywords)
        if not (self.stack and getattr(self.stack[-1], "is_quantizer", False)):  # a quantizer.TensorQuantizer
            self._record(func, args, keywords, output)
        if any(tensor in self.from_input for tensor in _tensors((args, keywords))):
            self._mark(_tensors(output))
        return output

    def _mark(self, tensors: list[Tensor]) -> None:
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
            self._add_unknown(unknown, _tensors(args), _tensors(output))

    def _add_product(self, product: Product) -> None:
        module = self.stack[-1]
        moving, held, second = product.moving, product.held, product.second
        wanted = torch.is_grad_enabled() or moving.requires_grad  # gradients are disabled where features are frozen
        options = getattr(module, "quantizer_options", None)  # a quantizer.QuantizerOptions
        # a layer.QuantizedMatrixProduct, one of whose operands may be learned, as queries are
        kind = "matmul" if hasattr(module, "left_quantizer") else product.kind
        self.operations.append(
            Operation(
                name=self._next_name(module),
                kind=kind,
                macs=product.macs,
                product=product.shape,
                groups=product.groups,
                input_positions=product.input_positions,
                input_elements=moving.numel() + (held.numel() if kind == "matmul" else 0),
                output_elements=product.output.numel(),
                input_gradients=moving.requires_grad + (second is not None and second.requires_grad),
                fixed_precision=_fixed_precision(module),
                needs_weight_gradient=held.requires_grad and wanted,
                storage=_storage(module, options),
                backward_at_gradient_bits=getattr(options, "backward_bits", "forward") == "gradient",
            )
        )

    def _add_unknown(self, unknown: Unknown, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        name = self._next_name(self.stack[-1])
        needs_gradient = any(tensor.requires_grad for tensor in inputs)
        macs = unknown.macs or 0
        self.operations.append(
            Operation(
                name=name,
                kind="unknown",
                macs=macs,
                product=ProductShape(1, 1, macs),
                groups=1,
                input_positions=1,
                input_elements=sum(tensor.numel() for tensor in inputs),
                output_elements=sum(tensor.numel() for tensor in outputs),
                input_gradients=int(needs_gradient),
                fixed_precision=FLOAT_PRECISION,
                needs_weight_gradient=needs_gradient,
            )
        )
        if unknown.name not in self.warned:
            self.warned.add(unknown.name)
            counted, hint = f"counted as {macs} float32 products", ""
            if unknown.macs is None:
                counted = "not counted in the cost"
                hint = "; give its formula with torch.utils.flop_counter.register_flop_formula"
            message = f"{unknown.name} in {name!r} is arithmetic unknown to the cost models: {counted}{hint}"
            warnings.warn(message, stacklevel=2)

    def _next_name(self, module: nn.Module) -> str:
        """The name of a module's next operation."""
        name = self.module_names[module]
        self.calls[name] += 1
        return f"{name}#{self.calls[name]}" if self.calls[name] > 1 else name

    def workload(self, samples: int) -> Workload:
        return Workload(tuple(self.operations), samples, **self.counts)


def _tensors(values: Any) -> list[Tensor]:
    """All tensors in (nested) arguments or results."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _fixed_precision(module: nn.Module) -> Precision | None:
    """Bits of a layer with fixed precision, float32 for a layer that is not quantized, None for a scheduled layer."""
    # a layer.PrecisionState; found by attribute, as `hardware` does not import `layer`
    state = getattr(module, "precision", None)
    if state is None or not hasattr(state, "fixed"):
        return FLOAT_PRECISION
    return state.precision if state.fixed else None


def _storage(module: nn.Module, options: Any) -> tuple[Mapping[int, Fraction], ...]:
    """Scheduled bits -> stored bits, for each role; empty where both are equal."""
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
