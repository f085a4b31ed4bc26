"""The quantized counterpart of a layer, also of a class that is derived from PyTorch's and computes the same.

A class derived from a linear layer or a convolution has the counterpart of its base if it defines at most a constructor, initial
weights and a description, and has no other parameters. A class derived from nn.Linear may also define forward, as Falcon's does,
if that takes no other argument and returns x W^T + b for random inputs, in training as in evaluation, and for small, usual and
large numbers, so that limits and thresholds show. All others (noise, scaled weights, adapters) may compute something else and
stay float, as do layers with complex weights and those without inputs or outputs.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from bitcycle.layer.conversion.untouched import untouched
from bitcycle.layer.products.quantized import CONVERSIONS
from bitcycle.layer.products.quantized_product import Quantized

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
    if not own <= _HARMLESS or state != {"weight", "bias"}:
        return None
    return CONVERSIONS[base] if "forward" not in own or (base is nn.Linear and _multiplies(module)) else None


_TRIED: tuple[tuple[float, tuple[int, ...]], ...] = ((1.0, (3,)), (1.0, (2, 3)), (1e-3, (3,)), (1e3, (3,)))
"""Factors of inputs, weights and biases, with the leading sizes of inputs."""


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


_ARGUMENTS = [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2
"""Kinds of the arguments of a forward that takes one input: self and that."""


def _multiplies(layer: nn.Module) -> bool:
    """Whether a layer with a weight and a bias computes x W^T + b and keeps them, tried with random inputs and a random bias."""
    try:
        if [argument.kind for argument in inspect.signature(type(layer).forward).parameters.values()] != _ARGUMENTS:
            return False  # a converted layer would refuse the others, or take them for a bias
        with torch.no_grad(), untouched(layer):
            return all(_is_linear(layer, *case, mode) for case in _TRIED for mode in (True, False))
    except Exception:  # other arguments, types or shapes: not a linear layer
        return False


def _is_linear(layer: nn.Module, factor: float, sizes: tuple[int, ...], training: bool) -> bool:
    """Whether the forward of the layer's class is linear in this case; computed by a layer with copies of its tensors."""
    generator = torch.Generator().manual_seed(0)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if weight.is_meta or not bool(weight.any()):
        weight = torch.randn(weight.shape, generator=generator)
    weight = factor * weight.detach().to("cpu", torch.float32)
    bias = None if layer.bias is None else factor**2 * torch.randn(len(weight), generator=generator)
    x = factor * torch.randn(*sizes, weight.shape[1], generator=generator)
    expected = nn.functional.linear(x, weight, bias)
    probe: Any = type(layer).__new__(type(layer))
    operands = {"weight": weight.clone(), "bias": None if bias is None else bias.clone()}
    probe.__dict__.update(vars(layer), _parameters=operands, training=training)
    vars(probe).pop("forward", None)  # assigned to the layer, whose tensors it would use
    y = probe.forward(x.clone())
    changed = not torch.equal(probe.weight, weight) or (bias is not None and not torch.equal(probe.bias, bias))
    tolerance = 1e-4 * float(expected.abs().max())
    return not changed and y.shape == expected.shape and torch.allclose(y, expected, rtol=0, atol=tolerance)
