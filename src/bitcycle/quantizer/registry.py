"""Every quantizer by its name, and `quantize` for a single tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bitcycle.quantizer.base import ROLES, QuantizerOptions
from bitcycle.quantizer.sbm import Sbm
from bitcycle.randomness import int32_key
from bitcycle.schedule import FLOAT
from bitcycle.settings import SettingError, nearest


@dataclass
class NoQuantizer(QuantizerOptions):
    """No quantization: the model stays as it is and trains in float32. The baseline of accuracy and speed."""

    name: str = "none"


QUANTIZERS: dict[str, type[QuantizerOptions]] = {"sbm": Sbm, "none": NoQuantizer}
"""Quantizer name -> its options; `conf/quantizer/NAME.yaml` is the same."""


def quantizer_options(quantizer: str | QuantizerOptions) -> QuantizerOptions:
    """The options of a quantizer given by name, or the options themselves.

    Raises:
        SettingError (a ValueError): for an unknown name.
    """
    if isinstance(quantizer, QuantizerOptions):
        return quantizer
    if quantizer not in QUANTIZERS:
        raise SettingError("quantizer", quantizer, "is not a known quantizer", nearest(quantizer, QUANTIZERS))
    return QUANTIZERS[quantizer]()


def encode_bits(bits: int) -> int:
    """Bits as the quantizers read them: 0 stands for float32, so 32 (and 0) become 0.

    Raises:
        SettingError (a ValueError): below 0 or above 32.
    """
    if not 0 <= bits <= FLOAT:
        raise SettingError("bits", bits, "is outside the range of a precision", "use 1 to 32, where 32 means float32")
    return 0 if bits == FLOAT else int(bits)


def quantize(
    x: Tensor,
    bits: int,
    quantizer: str | QuantizerOptions = "sbm",
    role: str = "activation",
    stochastic: bool = True,
    seed: int = 0,
) -> Tensor:
    """Quantize one tensor as a layer would: an activation or gradient of a batch in training, or a weight.

    Args:
        x: float tensor; a weight has its output channels in dimension 0.
        bits: 1 to 31; 32 (or 0) returns x.
        quantizer: name or options.
        role: activation, weight or gradient.
        stochastic: False gives the deterministic version of a stochastic rounding.
        seed: of the noise, where rounding is stochastic.

    Raises:
        SettingError (a ValueError): for an unknown quantizer or role, or bits out of range.
    """
    options = quantizer_options(quantizer)
    if role not in ROLES:
        raise SettingError("role", role, "is not a role of a tensor", nearest(role, ROLES))
    encoded = torch.tensor(encode_bits(bits), device=x.device)
    if isinstance(options, NoQuantizer):
        return x
    if role == "gradient":
        if isinstance(options, Sbm) and not stochastic:
            options = replace(options, stochastic=False)
        key = torch.tensor(int32_key(seed), dtype=torch.int32, device=x.device)
        y = torch.zeros_like(x, requires_grad=True)
        options.gradient(compile=False)(y, encoded, key, torch.zeros_like(key)).backward(x)
        assert y.grad is not None
        return y.grad
    module = options.weight(compile=False) if role == "weight" else options.activation(compile=False)
    return module.to(x.device)(x, encoded)  # type: ignore[no-any-return]
