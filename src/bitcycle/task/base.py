"""What the training loop needs to know of a task: batches, a loss and metrics. Nothing else differs between tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn


class Outcome(NamedTuple):
    """What one training batch gave: the loss to descend, and the detached share of right answers; both scalars."""

    loss: Tensor
    accuracy: Tensor


class Task(Protocol):
    """One learning task with its data, ready to train on."""

    metric: str
    """Name of the main metric, a key of what `evaluate` returns."""
    higher_is_better: bool
    """Whether a larger main metric is better."""

    validation_metric: str
    """Name of the metric that choices are made by, a key of what `validate` returns; better as the main metric is."""
    chance: float
    """Share of right answers of always giving the most frequent one of the training data."""

    def batches(self, step: int) -> Iterator[Any]:
        """Training batches of steps `step`, `step` + 1, ... without end."""

    def samples(self, step: int) -> int:
        """Training samples in the batch of `step`."""

    def train(self, model: nn.Module, batch: Any) -> Outcome:
        """Loss and accuracy of one training batch."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the model in evaluation mode on the test split."""

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the model in evaluation mode on the part of the training data held out for choosing; empty without one."""
