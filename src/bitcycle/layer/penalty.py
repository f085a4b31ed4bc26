"""What parts of a model add to the training loss: the L2 penalty on PACT's clipping values, the cost term of DFQ's gates."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Penalised(Protocol):
    """A module that adds to the loss."""

    def penalties(self, loss: Tensor | None = None) -> list[Tensor]:
        """Terms to add, after the forward pass of the step; `loss` is what they are added to, if known."""


def penalty(model: nn.Module, loss: Tensor | None = None) -> Tensor | None:
    """The sum of what the parts of a converted model add to the loss at the current bits; None if they add nothing.

    Add it to the loss in a training loop of your own.

    Args:
        model: a converted model, after the forward pass of the step.
        loss: the loss so far, which a term may be relative to.
    """
    parts = [module for module in model.modules() if isinstance(module, Penalised)]
    terms = [term for part in parts for term in part.penalties(loss)]
    return torch.stack(terms).sum() if terms else None
