"""The forward passes of training: which calls they are, their samples, and the products that the first step computes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitcycle.hardware import Workload
from bitcycle.layer.compilation import not_compiled
from bitcycle.layer.conversion.counterpart import counterpart
from bitcycle.layer.conversion.roles import PRODUCT_LAYERS
from bitcycle.layer.products.quantized import NOTICED_SHARE, QuantizedLayer
from bitcycle.layer.products.quantized_product import QuantizedProduct
from bitcycle.layer.state import PrecisionState
from bitcycle.precision import FLOAT, Precision
from bitcycle.settings import SettingError

logger = logging.getLogger(__name__)

ELEMENT_COUNTS = [field.name for field in fields(Workload) if field.name not in ("operations", "samples")]
_LAYERS = (QuantizedProduct, *PRODUCT_LAYERS)


class Call(NamedTuple):
    """A forward pass of a part of the model, and what its products depend on besides the shapes within a sample."""

    part: str
    samples: int
    passes_gradient: bool
    is_trained: tuple[bool, ...]


class FirstStep:
    """The calls of the first training step, whose products represent those of every step.

    Samples are those of the part that is called first. If training calls several parts (a GAN, an encoder and a decoder), or has
    told another number of samples than its calls have (a batch of two views, or with time in dimension 0), the workload lists the
    products of all calls of the step.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.workloads: dict[Call, Workload] = {}
        self.sizes: dict[str, tuple[int, ...]] = {}

    @property
    def has_parts(self) -> bool:
        """Whether several parts have been called."""
        return len({call.part for call in self.calls}) > 1

    def counts(self, part: str) -> bool:
        """Whether the samples of this part's calls are counted."""
        return part == self.calls[0].part

    def change(self, part: str, is_trained: tuple[bool, ...]) -> str:
        """How a later call of `part` differs from those of the first step, in words; empty: it does not."""
        change = ""
        if part not in {call.part for call in self.calls}:
            change = f"training calls {part!r} after the first step only, and the cost omits its products"
        elif not self.has_parts and is_trained != self.calls[0].is_trained:
            whose = "whose products the cost counts for all steps"
            change = f"parameters have been frozen or unfrozen since the first batch, {whose}"
        return change and f"{change}; for other counts, use a new controller from that step on"

    def resizing(self, part: str, sizes: tuple[int, ...]) -> str:
        """How the input of a call of `part` differs from that of its first one, in words; empty: it has the same sizes."""
        if (known := self.sizes.setdefault(part, sizes)) == sizes:
            return ""
        first, now = (f"[{', '.join(('*', *map(str, shape)))}]" for shape in (known, sizes))
        remedy = "begin with a batch of the usual size, or give workload=bitcycle.hardware.trace(model, batch) and"
        words = f"the cost counts every batch as one of the first one's shape, {first}, and this one has {now}"
        return f"{words}; {remedy} step(t, samples=...)"

    def add(self, call: Call, traced: Callable[[], Workload]) -> None:
        """Add a call, whose products are `traced` unless those of such a call are known."""
        self.calls.append(call)
        if call not in self.workloads:
            self.workloads[call] = traced()

    def workload(self, given: float) -> Workload:
        """The products of the step; `given`: its samples in this process, 0 if not known."""
        seen = sum(call.samples for call in self.calls if self.counts(call.part))
        if not self.has_parts and (not given or abs(seen - given) < 1):  # shards of a batch differ by one sample
            return self.workloads[self.calls[0]]
        workloads = [self.workloads[call] for call in self.calls]
        operations, numbers = [], Counter[str]()
        for operation in (o for workload in workloads for o in workload.operations):
            numbers[operation.module] += 1
            suffix = f"#{numbers[operation.module]}" if numbers[operation.module] > 1 else ""
            operations.append(replace(operation, name=operation.module + suffix))
        samples = max(round(given), 1) if given else seen
        counts = {name: sum(getattr(workload, name) for workload in workloads) for name in ELEMENT_COUNTS}
        return Workload(tuple(operations), samples, **counts)


