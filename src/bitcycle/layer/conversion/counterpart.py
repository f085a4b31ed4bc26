"""The quantized counterpart of a layer, also of a class that is derived from PyTorch's and computes the same.

A class derived from a linear layer or a convolution has the counterpart of its base if it defines at most a constructor, initial
weights and a description, and has no other parameters. A class derived from nn.Linear may also define forward, as Falcon's does,
if that takes no other argument and returns x W^T + b for random inputs, in training as in evaluation, and for small, usual and
large numbers, so that limits and thresholds show. Other classes without further parameters that call PyTorch's function once
with their weight, which they leave as it is, keep their methods, and that call computes the quantized product: padding, noise
and limits before it, normalization and activations after it (detectron2, efficientnet_pytorch). So do those that call it with a
weight of the same shape that they compute from their own, as standardized weights (NF-ResNet, BiT), also with further parameters:
the computed weight is quantized. Weights that are masked or quantized already, with fewer values than the layer's own, stay
float, as do all others (adapters), layers with complex weights and those without inputs or outputs.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.overrides import TorchFunctionMode

from bitcycle.layer.conversion.by_function import PRODUCTS, quantized_with_own_forward
from bitcycle.layer.conversion.untouched import untouched
from bitcycle.layer.products.quantized import CONVERSIONS
from bitcycle.layer.products.quantized_product import Quantized

T = TypeVar("T")

_PLAIN = frozenset(vars(type("Plain", (nn.Module,), {"__doc__": "", "__annotations__": {}})))
_HARMLESS = _PLAIN | {
    *("__init__", "reset_parameters", "extra_repr", "forward", "__constants__", "__annotations_cache__"),
    *("__annotate__", "__annotate_func__", "__firstlineno__", "__parameters__", "__static_attributes__"),
}
"""Attributes of a derived class that do not change what its instances compute; forward is tried."""


def counterpart(module: nn.Module) -> type[nn.Module] | None:
    """The class that replaces `module` in a converted model; None if it has none."""
    kind = type_before_parametrizations(module)
    if is_complex(module) or is_empty(module):
        return None
    if kind in CONVERSIONS:
        return CONVERSIONS[kind]
    if not isinstance(module, nn.Linear | nn.modules.conv._ConvNd) or is_parametrized(module):
        return None
    # nn.MultiheadAttention reads the weight of the second
    if isinstance(module, Quantized | NonDynamicallyQuantizableLinear):
        return None
    base = next((base for base in kind.__mro__ if base in CONVERSIONS), None)
    if base is None or getattr(module, "stays_float", False):  # a module.FloatLinear
        return None
    own = {name for derived in kind.__mro__[: kind.__mro__.index(base)] for name in vars(derived)}
    state = {*module._parameters, *module._buffers, *module._modules}
    if not {"weight", "bias"} <= state:
        return None
    has_more = not state - {"weight", "bias"} <= {*module._modules}
    if (
        own <= _HARMLESS
        and not module._modules
        and not has_more
        and ("forward" not in own or (base is nn.Linear and _multiplies(module) and not _casts(module)))
    ):
        return CONVERSIONS[base]
    return _with_own_forward(module, has_more) if base in _CALLING else None


_CALLING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Bases of classes with methods of their own that may call PyTorch's function."""
_TRIED: tuple[tuple[float, tuple[int, ...]], ...] = ((1.0, (3,)), (1.0, (2, 3)), (1e-3, (3,)), (1e3, (3,)))
"""Factors of inputs, weights and biases, with the leading sizes of inputs."""
_FEW = 16
"""Inputs and outputs with which layers are tried first."""


def is_complex(module: nn.Module) -> bool:
    """Whether a module has complex weights, which no quantizer rounds."""
    return any(parameter.is_complex() for parameter in module.parameters(recurse=False))


