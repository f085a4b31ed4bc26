"""The precision that layers read at every forward pass, held in small tensors shared by all layers of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitcycle.quantizer import encode_bits
from bitcycle.schedule import Precision


class PrecisionState(nn.Module):
    """Current bits of weights, activations and gradients (0 = float32) and the key of the current step's noise.

    Bits are tensors, so that changing them neither rebuilds a module nor recompiles a kernel. `fixed` holds bits that no
    schedule changes, `noise_key` tells apart the noise of states that one layer uses in the same step. Not part of a model's
    state dict: the schedule and the step determine it.
    """

    weight_bits: Tensor
    activation_bits: Tensor
    gradient_bits: Tensor
    step_key: Tensor
    sample_mask: Tensor | None
    """[N], 1 for samples whose gradients pass through the layers that run now, 0 for others; None: all pass."""

    def __init__(self, precision: Precision = Precision(8, 8, 8), fixed: bool = False, noise_key: int = 0) -> None:
        super().__init__()
        self.fixed, self.noise_key, self.sample_mask = fixed, noise_key, None
        for role in ("weight", "activation", "gradient"):
            self.register_buffer(f"{role}_bits", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("step_key", torch.zeros((), dtype=torch.int32), persistent=False)
        self.set(precision)

    def set(self, precision: Precision) -> None:
        """Use `precision` from the next forward pass on.

        Where weights and activations are float, gradients are too, whatever their bits: as in the released code, whose
        float phase is an ordinary convolution.

        Raises:
            SettingError (a ValueError): for bits below 0 or above 32.
        """
        weight, activation, gradient = (encode_bits(bits) for bits in precision)
        self.precision = precision
        self.weight_bits.fill_(weight)
        self.activation_bits.fill_(activation)
        self.gradient_bits.fill_(gradient if weight or activation else 0)

    def extra_repr(self) -> str:
        return f"{self.precision}{', fixed' if self.fixed else ''}"
