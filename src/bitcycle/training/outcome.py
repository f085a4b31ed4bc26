"""Results of a run so far: means over the last steps, the best evaluation, and drops of the learning rate on plateaus."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bitcycle.device import widest_float
from bitcycle.recipe.learning_rate import LearningRateOptions
from bitcycle.settings import SettingError
from bitcycle.task import StepOutput


def merit(metric: float, higher_is_better: bool) -> float:
    """A key to compare values of a metric by: greater is better, and an undefined value is worst."""
    return -math.inf if math.isnan(metric) else metric if higher_is_better else -metric


def worse(metric: float, than: float, higher_is_better: bool) -> bool:
    """Whether one value of a metric is worse than another; an undefined value is worse than any.

    >>> worse(9.5, 10.0, higher_is_better=True), worse(635.0, 2000.0, higher_is_better=False)
    (True, False)
    """
    return merit(metric, higher_is_better) < merit(than, higher_is_better)


def metric_text(value: float) -> str:
    """A value of a metric for messages, with two decimals, or three digits if huge, as the perplexity of a diverged network.

    >>> metric_text(80.25), metric_text(1.234e304)
    ('80.25', '1.23e+304')
    """
    return f"{value:.2f}" if abs(value) < 1e6 or math.isnan(value) else f"{value:.3g}"


@dataclass
class Best:
    """The best evaluation of the current phase, samples by precision up to it, and all evaluations of the phase."""

    value: float | None = None
    step: int = 0
    samples: dict[str, int] = field(default_factory=dict)
    history: list[float] = field(default_factory=list)
    at_q_max: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    averaged: list[float] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known = {name: value for name, value in state.items() if name != "cost"}  # which earlier versions saved
        vars(self).update(Best(**known).state_dict())


class RunningMean:
    """Mean loss and accuracy over some steps, accumulated on the device to avoid synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.sums, self.count = torch.zeros(2, dtype=widest_float(device), device=device), 0

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
        return {"sums": self.sums, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums, self.count = state["sums"].to(self.sums), state["count"]


class ReduceOnPlateau:
    """Multiplies the learning rate by `factor` after every `patience` consecutive validations without a new best.

    For other shapes of the learning rate the multiplier stays 1. Source: Better Schedules, PTB; HLHLp, speech.

    >>> plateau = ReduceOnPlateau(LearningRateOptions(name="plateau", factor=0.2, patience=1), higher_is_better=False)
    >>> for value in (120.0, 110.0, 111.0, 109.0, 109.0):
    ...     plateau.observe(value)
    >>> round(plateau.multiplier, 6)
    0.04
    """

    def __init__(self, options: LearningRateOptions, higher_is_better: bool) -> None:
        self.options, self.sign = options, 1 if higher_is_better else -1
        self.restart()

    def restart(self) -> None:
        """Reset to the full rate without observations."""
        self.best: float | None = None
        self.waited = self.drops = 0

    @property
    def multiplier(self) -> float:
        """The current multiplier of the learning rate."""
        return float(self.options.factor**self.drops)

    def observe(self, value: float) -> None:
        """Record the next validation; an undefined value is not an improvement."""
        if self.options.name != "plateau":
            return
        if not math.isnan(value) and (self.best is None or self.sign * value > self.sign * self.best):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited == self.options.patience:
            self.waited, self.drops = 0, self.drops + 1

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "drops": self.drops}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited, self.drops = state["best"], state["waited"], state["drops"]


def objective(summary: Mapping[str, Any], name: str) -> float:
    """The number in a run's summary that `logging.objective` names. Raises SettingError if this run has no such number."""
    places: dict[str, tuple[str, ...]] = {
        "mean_of_last": ("mean_of_last", "mean"),
        "validation": ("validation", "final"),
        "gbitops": ("cost", "total", "gbitops"),
        "relative_to_static": ("cost", "total", "relative_to_static"),
    }
    value: Any = summary
    for key in places.get(name, (name,)):
        if key not in value:
            raise no_validation()
        value = value[key]
    return float(value)


def no_validation() -> SettingError:
    """The error if `logging.objective` asks for a validation metric that the run lacks."""
    remedy = "hold out a part of the training data, as dataset.validation=0.1"
    return SettingError("logging.objective", "validation", "this run has no validation data", remedy)
