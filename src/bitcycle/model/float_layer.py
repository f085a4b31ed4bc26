"""Layers that no conversion touches, whatever a quantizer's rule for float layers."""

from __future__ import annotations

from torch import nn


class FloatLinear(nn.Linear):
    """A linear layer that stays float."""

    stays_float = True
    """No conversion warns that it has nothing for it."""
