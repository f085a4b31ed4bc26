"""Precision that rises in stages: at given fractions of the run, or when the loss becomes flat (PFQ)."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Optional

from bitcycle.precision import Precision, effective
from bitcycle.schedule.base import FeedbackSchedule, RunLength, ScheduleOptions, observed
from bitcycle.settings import SettingError, setting

SCALE_EPOCHS = 10
"""Number of initial epochs whose losses set the scale of loss differences."""


@dataclass
class StageOptions(ScheduleOptions):
    """The bits of schedules with stages of constant precision, one after the other."""

    q_min: Any = setting(3, "not used: the stages define the bits", affects_result=False)
    q_max: int = setting(8, "not used: the stages define the bits", affects_result=False)
    stages: list[int] = setting([3, 4, 6, 8], "forward bits of the stages", minimum=1, maximum=32)
    gradient_stages: list[int] = setting([6, 6, 8, 8], "gradient bits of the stages", minimum=1, maximum=32)

    def validate(self) -> None:
        self.check_q_min()
        if not self.stages:
            raise SettingError("stages", self.stages, "is empty", "give forward bits, as [3,4,6,8]")
        if len(self.stages) != len(self.gradient_stages):
            problem = f"there are {len(self.stages)} stages of forward bits"
            raise SettingError("gradient_stages", self.gradient_stages, problem, "give as many gradient bits")

    @property
    def reference(self) -> Precision:
        return Precision(max(self.stages), max(self.stages), max(self.gradient_stages))

    def of_stage(self, stage: int) -> Precision:
        """The bits of a stage, counted from 0."""
        return Precision(self.stages[stage], self.stages[stage], self.gradient_stages[stage])


@dataclass
class Staged(StageOptions):
    """Stages at given fractions of the run; four equal stages are FracTrain's manual PFQ.

    Also the progressive training of CPT, figure 1 (3 to 8 bits over the first half), and the stages of CPT, table 1.

    Source: FracTrain, appendix A; CPT, sections 3.1 and 3.2.
    """

    boundaries: Optional[list[float]] = setting(
        None,
        "fractions of the run at which the second and later stages begin; null: equal stages",
        minimum=0,
        maximum=1,
    )

    def validate(self) -> None:
        super().validate()
        if self.boundaries is not None:
            if len(self.boundaries) != len(self.stages) - 1:
                problem = f"{len(self.stages)} stages have {len(self.stages) - 1} boundaries"
                raise SettingError(
                    "boundaries", self.boundaries, problem, "give one fraction for each later stage, or null"
                )
            if sorted(self.boundaries) != self.boundaries:
                raise SettingError(
                    "boundaries", self.boundaries, "are not ascending", f"write {sorted(self.boundaries)}"
                )

    def precision(self, step: int, length: RunLength) -> Precision:
        return self.of_stage(bisect.bisect_right(self.changes(length), step) - 1)

    def check_length(self, length: RunLength) -> None:
        if self.boundaries is None:
            return  # equal stages, which a run for trying things out may be too short for
        fractions, steps = pairwise([0.0, *self.boundaries, 1.0]), pairwise([*self.changes(length), length.total_steps])
        for (begin, end), (first, after) in zip(fractions, steps, strict=True):
            if begin < end and first == after:
                problem = f"the stage from {begin:g} to {end:g} of the run has none of its {length.total_steps} steps"
                raise SettingError("boundaries", self.boundaries, problem, "train longer, or choose fewer stages")

    def changes(self, length: RunLength) -> Sequence[int]:
        count = len(self.stages)
        boundaries = self.boundaries if self.boundaries is not None else [k / count for k in range(1, count)]
        return [0, *(round(boundary * length.total_steps) for boundary in boundaries)]


@dataclass
class PlateauIndicator:
    """Detects turning points, where the loss per epoch has become flat.

    With the last `window` losses l_1 .. l_w since the last turning point and the scale S, the magnitude of the mean of the first
    ten losses of the run, a turning point is reached when the window is full and

        |l_j - l_w| <= threshold S       for every j < w

    A turning point empties the window and multiplies the threshold by alpha, at most `max_decays` times.

    Source: FracTrain, section 3.1; released code, train_pfq.py (algorithm 1 has the differences of consecutive losses, and the
    text the largest magnitude as S). Differs from the code in that every turning point decays the threshold unless max_decays=2
    is set (which makes no difference for a schedule of four stages), and in the magnitude: the total loss of FracTrain can be
    negative, and the code then finds a turning point whenever the window is full.
    """

    saved: ClassVar[tuple[str, ...]] = ("threshold", "epochs", "first_losses", "recent", "turning_points")

    threshold: float
    alpha: float
    window: int = 5
    max_decays: int | None = None
    epochs: int = 0
    first_losses: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    turning_points: int = 0

    def update(self, loss: float) -> bool:
        """Record the loss of the last epoch; True at a turning point."""
        self.epochs += 1
        if len(self.first_losses) < SCALE_EPOCHS:
            self.first_losses.append(loss)
        self.recent = [*self.recent, loss][-self.window :]
        if len(self.recent) < self.window or not self._is_flat():
            return False
        self.recent = []
        self.turning_points += 1
        if self.max_decays is None or self.turning_points <= self.max_decays:
            self.threshold *= self.alpha
        return True

    @property
    def loss_scale(self) -> float:
        """The scale S of the losses."""
        return abs(sum(self.first_losses)) / len(self.first_losses)

    def _is_flat(self) -> bool:
        *earlier, last = self.recent
        return all(abs(loss - last) <= self.threshold * self.loss_scale for loss in earlier)


@dataclass
class LossPlateau(ScheduleOptions):
    """Options of schedules whose next stage begins when the loss becomes flat; a setting wherever paper and code disagree."""

    epsilon: float = setting(0.05, "threshold of the loss difference (paper 0.05, code's default 0.15)", minimum=0)
    alpha: float = setting(
        0.3, "factor of the threshold after a turning point (paper 0.3, code's default 0.4)", minimum=0
    )
    window: int = setting(5, "number of epochs whose losses must be close to each other", minimum=2)
    max_decays: Optional[int] = setting(
        None, "number of turning points that decay the threshold; null: all (code: 2)", minimum=0
    )
    epoch_steps: Optional[int] = setting(
        None, "length of an epoch in steps; null: a pass over the data (code: 400 or 390 steps)", minimum=1
    )

    def check_length(self, length: RunLength) -> None:
        self.epoch_length(length)

    def epoch_length(self, length: RunLength) -> int:
        """Length of an epoch in steps."""
        return self.epoch_steps or length.epoch("epoch_steps", None, "bind with steps_per_epoch, or set epoch_steps")

    def indicator(self) -> PlateauIndicator:
        """A new loss plateau indicator."""
        return PlateauIndicator(self.epsilon, self.alpha, self.window, self.max_decays)


@dataclass
class Pfq(StageOptions, LossPlateau):
    """Progressive fractional quantization: the next stage begins when the loss becomes flat.

    Source: FracTrain, section 3.1 and algorithm 1; released code, train_pfq.py.
    """

    def bind(self, total_steps: int, steps_per_epoch: int | None = None) -> "PfqSchedule":
        return PfqSchedule(self, RunLength(total_steps, steps_per_epoch))


@dataclass(frozen=True)
class LossPlateauSchedule(FeedbackSchedule):
    """Bound to a run: `observe` takes the mean loss of every epoch; the next stage begins when it becomes flat."""

    options: LossPlateau

    @cached_property
    def indicator(self) -> PlateauIndicator:
        """The indicator with the turning points so far."""
        return self.options.indicator()

    @property
    def last_stage(self) -> int:
        """Index of the last stage."""
        raise NotImplementedError

    @property
    def stage(self) -> int:
        """Index of the current stage."""
        return min(self.indicator.turning_points, self.last_stage)

    @property
    def observation_steps(self) -> int:
        return self.options.epoch_length(self.length)

    @property
    def shortfall(self) -> str:
        """A stage lasts at least `window` epochs, and the last observations of a run change nothing."""
        shortest = self.options.window * self.observation_steps
        reached, stages = 1 + (self.steps - 1) // shortest, self.last_stage + 1
        if reached >= stages:
            return ""
        return (
            f"schedule={self.name} reaches at most {reached} of its {stages} stages in {self.steps} steps, as each lasts at least"
            f" window={self.options.window} epochs of {self.observation_steps} steps: train longer, or set schedule.epoch_steps"
        )

    def observe(self, loss: float, accuracy: float) -> None:
        if self.stage < self.last_stage:
            self.indicator.update(observed(loss))
        else:
            self.indicator.epochs += 1  # by which a controller sees that losses arrive


@dataclass(frozen=True)
class PfqSchedule(LossPlateauSchedule):
    """PFQ bound to a run. For steps after the current one it returns the bits of the current stage."""

    options: Pfq

    @property
    def last_stage(self) -> int:
        return len(self.options.stages) - 1

    @property
    def precisions(self) -> set[Precision]:
        return {effective(self.options.of_stage(stage)) for stage in range(len(self.options.stages))}

    def scheduled(self, step: int) -> Precision:
        return self.options.of_stage(self.stage)
