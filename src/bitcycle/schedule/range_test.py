"""CPT's precision range test: raises the precision during training to find the lowest at which training progresses."""

import dataclasses
import logging
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Optional

from bitcycle.precision import Precision, effective
from bitcycle.schedule.base import AUTO, RunLength, Schedule, ScheduleOptions, SearchSchedule, observed
from bitcycle.settings import SettingError, Settings, setting

logger = logging.getLogger(__name__)

LEVEL_STEPS, WINDOW = 390, 100
"""Steps at each precision, and averaging window at their end, in a run of the papers' length."""

SHORT_RUN = 16
"""Maximum length of a precision as a fraction of the run, so that shorter runs have a shorter test."""


@dataclass
class RangeTestRule(Settings):
    """Duration of each precision, and the rise in accuracy that counts as progress."""

    level_steps: Optional[int] = setting(
        None, "range test: steps at each precision; null: 390, or a sixteenth of the run if that is less", minimum=1
    )
    window: Optional[int] = setting(
        None, "range test: averaging window of the accuracy, at the end of a precision; null: 100 of 390", minimum=1
    )
    threshold: float = setting(
        0.02, "range test: rise of the training accuracy (0 to 1) that counts as progress", minimum=0, maximum=1
    )

    def lengths(self, total_steps: int, levels: int) -> tuple[int, int]:
        """(steps at each of `levels` precisions, window) in a run of `total_steps`."""
        steps = self.level_steps or max(1, min(LEVEL_STEPS, total_steps // max(SHORT_RUN, levels)))
        return steps, self.window or max(1, round(steps * WINDOW / LEVEL_STEPS))


@dataclass
class FirstRangeTest(RangeTestRule):
    """Options of the range test that precedes a run with q_min=auto."""

    start: int = setting(2, "range test: initial bits", minimum=1, maximum=32)


@dataclass
class RangeTest(RangeTestRule, ScheduleOptions):
    """Raises the precision during training until the training accuracy rises; the precision of that rise is q_min.

    With majority baseline c (the accuracy of the most frequent class), S = level_steps and w = window:

        r := c
        for b = q_min .. q_max - 1:  train S more steps at b bits
                                     A := mean training accuracy of the last w of them
                                     found b, if A - r > threshold;  r := max(r, A)
        found q_max, if there was no rise

    Weights and optimizer state carry over from one precision to the next; after a precision with a non-finite loss, which is
    never chosen, they are reset. The gradient has q_max bits unless `gradient` is set. The learning rate and its warm-up are
    those of the beginning of the whole run.

    Source: CPT, section 3.3 and figure 4, which specify neither window, threshold, length nor gradient bits; there is no released
    code. The test ends when q_min is found, unless `stop` is false.

    Measured on CIFAR-10 with the recipe of the papers (SBM, batches of 128, rate 0.1, gradients of 8 bits), n = 1 each:

        ResNet-20    390 steps at each precision    A = 0.323 at 2 bits, 0.469 at 3 bits
        ResNet-20    156 steps (another seed)       A = 0.234 at 2 bits, 0.354 at 3 bits
        ResNet-38    156 steps                      A = 0.179 at 2 bits

    Hence q_min = 2 for both, far above the threshold. CPT uses 3 for its ResNets on CIFAR; the 3 and 4 bits in its figure 4 are
    for other networks on CIFAR-100. At chance level, A has a standard deviation of 0.003 (window of 100 batches), a seventh of
    the threshold. Much shorter levels give a higher q_min: ResNet-38 is still at chance level after 30 steps.
    """

    name: str = "range_test"
    q_min: int = setting(2, "initial bits of the test (CPT: the lowest possible, e.g. 2)", minimum=1, maximum=32)
    gradient: Optional[int] = setting(None, "gradient precision in bits; null means q_max", minimum=1, maximum=32)
    stop: bool = setting(True, "end when q_min is found; false: continue up to q_max - 1, for the figure")

    def validate(self) -> None:
        if self.q_min >= self.q_max:
            problem = f"there is nothing to test below q_max={self.q_max}"
            raise SettingError("q_min", self.q_min, problem, "start the test below q_max")

    def check_length(self, length: RunLength) -> None:
        total, levels = length.total_steps, len(self.levels)
        steps, window = self.lengths(total, levels)
        if steps * levels > total:
            problem = f"{levels} precisions of {steps} steps do not fit into the run's {total}"
            remedy = f"use at most {total // levels}" if total >= levels else f"use {levels} steps or more"
            raise SettingError("level_steps", self.level_steps, problem, remedy)
        if window > steps:
            problem = f"is longer than the {steps} steps of a precision"
            raise SettingError("window", window, problem, "use a shorter window")

    @property
    def levels(self) -> range:
        """The precisions to try."""
        return range(self.q_min, self.q_max)

    def at(self, bits: int) -> Precision:
        """Precision at `bits` forward bits."""
        return Precision(bits, bits, self.q_max if self.gradient is None else self.gradient)

    @property
    def reference(self) -> Precision:
        return self.at(self.q_max)

    def bind(self, total_steps: int, steps_per_epoch: int | None = None) -> "RangeTestSchedule":
        return RangeTestSchedule(self, RunLength(total_steps, steps_per_epoch))


@dataclass
class RangeIndicator:
    """State of a range test: what the precisions before the current one reached, and the observations of the current one."""

    saved: ClassVar[tuple[str, ...]] = ("highest", "found", "trace", "accuracies", "diverged", "should_reset")

    highest: float = 0.0
    found: int | None = None
    trace: list[tuple[int, float, float]] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    diverged: bool = False
    should_reset: bool = False


@dataclass(frozen=True)
class RangeTestSchedule(SearchSchedule):
    """A range test bound to a run: `observe` takes loss and training accuracy; it gives the current bits and the result."""

    options: RangeTest

    @cached_property
    def lengths(self) -> tuple[int, int]:
        """(steps at each precision, window)."""
        return self.options.lengths(self.length.total_steps, len(self.options.levels))

    @cached_property
    def indicator(self) -> RangeIndicator:
        """The state of the test."""
        return RangeIndicator()

    @property
    def steps(self) -> int:
        return self.lengths[0] * len(self.options.levels)

    @property
    def observation_steps(self) -> int:
        return math.gcd(*self.lengths)

    @property
    def should_reset(self) -> bool:
        return self.indicator.should_reset

    def begin(self, majority_baseline: float) -> None:
        self.load_state_dict(vars(RangeIndicator(majority_baseline)))

    @property
    def level(self) -> int:
        """The current precision in bits; at the end the last one."""
        levels = self.options.levels
        return levels[min(len(self.indicator.trace), len(levels) - 1)]

    def observe(self, loss: float, accuracy: float) -> None:
        state, (observations, window) = self.indicator, (each // self.observation_steps for each in self.lengths)
        state.should_reset = False
        state.accuracies.append(observed(accuracy))
        state.diverged |= not math.isfinite(observed(loss))
        if len(state.accuracies) < observations:
            return
        reached = sum(state.accuracies[-window:]) / window
        rise, bits = reached - state.highest, self.level
        logger.info("range test: training accuracy %.3f at %d bits, a rise of %.3f", reached, bits, rise)
        if rise > self.options.threshold and state.found is None and not state.diverged:
            state.found = bits
        state.trace.append((bits, reached, rise))
        state.highest = state.highest if state.diverged else max(state.highest, reached)
        state.should_reset = state.diverged
        state.accuracies, state.diverged = [], False

    @property
    def finished(self) -> bool:
        tried_all = len(self.indicator.trace) == len(self.options.levels)
        return tried_all or (self.options.stop and self.indicator.found is not None)

    @property
    def result(self) -> dict[str, Any]:
        """q_min, the rule, and for each precision the accuracy it reached and its rise."""
        if not self.finished:
            return {}
        found, reason = self.indicator.found, "the first precision at which training accuracy rose"
        if found is None:
            found, reason = self.options.q_max, "training accuracy rose at no lower precision"
        levels = [{"bits": bits, "accuracy": reached, "rise": rise} for bits, reached, rise in self.indicator.trace]
        steps, window = self.lengths
        rule = {"threshold": self.options.threshold, "level_steps": steps, "window": window}
        return {"q_min": found, "reason": reason, "range_test": {**rule, "levels": levels}}

    @property
    def precisions(self) -> set[Precision]:
        return {self.options.at(bits) for bits in self.options.levels}

    @property
    def min_cost(self) -> list[tuple[Precision, int]]:
        return self.max_cost[:1] if self.options.stop else self.max_cost

    @property
    def max_cost(self) -> list[tuple[Precision, int]]:
        return [(self.options.at(bits), self.lengths[0]) for bits in self.options.levels]

    def scheduled(self, step: int) -> Precision:
        return self.options.at(self.level)


@dataclass(frozen=True)
class UndecidedSchedule(Schedule):
    """A schedule with q_min=auto: knows the bounds of its bits; `resolve` turns it into a schedule given the test's result."""

    fixed = False

    options: Any

    @property
    def summary(self) -> str:
        test = self.preliminary
        steps, _ = test.lengths(self.length.total_steps, len(test.levels))
        return f"a range test finds q_min first, with {steps} steps per precision from {test.q_min} bits"

    @property
    def precisions(self) -> set[Precision]:
        forward = range(self.options.lowest_forward, self.options.q_max + 1)
        gradient = range(self.options.lowest_gradient, self.options.highest_gradient + 1)
        return {effective(Precision(bits, bits, g)) for bits in forward for g in gradient}

    @property
    def preliminary(self) -> RangeTest:
        """The range test that must run first."""
        return self.options.first_test

    def resolve(self, result: dict[str, Any]) -> Schedule:
        """The schedule, given the `result` of the preliminary run."""
        decided = dataclasses.replace(self.options, q_min=result["q_min"])
        return decided.bind(self.length.total_steps, self.length.steps_per_epoch)

    def __call__(self, step: int) -> Precision:
        remedy = "run schedule=range_test first and set the result, or let `python train.py` do both"
        raise SettingError("q_min", AUTO, "is not known yet", remedy)
