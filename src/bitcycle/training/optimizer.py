"""The optimizer, from its options."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from bitcycle.settings import SettingError, Settings, setting


@dataclass
class OptimizerOptions(Settings):
    """Options of the optimizer."""

    name: str = setting("sgd", "sgd or adam", choices=("sgd", "adam"))
    momentum: float = setting(0.9, "sgd: momentum", minimum=0, maximum=1)
    nesterov: bool = setting(False, "sgd: Nesterov momentum (partial pre-training)")
    weight_decay: float = setting(
        1e-4, "decay of all parameters, batch norm included as in the released code", minimum=0
    )
    beta1: float = setting(0.9, "adam: decay of the first moment", minimum=0, maximum=1)
    beta2: float = setting(0.999, "adam: decay of the second moment", minimum=0, maximum=1)
    epsilon: float = setting(1e-8, "adam: added to the denominator", minimum=0)

    def validate(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise SettingError("nesterov", True, "needs momentum above 0", "set momentum=0.9 or nesterov=false")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of all parameters; the learning rate is set at each step."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.name == "adam":
            betas = (self.beta1, self.beta2)
            return torch.optim.Adam(
                parameters, betas=betas, eps=self.epsilon, weight_decay=self.weight_decay, foreach=True
            )
        return torch.optim.SGD(
            parameters,
            lr=0.0,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            foreach=True,
        )
