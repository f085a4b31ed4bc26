"""A learning rate that drops when validation stops improving (Better Schedules, PTB; HLHLp, speech)."""

import math
from typing import Any

from bitcycle.recipe.learning_rate import LearningRateOptions


class ReduceOnPlateau:
    """Multiplies the learning rate by `factor` after every `patience` consecutive validations without a new best.

    For other shapes of the learning rate the multiplier stays 1.

    >>> plateau = ReduceOnPlateau(LearningRateOptions(name="plateau", factor=0.2, patience=1), higher_is_better=False)
    >>> for value in (120.0, 110.0, 111.0, 109.0, 109.0):
    ...     plateau.observe(value)
    >>> round(plateau.multiplier, 6)
    0.04
    """

    def __init__(self, options: LearningRateOptions, higher_is_better: bool) -> None:
        self.options, self.higher_is_better = options, higher_is_better
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
        if not math.isnan(value) and (self.best is None or self._improves(value, self.best)):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited == self.options.patience:
            self.waited, self.drops = 0, self.drops + 1

    def _improves(self, value: float, best: float) -> bool:
        return value > best if self.higher_is_better else value < best

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"best": self.best, "waited": self.waited, "drops": self.drops}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best, self.waited, self.drops = state["best"], state["waited"], state["drops"]
