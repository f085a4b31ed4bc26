"""Results of a run so far: means over the last steps, and the best evaluation."""

from dataclasses import dataclass, field
from typing import Any

import torch

from bitcycle.task import StepOutput


@dataclass
class Best:
    """The best evaluation of the current phase, cost and samples by precision up to it, and all evaluations of the phase."""

    value: float | None = None
    step: int = 0
    cost: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    history: list[float] = field(default_factory=list)
    at_q_max: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    averaged: list[float] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        vars(self).update(Best(**state).state_dict())


class RunningMean:
    """Mean loss and accuracy over some steps, accumulated on the device to avoid synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.sums, self.count = torch.zeros(2, dtype=torch.float64, device=device), 0

    def add(self, outcome: StepOutput) -> None:
        """Add the outcome of a step."""
        self.sums += torch.stack([outcome.loss.detach(), outcome.accuracy])
        self.count += 1

    def take(self) -> tuple[float, float]:
        """(mean loss, mean accuracy) of the steps since the last call; resets the sums."""
        loss, accuracy = (self.sums / self.count).tolist()
        self.sums.zero_()
        self.count = 0
        return loss, accuracy

    def state_dict(self) -> dict[str, Any]:
        """Sums and count, for a checkpoint."""
        return {"sums": self.sums, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.sums, self.count = state["sums"].to(self.sums.device), state["count"]