def is_empty(module: nn.Module) -> bool:
    """Whether a module has no weight where its class has one (weight=False), or one without elements, as of no outputs; a weight
    that waits for its first input is none."""
    own = module._parameters  # of a scripted module, no dictionary
    if "weight" in own and own["weight"] is None:
        return True
    return any(type(value) is nn.Parameter and not value.numel() for value in module.parameters(recurse=False))


def _multiplies(layer: nn.Module) -> bool:
    """Whether a layer with a weight and a bias computes x W^T + b and keeps them, tried with random inputs and a random bias."""
    cases = [(*case, mode) for case in _TRIED for mode in (True, False)]
    return bool(
        _tried(layer, lambda most: _takes_input(layer) and all(_is_linear(layer, *case, most) for case in cases))
    )


def _casts(layer: nn.Module) -> bool:
    """Whether the forward of a layer casts its weight to the type of the input."""

    def in_half(most: int | None) -> bool:
        if most is None:  # which is tried next if it fails with few, as most layers do
            return False
        probe, weight, _ = _probe(layer, 1.0, False, torch.Generator().manual_seed(0), most)
        return bool(probe.forward(torch.ones(1, weight.shape[1], dtype=torch.bfloat16)).dtype == torch.bfloat16)

    return bool(_tried(layer, in_half))


def _takes_input(layer: nn.Module) -> bool:
    """Whether it takes nothing else: a converted layer would refuse other arguments, or take them for a bias."""
    arguments = inspect.signature(type(layer).forward).parameters.values()
    return [argument.kind for argument in arguments] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2  # self is one


def _tried(layer: nn.Module, attempt: Callable[[int | None], T]) -> T | None:
    """The result of an attempt with few inputs and outputs, or with all if the methods of the layer do not take fewer; None
    if both fail. With all of them, the layers of a language model would take minutes."""
    for most in (_FEW, None):
        try:
            with torch.no_grad(), untouched(layer):
                return attempt(most)
        except Exception:  # other arguments, types or shapes
            continue
    return None


def _is_linear(layer: nn.Module, factor: float, sizes: tuple[int, ...], training: bool, most: int | None) -> bool:
    """Whether the forward of the layer's class is linear in this case; computed by a layer with copies of its tensors."""
    generator = torch.Generator().manual_seed(0)
    probe, weight, bias = _probe(layer, factor, training, generator, most)
    x = factor * torch.randn(*sizes, weight.shape[1], generator=generator)
    expected = nn.functional.linear(x, weight, bias)
    y = probe.forward(x.clone())
    tolerance = 1e-4 * float(expected.abs().max())
    is_same = y.shape == expected.shape and torch.allclose(y, expected, rtol=0, atol=tolerance)
    return is_same and not _is_changed(probe, weight, bias)


def _with_own_forward(layer: nn.Module, has_more: bool) -> type[nn.Module] | None:
    """The counterpart of a layer derived from a linear layer or a convolution that calls PyTorch's function once, with the weight
    that it keeps, or with one computed from it, tried with random inputs; None for others. Other parameters and buffers than
    weight and bias are allowed only with a computed weight."""
    cases = [(factor, mode) for factor in (1.0, 1e-3, 1e3) for mode in (True, False)]
    calls = _tried(layer, lambda most: [_calls(layer, *case, most) for case in cases])
    weights = {case.weight for case in calls or ()}
    if weights != {"computed"} and (has_more or weights != {"own"}):
        return None
    kind: Any = type(layer)
    return quantized_with_own_forward(kind, any(case.pads for case in calls or ()), "computed" in weights)


def _calls(layer: nn.Module, factor: float, training: bool, most: int | None) -> _Calls:
    """The calls of such a layer in this case."""
    generator = torch.Generator().manual_seed(0)
    probe, weight, bias = _probe(layer, factor, training, generator, most)
    if isinstance(layer, nn.modules.conv._ConvNd):
        widths = zip(layer.kernel_size, layer.dilation, layer.stride, strict=True)
        extent = [dilation * (kernel - 1) + 1 + 2 * stride for kernel, dilation, stride in widths]
        sizes = (2, probe.in_channels, *extent)
    else:
        sizes = (2, weight.shape[1])
    with torch.enable_grad(), _Calls() as calls:
        probe.weight.requires_grad_()
        probe.forward(factor * torch.randn(sizes, generator=generator))
    if len(calls.weights) == 1 and not _is_changed(probe, weight, bias):
        calls.weight = _kind_of(calls.weights[0], probe.weight)
    return calls


