"""What all precision schedules share: options that are a value, and a schedule bound to the length of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bitcycle.schedule.phase import Phase
from bitcycle.schedule.precision import Precision, effective, joined, run_lengths
from bitcycle.settings import MISSING, SettingError, Settings, setting

if TYPE_CHECKING:
    from bitcycle.schedule.gated import GateOptions


@dataclass(frozen=True)
class RunLength:
    """How long a run is, in optimizer steps; the length of an epoch is needed by schedules that count epochs only."""

    total_steps: int
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise SettingError("total_steps", self.total_steps, "a run has at least one step", "use 1 or more")
        if self.steps_per_epoch is not None and self.steps_per_epoch < 1:
            raise SettingError(
                "steps_per_epoch", self.steps_per_epoch, "an epoch has at least one step", "use 1 or more"
            )


@dataclass
class ScheduleOptions(Settings):
    """Options that every schedule has. Subclasses add theirs and say which precision a step has."""

    name: str = setting(MISSING, "the schedule's name, as in schedule=NAME")
    # Any, as cyclic schedules also take the word auto and OmegaConf keeps the type of the first class that declares a field.
    q_min: Any = setting(3, "lowest forward precision in bits (weights and activations)", minimum=1, maximum=32)
    q_max: int = setting(8, "highest forward precision in bits, that of the static baseline", minimum=1, maximum=32)

    def validate(self) -> None:
        if self.q_min > self.q_max:
            raise SettingError("q_min", self.q_min, f"is above q_max={self.q_max}", "choose q_min <= q_max")

    def precision(self, step: int, length: RunLength) -> Precision:
        """Bits of `step`, counted from 0, in a run of `length`. A pure function."""
        raise NotImplementedError

    def course(self, length: RunLength) -> list[tuple[Precision, int]]:
        """All steps of a run, neighbours of equal precision joined: [(precision, steps), ...]."""
        return run_lengths(self.precision(step, length) for step in range(length.total_steps))

    @property
    def reference(self) -> Precision:
        """The static precision that savings are relative to: q_max everywhere."""
        return Precision(self.q_max, self.q_max, self.q_max)

    @property
    def chooses(self) -> bool:
        """Whether weights are chosen during the run, so that a part of the training data must be held out for it."""
        return False

    def phases(self, length: RunLength) -> tuple[Phase, ...]:
        """Stretches of a run of `length` with learning rate and starting weights of their own; one unless overridden."""
        return (Phase(0, length.total_steps),)

    @property
    def gates(self) -> GateOptions | None:
        """What the blocks of the network choose from, where the network chooses its bits itself; None otherwise."""
        return None

    def configure_for(self, family: str | None, blocks: int) -> ScheduleOptions:
        """These options with the defaults for a network of `family` that names so many blocks.

        Raises:
            SettingError: if the schedule needs blocks and the network names none.
        """
        return self

    def check_length(self, length: RunLength) -> None:
        """Raise SettingError where these options make no sense in a run of `length`."""

    def bind(self, total_steps: int, steps_per_epoch: int | None = None) -> Schedule:
        """The schedule of a run of this length."""
        return Schedule(self, RunLength(total_steps, steps_per_epoch))


@dataclass(frozen=True)
class Schedule:
    """Precision as a function of the step: `schedule(step)` gives the bits of optimizer step `step`, counted from 0.

    Raises:
        SettingError (a ValueError): for a step outside the run, and at construction for options that do not fit its length.
    """

    options: ScheduleOptions
    length: RunLength

    def __post_init__(self) -> None:
        self.options.check_length(self.length)

    @property
    def name(self) -> str:
        """The schedule's name, such as `RTH`."""
        return self.options.name

    @property
    def fixed(self) -> bool:
        """Whether the precision of every step is known beforehand; False where it follows from the training or the input."""
        return True

    @property
    def steps(self) -> int:
        """Steps that are trained at most: all of the run, unless a search ends it earlier."""
        return self.length.total_steps

    @property
    def summary(self) -> str:
        """What is known of the precision beforehand, where it is not `fixed`."""
        return f"from {'/'.join(map(str, self(0)))} on, as the training goes"

    @property
    def follows(self) -> str:
        """What the precision depends on where it is not known beforehand, in words."""
        return "reacts to the training"

    def check_step(self, step: int) -> None:
        """Raise SettingError for a step outside the run."""
        if not 0 <= step < self.length.total_steps:
            last = self.length.total_steps - 1
            remedy = f"steps run from 0 to total_steps - 1 = {last}; bind the schedule to more steps"
            raise SettingError("step", step, "lies outside the run", remedy)

    def __call__(self, step: int) -> Precision:
        self.check_step(step)
        return effective(self.options.precision(step, self.length))

    @cached_property
    def run_lengths(self) -> list[tuple[Precision, int]]:
        """All steps of the run, neighbours of equal precision joined: [(precision, steps), ...]."""
        return joined((effective(precision), steps) for precision, steps in self.options.course(self.length))

    @property
    def reference(self) -> Precision:
        """The static precision that this schedule is compared with (static q_max)."""
        return effective(self.options.reference)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of the run, in order and without gaps."""
        return self.options.phases(self.length)

    @property
    def precisions(self) -> set[Precision]:
        """Every precision that a step can have."""
        return {precision for precision, _ in self.run_lengths}

    @property
    def lowest(self) -> Precision:
        """The lowest bits of each kind that a step can have."""
        return Precision(*(min(bits) for bits in zip(*self.precisions)))

    @property
    def min_cost(self) -> list[tuple[Precision, int]]:
        """The course with the fewest bits that the run can take: [(precision, steps), ...]."""
        return self.run_lengths if self.fixed else [(self.lowest, self.steps)]

    @property
    def max_cost(self) -> list[tuple[Precision, int]]:
        """The course with the most bits that the run can take."""
        return self.run_lengths if self.fixed else [(self.reference, self.steps)]


@dataclass(frozen=True)
class FeedbackSchedule(Schedule):
    """A schedule that reacts to the training: told its loss and accuracy at regular intervals, with a state to save."""

    @property
    def fixed(self) -> bool:
        return False

    @property
    def observation_steps(self) -> int:
        """The interval, in steps, at which it is told loss and accuracy."""
        raise NotImplementedError

    @property
    def observes_penalty(self) -> bool:
        """Whether the loss that `observe` is told includes penalties, such as the cost term of DFQ."""
        return False

    def observe(self, loss: float, accuracy: float) -> None:
        """Take the mean training loss and accuracy (0 to 1) of the last `observation_steps` steps."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """State to save in a checkpoint."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        raise NotImplementedError


@dataclass(frozen=True)
class SearchSchedule(FeedbackSchedule):
    """A schedule that looks for something: it may end the run, or begin again from the initial weights, and has a result.

    A loss that is not finite does not end such a run.
    """

    def begin(self, majority_baseline: float) -> None:
        """Take the accuracy (0 to 1) of always predicting the most frequent class, once, before the first step."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        """Whether it has seen enough: the run ends here."""
        raise NotImplementedError

    @property
    def should_reset(self) -> bool:
        """Whether training is to begin again from the initial weights, after what was observed last."""
        raise NotImplementedError

    @property
    def result(self) -> dict[str, Any]:
        """What it has found, for the run's summary; empty before it has finished."""
        raise NotImplementedError
