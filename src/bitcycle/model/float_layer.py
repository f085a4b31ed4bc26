"""Layers that are never quantized, whatever the quantizer's rule for float layers."""

from torch import nn


class FloatLinear(nn.Linear):
    """A linear layer that stays float."""

    stays_float = True
    """Suppresses the warning about layers without a quantized counterpart."""
