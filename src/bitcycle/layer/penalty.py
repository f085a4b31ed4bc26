"""Penalties that modules add to the training loss: the L2 penalty on PACT's clipping values, the cost term of DFQ's gates."""

from typing import Any

import torch
from torch import Tensor, nn


def penalty(model: nn.Module, loss: Tensor | None = None) -> Tensor | None:
    """The sum of the penalties of a converted model at the current bits, after a forward pass; None if there are none.

    A module contributes if its class has a method `penalties(loss)` that returns a list of terms, which may be relative to the
    loss without penalties. Custom training loops must add the sum to the loss.
    """
    parts: list[Any] = [module for module in model.modules() if hasattr(type(module), "penalties")]
    terms: list[Tensor] = [term for part in parts for term in part.penalties(loss)]
    return torch.stack(terms).sum() if terms else None
