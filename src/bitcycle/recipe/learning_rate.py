"""Learning rate as a function of the step; all times are fractions of the run.

Source: released code of CPT, train.py; paper and code both drop the rate at 50 % and 75 % of the run. `cyclic` is the
baseline of CPT, figure 5 (SGDR, Loshchilov and Hutter 2016), specified only as "the best setting" and not in the
released code. SGDR's best setting on CIFAR-100 is T_0 = 10 epochs, T_mult = 2; here the run consists of four cycles,
each twice as long as the last.
"""

import bisect
import math
from dataclasses import dataclass
from typing import Optional

from bitcycle.settings import SettingError, Settings, setting

RATE_SHAPES = ("constant", "piecewise", "linear", "cosine", "cyclic", "exponential", "inverse_sqrt", "plateau")


@dataclass
class LearningRateOptions(Settings):
    """Options of the learning rate; p = t / T is the fraction of the run completed after `delay`:

    constant   initial
    plateau    initial * factor^(number of times that `patience` consecutive validations brought no improvement)
    exponential  initial * final_factor^p, or initial * epoch_factor^max(0, e - delay_epochs) in epoch e from 0 of a phase
    inverse_sqrt  initial * sqrt(warmup T / max(t, warmup T)); requires a warm-up (Vaswani et al. 2017, section 5.3)
    piecewise  initial * factor^(number of milestones <= p), or the k-th of `rates` after milestone k
    linear     initial up to linear_start, then linear to initial * final_factor at linear_end, then constant
    cosine     initial * (final_factor + (1 - final_factor) (1 + cos(pi p)) / 2)
    cyclic     initial * (cycle_end_factor + (1 - cycle_end_factor) (1 + cos(pi z)) / 2), where z goes from 0 to 1 in each cycle;
               cycle i from 0 ends at p = (m^(i+1) - 1) / (m^n - 1) with n = cycles, m = cycle_growth ((i + 1) / n for m = 1)
    """

    name: str = setting("piecewise", "shape", choices=RATE_SHAPES)
    initial: float = setting(0.1, "initial learning rate", minimum=0)
    milestones: list[float] = setting(
        [0.5, 0.75],
        "piecewise: fractions of the run at which the rate drops",
        minimum=0,
        maximum=1,
        used_by=["piecewise"],
    )
    factor: float = setting(
        0.1, "piecewise and plateau: factor of the rate at each drop", minimum=0, used_by=["piecewise", "plateau"]
    )
    rates: Optional[list[float]] = setting(
        None,
        "piecewise: the rate from each milestone on (CPT, table 1: [0.01,0.001]); null: by factor",
        minimum=0,
        used_by=["piecewise"],
    )
    patience: int = setting(
        1, "plateau: validations without improvement before each drop", minimum=1, used_by=["plateau"]
    )
    linear_start: float = setting(
        0.5,
        "linear: fraction of the run at which the decay begins (FracTrain: 0.25)",
        minimum=0,
        maximum=1,
        used_by=["linear"],
    )
    linear_end: float = setting(
        0.9,
        "linear: fraction of the run at which the decay ends (FracTrain: 0.75)",
        minimum=0,
        maximum=1,
        used_by=["linear"],
    )
    final_factor: float = setting(
        0.01,
        "linear, cosine and exponential: final divided by initial rate",
        minimum=0,
        used_by=["linear", "cosine", "exponential"],
    )
    epoch_factor: Optional[float] = setting(
        None,
        "exponential: instead of final_factor, factor of the rate per epoch (HLHLp on Penn Treebank: 0.9)",
        minimum=0,
        used_by=["exponential"],
    )
    delay_epochs: int = setting(
        0, "with epoch_factor: epochs at the initial rate (HLHLp: 10)", minimum=0, used_by=["exponential"]
    )
    cycles: int = setting(4, "cyclic: number of cycles", minimum=1, used_by=["cyclic"])
    cycle_growth: float = setting(
        2.0, "cyclic: length of a cycle divided by that of the previous cycle", minimum=1, used_by=["cyclic"]
    )
    cycle_end_factor: float = setting(
        0.0, "cyclic: final rate of a cycle divided by its initial rate", minimum=0, used_by=["cyclic"]
    )
    warmup: float = setting(
        0.0, "length of the warm-up as a fraction of the run (released code: 400 of 64000 steps)", minimum=0, maximum=1
    )
    warmup_rate: float = setting(0.01, "rate during the warm-up", minimum=0)
    warmup_shape: str = setting(
        "constant",
        "warm-up: at warmup_rate (constant), or from 0 to initial (linear: Goyal et al. 2017, for partial table 1)",
        choices=("constant", "linear"),
    )
    delay: float = setting(
        0.0,
        "fraction of the run at the initial rate before the decay (Better Schedules: CIFAR deficit runs)",
        minimum=0,
        maximum=1,
        used_by=[shape for shape in RATE_SHAPES if shape not in ("constant", "plateau")],
    )

    def validate(self) -> None:
        if sorted(self.milestones) != self.milestones:
            raise SettingError("milestones", self.milestones, "are not ascending", f"write {sorted(self.milestones)}")
        if self.rates is not None and len(self.rates) != len(self.milestones):
            problem = f"there are {len(self.milestones)} milestones"
            raise SettingError("rates", self.rates, problem, "give one rate for each milestone, or null")
        if self.name == "linear" and self.linear_start >= self.linear_end:
            problem = f"is not before linear_end={self.linear_end}"
            raise SettingError("linear_start", self.linear_start, problem, "use a smaller value")
        if self.name == "inverse_sqrt" and self.warmup == 0:
            raise SettingError("warmup", 0, "inverse_sqrt requires a warm-up", "set warmup above 0")
        if self.warmup > 0 and self.warmup_shape == "constant" and self.warmup_rate > self.initial:
            problem = f"is above initial={self.initial:g}, the rate after the warm-up"
            raise SettingError("warmup_rate", self.warmup_rate, problem, "lower it, or set warmup_shape=linear")
        decay = "final_factor" if self.epoch_factor is None else "epoch_factor"
        if self.name == "exponential" and getattr(self, decay) == 0:
            problem = "the rate is zero from the first decay on"
            raise SettingError(decay, 0, problem, "use a value above 0, or a shape that ends at zero, as name=cosine")

    def check_length(self, total_steps: int) -> None:
        """Raise SettingError if a cycle would be shorter than one step in a run or phase of `total_steps`."""
        steps = total_steps - round(self.delay * total_steps)
        if self.name != "cyclic" or steps == 0:
            return
        try:
            ends = self._cycle_ends(steps)
            empty = len({0, *ends}) <= len(ends)
        except OverflowError:
            empty = True
        if empty:
            problem = f"a cycle would be shorter than one of {steps} steps"
            raise SettingError("cycles", self.cycles, problem, "use fewer, a smaller cycle_growth, or train longer")

    def rate(self, step: int, total_steps: int, epoch_steps: int | None = None) -> float:
        """The learning rate at `step`, counted from 0, of a run of `total_steps` with `epoch_steps` per epoch."""
        if step / total_steps < self.warmup:  # as for milestones; 0.07 * 100 is more than 7
            risen = step / (self.warmup * total_steps)
            return self.initial * risen if self.warmup_shape == "linear" else self.warmup_rate
        held = round(self.delay * total_steps)
        if step < held or self.name in ("constant", "plateau"):
            return self.initial
        if self.name == "exponential" and self.epoch_factor is not None:
            return self.initial * self.epoch_factor ** max(0, step // (epoch_steps or 1) - self.delay_epochs)
        if self.name == "inverse_sqrt":
            return self.initial * math.sqrt(self.warmup * total_steps / step)
        progress = (step - held) / (total_steps - held)
        if self.name == "piecewise":
            passed = sum(progress >= milestone for milestone in self.milestones)
            return self.initial * self.factor**passed if self.rates is None else [self.initial, *self.rates][passed]
        if self.name == "linear":
            descent = (progress - self.linear_start) / (self.linear_end - self.linear_start)
            return self.initial * (1 - (1 - self.final_factor) * min(1.0, max(0.0, descent)))
        if self.name == "exponential":
            return self.initial * self.final_factor**progress
        if self.name == "cyclic":
            return self.initial * _cosine(self._cycle_position(step - held, total_steps - held), self.cycle_end_factor)
        return self.initial * _cosine(progress, self.final_factor)

    def _cycle_position(self, step: int, steps: int) -> float:
        """z, the completed fraction of the current cycle; cycles start at integer steps."""
        ends = self._cycle_ends(steps)
        cycle = min(bisect.bisect_right(ends, step), self.cycles - 1)
        start = ends[cycle - 1] if cycle else 0
        return (step - start) / (ends[cycle] - start)

    def _cycle_ends(self, steps: int) -> list[int]:
        """Step after the last step of each cycle."""
        lengths = [self.cycle_growth**cycle for cycle in range(self.cycles)]
        return [round(steps * sum(lengths[: cycle + 1]) / sum(lengths)) for cycle in range(self.cycles)]


def _cosine(z: float, end: float) -> float:
    """Half a cosine from 1 at z = 0 to `end` at z = 1."""
    return end + (1 - end) * (1 + math.cos(math.pi * z)) / 2