def _kind_of(given: Tensor, own: Tensor) -> str:
    """Whether a weight is the layer's own, or computed from it with almost as many values; empty if it is neither."""
    if given is own:
        return "own"
    is_computed = given.requires_grad and given.shape == own.shape
    return "computed" if is_computed and len(given.unique()) >= _VALUES_KEPT * len(own.unique()) else ""


_VALUES_KEPT = 0.9
"""Share of the different values of a weight that one computed from it has: a mask or a quantizer keeps fewer."""


class _Calls(TorchFunctionMode):
    """Records the weights with which the functions of layers are called, and whether F.pad is."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []
        self.pads = False
        self.weight = ""
        """Of which kind the weight of the only call is; empty if there is none of use."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func in PRODUCTS:
            self.weights.append(args[1] if len(args) > 1 else keywords["weight"])
        self.pads = self.pads or func is nn.functional.pad
        return func(*args, **keywords)


def _probe(
    layer: nn.Module, factor: float, training: bool, generator: torch.Generator, most: int | None
) -> tuple[Any, Tensor, Tensor | None]:
    """A layer with float32 copies of the tensors of `layer` on the CPU, which are returned, too: its weight, times a factor, and
    a random bias; with `most` inputs and outputs, or groups and inputs and outputs of each."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    groups = int(getattr(layer, "groups", 1))
    fewer = groups if most is None else min(groups, most)
    in_group = None if most is None else max(1, min(most // fewer, len(weight) // groups))
    weight = weight[: None if in_group is None else fewer * in_group, :most]
    if weight.is_meta or not bool(weight.any()):
        weight = torch.randn(weight.shape, generator=generator)
    weight = factor * weight.detach().to("cpu", torch.float32)
    bias = None if layer.bias is None else factor**2 * torch.randn(len(weight), generator=generator)
    probe: Any = type(layer).__new__(type(layer))
    operands = {"weight": weight.clone(), "bias": None if bias is None else bias.clone()}
    others = {name: _part(value, layer, len(weight), generator) for name, value in layer._parameters.items()}
    buffers = {name: None if value is None else _copied(value) for name, value in layer._buffers.items()}
    modules = {
        name: None if part is None else copy.deepcopy(part).to("cpu", torch.float32)
        for name, part in layer._modules.items()
    }
    probe.__dict__.update(
        vars(layer), _parameters=others | operands, _buffers=buffers, _modules=modules, training=training
    )
    if isinstance(layer, nn.Linear):
        vars(probe).update(out_features=len(weight), in_features=weight.shape[1])
    else:
        vars(probe).update(out_channels=len(weight), in_channels=fewer * weight.shape[1], groups=fewer)
    vars(probe).pop("forward", None)  # assigned to the layer, whose tensors it would use
    return probe, weight, bias


def _part(parameter: Tensor | None, layer: nn.Module, outputs: int, generator: torch.Generator) -> Tensor | None:
    """A copy of a parameter, for the first outputs only if it has one value or more for each; random if it is zero, as gains
    are at first where a block begins as the identity."""
    if parameter is None:
        return None
    if parameter.dim() and len(parameter) == len(cast(Tensor, layer.weight)):
        parameter = parameter[:outputs]
    if parameter.is_meta or not bool(parameter.any()):
        return torch.randn(parameter.shape, generator=generator)
    return _copied(parameter)


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU, in float32 if the tensor has real numbers."""
    return tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype).clone()


def _is_changed(probe: Any, weight: Tensor, bias: Tensor | None) -> bool:
    return not torch.equal(probe.weight, weight) or (bias is not None and not torch.equal(probe.bias, bias))
