"""The optimizer, from its options."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bitcycle.quantizer import TensorQuantizer
from bitcycle.settings import SettingError, Settings, setting


@dataclass
class OptimizerOptions(Settings):
    """Options of the optimizer."""

    name: str = setting("sgd", "sgd, adam, or adamw (decoupled weight decay)", choices=("sgd", "adam", "adamw"))
    momentum: float = setting(0.9, "sgd: momentum", minimum=0, maximum=1)
    nesterov: bool = setting(False, "sgd: Nesterov momentum (partial pre-training)")
    weight_decay: float = setting(
        1e-4,
        "weight decay of all parameters, including batch norm (released code), excluding quantizers' (PACT's alpha)",
        minimum=0,
    )
    beta1: float = setting(0.9, "adam(w): decay of the first moment", minimum=0, maximum=1)
    beta2: float = setting(0.999, "adam(w): decay of the second moment", minimum=0, maximum=1)
    epsilon: float = setting(1e-8, "adam(w): added to the denominator", minimum=0)

    def validate(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise SettingError("nesterov", True, "needs momentum above 0", "set momentum=0.9 or nesterov=false")
        for beta in ("beta1", "beta2"):
            if getattr(self, beta) == 1:
                raise SettingError(beta, 1, "never updates the average", "use a value below 1")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of all parameters; the learning rate is set at each step."""
        parameters = self._parameters(model)
        common: dict[str, Any] = {"weight_decay": self.weight_decay, "foreach": True}
        if self.name == "sgd":
            return torch.optim.SGD(parameters, lr=0.0, momentum=self.momentum, nesterov=self.nesterov, **common)
        kind = torch.optim.Adam if self.name == "adam" else torch.optim.AdamW
        return kind(parameters, betas=(self.beta1, self.beta2), eps=self.epsilon, **common)

    def _parameters(self, model: nn.Module) -> list[Any]:
        """All trainable parameters; those of quantizers in a separate group without weight decay."""
        quantizers = [module for module in model.modules() if isinstance(module, TensorQuantizer)]
        undecayed = [parameter for module in quantizers for parameter in module.parameters(recurse=False)]
        ids = {id(parameter) for parameter in undecayed}
        decayed = [p for p in model.parameters() if p.requires_grad and id(p) not in ids]
        return [{"params": decayed}, {"params": undecayed, "weight_decay": 0.0}] if undecayed else decayed
