"""What quantizers add to the training loss, such as the L2 penalty on PACT's clipping values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitcycle.layer.quantized import QuantizedLayer


def penalty(model: nn.Module) -> Tensor | None:
    """The sum of the penalties of a converted model's quantizers at the current bits; None if they have none.

    Add it to the loss in a training loop of your own.
    """
    terms = [term for layer in model.modules() if isinstance(layer, QuantizedLayer) for term in layer.penalties()]
    return torch.stack(terms).sum() if terms else None