class Watch:
    """Hooks on a part of a model, which tell a controller of its calls. In a copy of the model they do nothing."""

    def __init__(
        self, begin: Callable[..., None] | None = None, end: Callable[..., None] | None = None, part: str = ""
    ) -> None:
        self.begin, self.end, self.part = begin, end, part

    @not_compiled
    def before(self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self.begin is not None:
            self.begin(model, arguments, keywords, self.part)

    @not_compiled
    def after(self, model: nn.Module, *_: Any) -> None:
        if self.end is not None:
            self.end(model)

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        return Watch, ()


def products_of(model: nn.Module) -> dict[str, QuantizedProduct]:
    """The quantized products of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedProduct)}


def layers_outside(model: nn.Module, states: Iterable[PrecisionState]) -> list[str]:
    """Layers that read the bits of a model's states, except fixed ones, and are no part of it, by their names at conversion."""
    own = set(model.modules())
    readers = (reader for state in states if not state.fixed for reader in state.readers)
    return sorted(reader.name for reader in readers if reader not in own)


def called_parts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules, by name, whose outermost calls are the forward passes of training: the model and, if training calls its
    parts instead (in Lightning, or a ModuleDict), the smallest one with all products, or parts of that."""
    if not hasattr(model, "training_step") and not _is_container(model):
        return {"": model}
    core = _core(model)
    parts = {model, core, *_parts(core)}
    return {name: module for name, module in model.named_modules() if module in parts}


def _core(model: nn.Module) -> nn.Module:
    """The smallest submodule that contains all layers with products."""
    parts = list(_parts(model))
    return _core(parts[0]) if len(parts) == 1 and not isinstance(parts[0], _LAYERS) else model


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The submodules that have or contain layers with products; of containers, theirs. Compiled modules are whole."""
    for child in () if hasattr(module, "_orig_mod") else module.children():
        if _is_container(child):
            yield from _parts(child)
        elif any(isinstance(part, _LAYERS) for part in child.modules()):
            yield child


def _is_container(module: nn.Module) -> bool:
    """Whether the module cannot be called, as a ModuleList."""
    return getattr(module.forward, "__func__", None) is nn.Module.forward


def name_functions(model: nn.Module, workload: Workload) -> None:
    """Warn of products of functions (linear, einsum, scaled_dot_product_attention), which conversion cannot reach; not of sums
    over neighbours in a graph, which no layer of PyTorch computes."""
    modules, found = dict(model.named_modules()), Counter[str]()
    for operation in workload.operations:
        module = modules.get(operation.module)
        is_layer = isinstance(module, PRODUCT_LAYERS) or (module is not None and counterpart(module) is not None)
        if operation.is_float and operation.macs and not is_layer and operation.kind not in ("aggregation", "unknown"):
            found[operation.module] += operation.macs
    share = sum(found.values()) / max(workload.macs, 1)
    if share > NOTICED_SHARE and any(isinstance(module, QuantizedProduct) for module in modules.values()):
        logger.warning(
            "%.0f %% of the multiply-accumulates are computed by functions and stay float, mostly in %s; use modules such as"
            " nn.Linear, nn.MultiheadAttention and bitcycle.layer.MatrixProduct to quantize them",
            *(100 * share, ", ".join(name for name, _ in found.most_common(3))),
        )


def name_zero_weights(model: nn.Module, lowest: Precision) -> None:
    """Warn of layers whose weights are all zero at the lowest bits of a schedule, with a quantizer whose steps do not adapt."""
    names = []
    for name, layer in products_of(model).items():
        bits = layer.precision.precision.weight if layer.precision.fixed else lowest.weight
        if not isinstance(layer, QuantizedLayer) or layer.computes_weight or bits == FLOAT:
            continue
        if not layer.weight_quantizer.has_fixed_steps:
            continue
        weight = layer.rows_of(layer.weight.detach())
        if not weight.is_meta and not layer.weight_quantizer(weight, torch.tensor(bits, device=weight.device)).any():
            names.append(name or type(layer).__name__)
    if names:
        logger.warning(
            "all weights of %d layers are zero at their lowest bits, as they are below half a step: %s; raise q_min,"
            " initialise them larger, or use a quantizer whose steps follow the weights, as sbm",
            *(len(names), ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")),
        )


def samples_of(arguments: tuple[Any, ...], keywords: dict[str, Any], dimension: int, given: int = 0) -> int:
    """Samples of a batch: the length of a list of images, or of a dimension of the first non-scalar tensor; `given` if the
    arguments, such as objects of other libraries, have no tensor."""
    tensors = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
    if not tensors and given:
        return given
    if not tensors:
        raise RuntimeError(
            "cannot tell the batch size: the model's forward pass has no tensor; give step(t, samples=...)"
        )
    images, *others = *arguments, *keywords.values()
    if isinstance(images, (list, tuple)) and images and all(isinstance(x, Tensor) and x.dim() == 3 for x in images):
        targets = (other for other in others if isinstance(other, (list, tuple)) and len(other) == len(images))
        if isinstance(images, list) or any(all(isinstance(x, dict) for x in other) for other in targets):
            return len(images)  # as in torchvision's detectors; other tuples are one input of several sequences
    if dimension and dimension >= max(tensor.dim() for tensor in tensors):
        problem, remedy = "is no dimension of the forward pass's tensors", "use 0, or give step(t, samples=...)"
        raise SettingError("batch_dimension", dimension, problem, remedy)
    return next((int(tensor.shape[dimension]) for tensor in tensors if tensor.dim() > dimension), 1)


def sizes_of(arguments: tuple[Any, ...], keywords: dict[str, Any], dimension: int) -> tuple[int, ...]:
    """The sizes of the first tensor among the arguments with this dimension, that of samples, without it; none of a list."""
    tensors = (leaf for leaf in (*arguments, *keywords.values()) if isinstance(leaf, Tensor) and leaf.dim() > dimension)
    shape = next((tuple(tensor.shape) for tensor in tensors), ())
    return (*shape[:dimension], *shape[dimension + 1 :])
