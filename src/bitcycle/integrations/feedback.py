"""What a trainer's callback passes to schedules that adapt to the training loss."""

from typing import Any

import torch
from torch import Tensor, nn

from bitcycle import distributed
from bitcycle.schedule import FeedbackSchedule, Schedule, SearchSchedule
from bitcycle.settings import SettingError


class LossFeed:
    """Passes the mean training loss, over batches and processes, to a feedback schedule at its interval; nothing to others.

    Raises SettingError (a ValueError) for a search, which also needs accuracies and resets the network.
    """

    def __init__(self, schedule: Schedule, model: nn.Module) -> None:
        if isinstance(schedule, SearchSchedule):
            problem = "needs training accuracies and resets the network, which this callback cannot"
            remedy = "call control.step and schedule.observe in your own loop, or run train.py"
            raise SettingError("schedule", schedule.name, problem, remedy)
        self._schedule = schedule if isinstance(schedule, FeedbackSchedule) else None
        self._model = model
        # of the batches since the last observation, on their device, so that no step waits for it
        self._sum: Tensor | float = 0.0
        self._batches, self._observed_at = 0, 0

    @property
    def takes_penalty(self) -> bool:
        """Whether the loss includes penalties, such as the cost term of DFQ."""
        return self._schedule is not None and self._schedule.observes_penalty

    def add(self, loss: Tensor) -> None:
        """Note the loss of a training batch."""
        if self._schedule is not None:
            self._sum, self._batches = self._sum + loss.detach().float(), self._batches + 1

    def end_step(self, steps: int) -> None:
        """Pass on the mean if an interval ends after this number of steps. A second call with the same number does nothing, and
        without losses the schedule is not told."""
        schedule = self._schedule
        if schedule is None or steps <= self._observed_at or steps % schedule.observation_steps:
            return
        device = next(self._model.parameters()).device
        own = torch.tensor([float(self._sum), self._batches], device=device)
        total, batches = distributed.all_sum(own).tolist()
        self._sum, self._batches, self._observed_at = 0.0, 0, steps
        if batches:
            schedule.observe(total / batches, float("nan"))

    def state_dict(self) -> dict[str, Any]:
        """The losses since the last observation, of this process."""
        return {"sum": float(self._sum), "batches": self._batches, "observed_at": self._observed_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, or nothing, as of checkpoints without it."""
        self._sum, self._batches = state.get("sum", 0.0), state.get("batches", 0)
        self._observed_at = state.get("observed_at", 0)
