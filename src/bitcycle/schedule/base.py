"""Base classes of precision schedules: their options, and a schedule bound to the length of a run."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from numbers import Integral
from typing import Any, ClassVar

from bitcycle.precision import Precision, effective, joined, read_precision
from bitcycle.settings import MISSING, SettingError, Settings, setting

AUTO = "auto"
"""Value of q_min that a range test replaces by the one it finds."""
PHASE_STARTS = ("previous", "best", "flattest")


@dataclass(frozen=True)
class Phase:
    """One phase of a run, with its own learning rate and starting weights. A run without phases is one with all defaults.

    Attributes:
        start, steps: first step and length.
        rate_factor: factor of the recipe's learning rate.
        rate_ratio: (a, b): the rate is also multiplied by D_a / D_b, the geometric mean over the layers of the optimal
            quantization step at a bits divided by that at b bits, for the starting weights of the phase.
        start_from: weights at the end of the previous phase (previous), those with its best validation (best), or, of its
            `candidates` best by validation, those with the smallest Tr(sqrt v) (flattest).
        candidates: number of weights of the previous phase that `flattest` chooses from.
    """

    start: int
    steps: int
    rate_factor: float = 1.0
    rate_ratio: tuple[int, int] | None = None
    start_from: str = "previous"
    candidates: int = 5

    @property
    def kept(self) -> int:
        """Number of weights of the previous phase to keep until this one begins."""
        return {"previous": 0, "best": 1, "flattest": self.candidates}[self.start_from]

    @property
    def end(self) -> int:
        """The step after the last one."""
        return self.start + self.steps


@dataclass(frozen=True)
class RunLength:
    """Length of a run in optimizer steps; only schedules that count epochs need the length of an epoch."""

    total_steps: int
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None and name == "steps_per_epoch":
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise SettingError(name, value, "is not a positive whole number", "use 1 or more")

    def epoch(self, field: str, value: object, remedy: str = "bind with steps_per_epoch") -> int:
        """Steps per epoch. Raises SettingError naming the field that needs them if they are not known."""
        if self.steps_per_epoch is None:
            raise SettingError(field, value, "the length of an epoch is not known", remedy)
        return self.steps_per_epoch


def observed(value: Any) -> float:
    """A loss or accuracy as a number: a tensor may be a buffer that its owner changes, or hold a graph."""
    return float(value.detach() if hasattr(value, "detach") else value)


@dataclass
class ScheduleOptions(Settings):
    """Options common to all schedules. Subclasses add their own and define the precision of each step."""

    name: str = setting(MISSING, "the schedule's name, as in schedule=NAME")
    # Any, as cyclic schedules also accept `auto` and OmegaConf keeps the type of the first class that declares a field.
    q_min: Any = setting(3, "lowest forward precision in bits (weights and activations)", minimum=1, maximum=32)
    q_max: int = setting(8, "highest forward precision in bits, that of the static baseline", minimum=1, maximum=32)
    # sweeps over cyclic and other schedules set it for all
    cycles: int = setting(8, "", affects_result=False, unused=True)

    def validate(self) -> None:
        self.check_q_min()
        if self.q_min == AUTO:
            raise SettingError("q_min", AUTO, "only a cyclic schedule can find it", "give a whole number")
        if self.q_min > self.q_max:
            raise SettingError("q_min", self.q_min, f"is above q_max={self.q_max}", "choose q_min <= q_max")

    def check_q_min(self) -> None:
        """Raise SettingError for a q_min that is neither an integer nor `auto`."""
        if self.q_min != AUTO and type(self.q_min) is not int:
            problem = "cannot be null" if self.q_min is None else "has the wrong type"
            raise SettingError("q_min", self.q_min, problem, f"give a whole number (type Integer), or {AUTO}")

    def precision(self, step: int, length: RunLength) -> Precision:
        """Bits of `step`, counted from 0, in a run of `length`. A pure function."""
        how = "`precision`, or, where it depends on training, `scheduled` and `precisions` of the schedule that `bind` returns"
        raise NotImplementedError(f"{type(self).__name__} must define {how}")

    def changes(self, length: RunLength) -> Sequence[int]:
        """The steps at which the precision can change, ascending from 0 and at most `total_steps`; by default all."""
        return range(length.total_steps)

    def course(self, length: RunLength) -> list[tuple[Precision, int]]:
        """The run-length encoded precision of all steps of a run: [(precision, steps), ...]."""
        parts = pairwise([*self.changes(length), length.total_steps])
        return joined((self.precision(start, length), end - start) for start, end in parts if start < end)

    @property
    def reference(self) -> Precision:
        """The static precision that savings are relative to: q_max for all tensors."""
        return Precision(self.q_max, self.q_max, self.q_max)

    @property
    def format_lists(self) -> tuple[Sequence[str], Sequence[str]] | None:
        """Formats of weights and activations, and of gradients, which the bits select; None: those of the quantizer."""
        return None

    @property
    def chooses(self) -> bool:
        """Whether weights are chosen during the run, which requires held-out training data."""
        return False

    def phases(self, length: RunLength) -> tuple[Phase, ...]:
        """The phases of a run of `length`, each with its learning rate and starting weights; one by default."""
        return (Phase(0, length.total_steps),)

    def configure_for(self, family: str | None, blocks: int) -> ScheduleOptions:
        """These options with the defaults for a network of `family` with this number of named blocks. Raises SettingError if
        the schedule needs blocks and the network has none."""
        return self

    def check_length(self, length: RunLength) -> None:
        """Raise SettingError if these options do not fit a run of `length`."""

    def bind(self, total_steps: int, steps_per_epoch: int | None = None) -> Schedule:
        """The schedule of a run of this length."""
        return Schedule(self, RunLength(total_steps, steps_per_epoch))


@dataclass(frozen=True)
class Schedule:
    """Precision as a function of the step: `schedule(step)` gives the bits of optimizer step `step`, counted from 0. Raises
    TypeError for a step that is not a whole number (Python's, NumPy's, or a tensor's), SettingError for a step outside the run,
    and at construction for options that do not fit its length."""

    fixed: ClassVar[bool] = True
    """Whether the precision of every step is known in advance; False if it depends on training or input."""
    follows: ClassVar[str] = "depends on training"
    """Description of what a precision that is not `fixed` depends on."""

    options: ScheduleOptions
    length: RunLength

    def __post_init__(self) -> None:
        self.options.check_length(self.length)

    @property
    def name(self) -> str:
        """The schedule's name, such as `RTH`."""
        return self.options.name

    @property
    def steps(self) -> int:
        """Maximum number of training steps: the whole run, unless a search ends it earlier."""
        return self.length.total_steps

    @property
    def summary(self) -> str:
        """Description of what is known in advance about a precision that is not `fixed`."""
        return f"starts at {'/'.join(map(str, self(0)))}, depends on training"

    @property
    def shortfall(self) -> str:
        """What of the schedule its run is too short for, and the remedy; empty: nothing."""
        return ""

    def __call__(self, step: int) -> Precision:
        step = operator.index(step)
        if not 0 <= step < self.length.total_steps:
            last = self.length.total_steps - 1
            remedy = f"steps run from 0 to total_steps - 1 = {last}; bind the schedule to more steps"
            raise SettingError("step", step, "is outside the run", remedy)
        return effective(read_precision(self.scheduled(step)))

    def scheduled(self, step: int) -> Precision:
        """Bits of a step of the run; if they depend on training, those of the current step."""
        return self.options.precision(step, self.length)

    @cached_property
    def run_lengths(self) -> list[tuple[Precision, int]]:
        """The run-length encoded precision of all steps: [(precision, steps), ...]. Raises SettingError if it is not `fixed`."""
        if not self.fixed:
            remedy = "use `precisions`, or `min_cost` and `max_cost`, which it lies between"
            raise SettingError(
                "schedule", self.name, f"has no course that is known in advance: it {self.follows}", remedy
            )
        course = self.options.course(self.length)
        return joined((effective(read_precision(precision)), steps) for precision, steps in course)

    @property
    def histogram(self) -> Counter[Precision]:
        """Number of steps at each precision."""
        histogram: Counter[Precision] = Counter()
        for precision, steps in self.run_lengths:
            histogram[precision] += steps
        return histogram

    @property
    def reference(self) -> Precision:
        """The static precision that this schedule is compared with (static q_max)."""
        return effective(read_precision(self.options.reference))

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of the run, in order and without gaps."""
        return self.options.phases(self.length)

    def highest(self, current: Precision) -> Precision:
        """The bits at which a network is evaluated besides those of its last step: q_max; its own if it has never been trained
        at others, and after several phases, as the weights of a phase fit no other bits."""
        is_alone = self.fixed and self.precisions == {current}
        return current if is_alone or len(self.phases) > 1 else self.reference

    @property
    def precisions(self) -> set[Precision]:
        """All precisions that a step can have."""
        return {precision for precision, _ in self.run_lengths}

    @property
    def lowest(self) -> Precision:
        """The lowest bits of each kind that a step can have."""
        return Precision(*(min(bits) for bits in zip(*self.precisions)))

    @property
    def min_cost(self) -> list[tuple[Precision, int]]:
        """Cheapest possible course: [(precision, steps), ...]."""
        return self.run_lengths if self.fixed else [(self.lowest, self.steps)]

    @property
    def max_cost(self) -> list[tuple[Precision, int]]:
        """Most expensive possible course."""
        return self.run_lengths if self.fixed else [(self.reference, self.steps)]


@dataclass(frozen=True)
class FeedbackSchedule(Schedule):
    """A stateful schedule that depends on the loss and accuracy that `observe` receives at regular intervals."""

    fixed = False
    observes_penalty: ClassVar[bool] = False
    """Whether the loss passed to `observe` includes penalties, such as the cost term of DFQ."""

    @property
    def observation_steps(self) -> int:
        """The interval between calls of `observe`, in steps."""
        raise NotImplementedError

    def observe(self, loss: float, accuracy: float) -> None:
        """Record the mean training loss and accuracy (0 to 1) of the last `observation_steps` steps."""
        raise NotImplementedError

    @cached_property
    def indicator(self) -> Any:
        """What the observations so far amount to; its attributes named in `saved`, plain numbers, are the schedule's state."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """State to save in a checkpoint, which later observations do not change."""
        return {name: copy.copy(getattr(self.indicator, name)) for name in self.indicator.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, value in state.items():
            setattr(self.indicator, name, copy.copy(value))


@dataclass(frozen=True)
class SearchSchedule(FeedbackSchedule):
    """A schedule that searches for a setting: it may end the run or reset it to the initial weights, and has a result.

    A non-finite loss does not end such a run.
    """

    def begin(self, majority_baseline: float) -> None:
        """Set the accuracy (0 to 1) of always predicting the most frequent class; called once, before the first step."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        """Whether the search is complete, which ends the run."""
        raise NotImplementedError

    @property
    def should_reset(self) -> bool:
        """Whether training should restart from the initial weights after the last observation."""
        raise NotImplementedError

    @property
    def result(self) -> dict[str, Any]:
        """The result for the run's summary; empty before the search is complete."""
        raise NotImplementedError
