"""What the training loop needs to know of a task: batches, a loss and metrics. Nothing else differs between tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn


class Task(Protocol):
    """One learning task with its data, ready to train on."""

    metric: str
    """Name of the main metric, a key of what `evaluate` returns."""
    higher_is_better: bool
    """Whether a larger main metric is better."""

    def batches(self, step: int) -> Iterator[Any]:
        """Training batches of steps `step`, `step` + 1, ... without end."""

    def samples(self, step: int) -> int:
        """Training samples in the batch of `step`."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of one batch, a scalar."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the model in evaluation mode on the held-out split."""
