"""The quantizers by name, and `quantize` for a single tensor."""

from dataclasses import dataclass, replace
from numbers import Integral

import torch
from torch import Tensor

from bitcycle.precision import FLOAT
from bitcycle.presets import Presets
from bitcycle.quantizer.base import ROLES, QuantizerOptions
from bitcycle.randomness import int32_key
from bitcycle.settings import SettingError, nearest

OUTSIDE, REMEDY = "is outside the range of a precision", "use 1 to 32, where 32 means float32"


@dataclass
class NoQuantizer(QuantizerOptions):
    """No quantization: the model trains in float32. The baseline of accuracy and speed."""

    name: str = "none"


QUANTIZERS: Presets[QuantizerOptions] = Presets("quantizer")
"""Quantizer name -> its options."""


def quantizer_options(quantizer: str | QuantizerOptions) -> QuantizerOptions:
    """The options of a quantizer given by name, or the options themselves. Raises SettingError for an unknown name."""
    return quantizer if isinstance(quantizer, QuantizerOptions) else QUANTIZERS.chosen(quantizer)()


def encode_bits(bits: int) -> int:
    """Bits in the quantizers' encoding, where 0 denotes float32: 32 (and 0) become 0. Raises SettingError outside of 0 to 32."""
    given: object = bits
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise SettingError("bits", bits, "is not a whole number", REMEDY)
    if not 0 <= bits <= FLOAT:
        raise SettingError("bits", bits, OUTSIDE, REMEDY)
    return 0 if bits == FLOAT else int(bits)


def quantize(
    x: Tensor,
    bits: int,
    quantizer: str | QuantizerOptions = "sbm",
    role: str = "activation",
    stochastic: bool = True,
    seed: int = 0,
    signed: bool = False,
) -> Tensor:
    """Quantize one tensor as a layer does in training: a weight, or an activation or gradient of a batch.

    With SBM and b bits:  y = D round((x - low) / D) + low,  D = (high - low) / (2^b - 1),  with one range [low, high] per tensor
    (activations: per batch), per output channel (weights), or per tensor with stochastic rounding (gradients).

    >>> quantize(torch.tensor([0.0, 0.2, 0.45, 1.0]), bits=2)
    tensor([0.0000, 0.3333, 0.3333, 1.0000])

    Args:
        x: float tensor; a weight has its output channels in dimension 0, activations and gradients their samples.
        bits: bits that the quantizer supports, 1 to 31 with SBM; 32 returns x.
        quantizer: name or options.
        role: activation, weight or gradient.
        stochastic: False: round to nearest instead of stochastically.
        seed: seed of stochastic rounding.
        signed: whether an activation is not the output of a ReLU.

    Raises:
        SettingError (a ValueError): for an unknown quantizer or role, bits that the quantizer does not support, or x that is not
            a floating-point tensor.
    """
    options = quantizer_options(quantizer)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise SettingError("x", kind, "is not a tensor of floating-point numbers", "convert it, e.g. by x.float()")
    if role not in ROLES:
        raise SettingError("role", role, "is not a role of a tensor", nearest(role, ROLES))
    number = encode_bits(bits)
    if bits == 0:  # which is float32 in the encoding only
        raise SettingError("bits", bits, OUTSIDE, REMEDY)
    encoded = torch.tensor(number, device=x.device)
    options.check_bits(role, bits)
    if isinstance(options, NoQuantizer) or not x.numel():
        return x
    if not x.dim():
        return quantize(x.view(1), bits, options, role, stochastic, seed, signed).view(())
    if role == "gradient":
        if hasattr(options, "stochastic") and not stochastic:
            options = replace(options, stochastic=False)  # type: ignore[call-arg]
        key = torch.tensor(int32_key(seed), dtype=torch.int32, device=x.device)
        return options.gradient(compile=False).quantize(x, encoded, key, torch.zeros_like(key))
    module = options.weight(compile=False) if role == "weight" else options.activation(compile=False, signed=signed)
    module.to(x.device).prepare(x.detach(), number)
    y: Tensor = module(x, encoded)
    return y if x.requires_grad else y.detach()
