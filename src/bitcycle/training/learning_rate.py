"""Learning rate as a function of the step; all times are fractions of the run.

Source: released code of CPT, train.py; paper and code both drop the rate at 50 % and 75 % of the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bitcycle.settings import SettingError, Settings, setting


@dataclass
class LearningRateOptions(Settings):
    """Options of the learning rate. With p = t / T after `delay`:

    constant   initial
    piecewise  initial * factor^(number of milestones <= p)
    linear     initial up to linear_start, then linear to initial * final_factor at linear_end, then that
    cosine     initial * (final_factor + (1 - final_factor) (1 + cos(pi p)) / 2)
    """

    name: str = setting("piecewise", "shape", choices=("constant", "piecewise", "linear", "cosine"))
    initial: float = setting(0.1, "rate at the start", minimum=0)
    milestones: list[float] = setting(
        [0.5, 0.75], "piecewise: fractions of the run at which the rate drops", minimum=0, maximum=1
    )
    factor: float = setting(0.1, "piecewise: what the rate is multiplied with at each milestone", minimum=0)
    linear_start: float = setting(
        0.5, "linear: fraction at which the descent begins (FracTrain: 0.25)", minimum=0, maximum=1
    )
    linear_end: float = setting(
        0.9, "linear: fraction at which the descent ends (FracTrain: 0.75)", minimum=0, maximum=1
    )
    final_factor: float = setting(0.01, "linear and cosine: last rate divided by the first", minimum=0)
    warmup: float = setting(
        0.0, "fraction of the run with warmup_rate (released code: 400 of 64000 steps)", minimum=0, maximum=1
    )
    warmup_rate: float = setting(0.01, "rate during the warm-up", minimum=0)
    warmup_shape: str = setting(
        "constant",
        "during the warm-up: warmup_rate (constant), or from 0 up to initial (linear: Goyal et al. 2017, for partial table 1)",
        choices=("constant", "linear"),
    )
    delay: float = setting(
        0.0,
        "fraction held at the initial rate before the shape begins (Better Schedules: CIFAR deficit runs)",
        minimum=0,
        maximum=1,
    )

    def validate(self) -> None:
        if sorted(self.milestones) != self.milestones:
            raise SettingError("milestones", self.milestones, "are not in order", f"write {sorted(self.milestones)}")
        if self.name == "linear" and self.linear_start >= self.linear_end:
            raise SettingError(
                "linear_start", self.linear_start, f"is not before linear_end={self.linear_end}", "choose it smaller"
            )

    def rate(self, step: int, total_steps: int) -> float:
        """The learning rate of `step`, counted from 0, in a run of `total_steps`."""
        if step < self.warmup * total_steps:
            risen = step / (self.warmup * total_steps)
            return self.initial * risen if self.warmup_shape == "linear" else self.warmup_rate
        held = round(self.delay * total_steps)
        if step < held or self.name == "constant":
            return self.initial
        progress = (step - held) / (total_steps - held)
        if self.name == "piecewise":
            return self.initial * self.factor ** sum(progress >= milestone for milestone in self.milestones)
        if self.name == "linear":
            descent = (progress - self.linear_start) / (self.linear_end - self.linear_start)
            return self.initial * (1 - (1 - self.final_factor) * min(1.0, max(0.0, descent)))
        return self.initial * (self.final_factor + (1 - self.final_factor) * (1 + math.cos(math.pi * progress)) / 2)
