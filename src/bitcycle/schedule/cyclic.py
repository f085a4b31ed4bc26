"""Cyclic precision: the ten schedules of Better Schedules, the three patterns of CPT, cycles of the gradient, late starts.

A growth profile is a function g from [0, 1] to [0, 1] along which precision rises within one cycle. Source: Better Schedules,
section 3.2, step one. The paper gives no constants; the defaults are those of the authors' code.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise
from typing import Any, Optional

from bitcycle.precision import Precision, joined
from bitcycle.schedule.base import AUTO, RunLength, Schedule
from bitcycle.schedule.formats import FormatLevels, bits_of
from bitcycle.schedule.range_test import FirstRangeTest, RangeTest, RangeTestRule, UndecidedSchedule
from bitcycle.settings import MISSING, SettingError, setting

LARGEST_PERIOD = 10**9
"""Up to this length, precision computed in float64 is monotone within half a cycle, as in exact arithmetic: where it rounds to
other bits, which is never at an end of the profile, successive steps differ by more than the rounding error."""
EXP_K, REX_D = 4.0, 0.9
"""Constants of the exponential and the REX profile."""
GROWTH_PROFILES: dict[str, Callable[[float], float]] = {
    "linear": lambda z: z,
    "cosine": lambda z: (1 - math.cos(math.pi * z)) / 2,
    "exponential": lambda z: 1 - math.exp(-EXP_K * z),
    "rex": lambda z: (1 - REX_D) * z / (1 - REX_D * z),
}
"""Growth profiles g(z) by name.

cosine is equation 1 of CPT; exponential rises early and saturates, with k = 4 at 0.982; rex is low for long and rises late: 1 -
rex decay of the REX paper, whose own constant is d = 1/2, whereas all costs in the paper's text have d = 0.9.
"""
TRIANGULAR = ("vertical", "horizontal")
FORMS = ("repeated", *TRIANGULAR, "within", "annealing")


@dataclass
class Cyclic(FormatLevels):
    """Precision that moves between q_min and q_max in `cycles` cycles along a growth profile g.

    With T steps, period P = T / cycles, cycle c = floor(t / P) from 0 and z = (t mod P) / P:

        s(t) = g(z)                                           form = repeated
        s(t) = 1 - g(z) in even cycles, g(z) in odd ones       form = vertical    (triangular, value mirrored)
        s(t) = g(1 - z) in even cycles, g(z) in odd ones       form = horizontal  (triangular, time mirrored)
        s(t) = g(1 - |2z - 1|)                                form = within      (up and down in one cycle)
        s(t) = g(1 - z)                                       form = annealing   (high to low in each cycle)
        bits = round(q_min + (q_max - q_min) s(t))            to the nearest, as CPT's code; its text prints ceil

    Gradient bits follow the same formula between gradient_min and gradient_max, which both default to q_max. With a list of
    `formats`, the formula gives an index from 0 to the last one, in place of bits from q_min to q_max.

    Source: Better Schedules, section 3.2 (the first three forms), CPT, equation 1, table 6 (`within`, `annealing`) and
    table 8 (cycles of the gradient). Differs from the authors' code in rounding the period up if `cycles` does not divide
    the steps (`period_rounding=floor` is theirs and starts a spurious cycle), and in `end_at_q_max`.
    With q_min=auto a range test of CPT comes first (section 3.3): options in `range_test`, method in range_test.py.
    """

    q_min: Any = setting(
        3, "lowest forward precision in bits, or auto: found by a range test that runs first", minimum=1, maximum=32
    )
    profile: str = setting(MISSING, "growth profile within a cycle", choices=(*GROWTH_PROFILES, MISSING))
    form: str = setting("repeated", "how cycles follow each other", choices=FORMS)
    cycles: int = setting(8, "number of cycles in the run (Better Schedules: 8, CPT: 32)", minimum=1)
    gradient_min: Optional[int] = setting(None, "lowest gradient bits; null means q_max", minimum=1, maximum=32)
    gradient_max: Optional[int] = setting(None, "highest gradient bits; null means q_max", minimum=1, maximum=32)
    unit: str = setting("iteration", "unit of the step t; epoch in CPT's text", choices=("iteration", "epoch"))
    period_rounding: str = setting(
        "ceil",
        "period if cycles does not divide T: ceil(T/n), floor(T/n) (CIFAR code), floor(T/n)+1 (GNN and PTB code), or"
        " exact: T/n, every cycle whole",
        choices=("ceil", "floor", "floor_plus_one", "exact"),
    )
    end_at_q_max: bool = setting(
        True, "give the last step the highest precision even if a short or truncated cycle does not reach it"
    )
    range_test: FirstRangeTest = setting(FirstRangeTest, "the range test that runs first if q_min=auto")

    def validate(self) -> None:
        self.check_q_min()
        self._read_formats()
        for name in ("gradient_min", "gradient_max") if self.formats and not self.gradient_formats else ():
            if (given := getattr(self, name)) not in (None, self.q_max):
                problem = f"is not the width of the last of formats, {self.q_max} bits, in which gradients stay"
                raise SettingError(name, given, problem, "leave it out, or set gradient_formats")
        if self.gradient_formats is not None:
            lowest, *_, highest = 2 * bits_of(self.gradient_formats)
            self._take_bits({"gradient_min": lowest, "gradient_max": highest}, "gradient_formats")
        if self.q_min != AUTO:
            super().validate()
        elif self.range_test.start >= self.q_max:
            problem = f"there is nothing to test below q_max={self.q_max}"
            raise SettingError("range_test.start", self.range_test.start, problem, "start below q_max")
        if self.lowest_gradient > self.highest_gradient:
            problem = f"is above gradient_max={self.highest_gradient}"
            raise SettingError("gradient_min", self.lowest_gradient, problem, "choose gradient_min <= gradient_max")
        if self.form in TRIANGULAR and self.cycles % 2:
            problem = "a triangular schedule with an odd number of cycles would end at q_min"
            raise SettingError("cycles", self.cycles, problem, f"use an even number such as {self.cycles + 1}")
        if self.form in ("within", "annealing"):
            self.end_at_q_max = False  # these patterns of CPT's table 6 end at low precision by definition

    def check_length(self, length: RunLength) -> None:
        self._check_cycles(length)
        if self.q_min == AUTO:
            try:
                self.first_test.check_length(length)
            except SettingError as error:
                raise error.within("range_test") from None

    def _check_cycles(self, length: RunLength) -> None:
        steps = self._duration(length)
        if self.cycles > steps:
            problem = f"the run has only {steps} {self.unit}{'s' * (steps > 1)}, less than one per cycle"
            most = steps - steps % 2 if self.form in TRIANGULAR else steps
            raise SettingError(
                "cycles", self.cycles, problem, f"use at most {most} cycles or train longer" if most else "train longer"
            )

    @property
    def first_test(self) -> RangeTest:
        """The range test that finds q_min."""
        rule = {field.name: getattr(self.range_test, field.name) for field in dataclasses.fields(RangeTestRule)}
        gradient = None if self.reference.gradient == self.q_max else self.reference.gradient
        return RangeTest(q_min=self.range_test.start, q_max=self.q_max, gradient=gradient, **rule)

    def bind(self, total_steps: int, steps_per_epoch: int | None = None) -> Schedule:
        length = RunLength(total_steps, steps_per_epoch)
        return UndecidedSchedule(self, length) if self.q_min == AUTO else Schedule(self, length)

    @property
    def lowest_forward(self) -> int:
        """Lowest forward bits; with q_min=auto the lowest that the range test may find."""
        return self.range_test.start if self.q_min == AUTO else int(self.q_min)

    @property
    def lowest_gradient(self) -> int:
        """Lowest bits of the gradient."""
        return self.q_max if self.gradient_min is None else self.gradient_min

    @property
    def highest_gradient(self) -> int:
        """Highest bits of the gradient."""
        return max(self.q_max, self.lowest_gradient) if self.gradient_max is None else self.gradient_max

    @property
    def reference(self) -> Precision:
        return Precision(self.q_max, self.q_max, self.highest_gradient)

    def precision(self, step: int, length: RunLength) -> Precision:
        if self.end_at_q_max and step == length.total_steps - 1:
            return self.reference
        level = self.level(step, length)
        forward = self._level_bits(level, self.q_min, self.q_max, self.formats)
        gradient = self._level_bits(level, self.lowest_gradient, self.highest_gradient, self.gradient_formats)
        return Precision(forward, forward, gradient)

    def course(self, length: RunLength) -> list[tuple[Precision, int]]:
        if self._period(length) > LARGEST_PERIOD:
            return super().course(length)
        at = cache(partial(self.precision, length=length))
        last = length.total_steps - 1  # which may be at q_max in any part of a cycle
        borders = [*(min(turn, last) for turn in self._turns(length)), last, length.total_steps]
        return joined(part for start, end in pairwise(borders) for part in _monotone_course(at, start, end))

    def _turns(self, length: RunLength) -> list[int]:
        """The first steps of all half cycles, within which the precision is monotone."""
        duration, half = self._duration(length), Fraction(self._period(length), 2)
        return [math.ceil(number * half) * self._time_unit(length) for number in range(math.ceil(duration / half))]

    def _time_unit(self, length: RunLength) -> int:
        """Number of steps per `unit`."""
        return 1 if self.unit == "iteration" else length.epoch("unit", self.unit)

    def level(self, step: int, length: RunLength) -> float:
        """s(t) in [0, 1] before scaling and rounding, for `step` of a run of `length`."""
        period = self._period(length)
        cycle, position = divmod(self._time(step, length), period)
        grow, z = GROWTH_PROFILES[self.profile], float(position / period)
        reflected = cycle % 2 == 0
        if self.form == "annealing" or (self.form == "horizontal" and reflected):
            return grow(1 - z)
        if self.form == "vertical" and reflected:
            return 1 - grow(z)
        if self.form == "within":
            return grow(1 - abs(2 * z - 1))
        return grow(z)

    def _level_bits(self, level: float, low: int, high: int, formats: list[str] | None) -> int:
        if formats is None:
            return self._bits(level, low, high)
        return bits_of(formats)[self._bits(level, 0, len(formats) - 1)]

    def _bits(self, level: float, low: int, high: int) -> int:
        return min(high, max(low, round(low + (high - low) * level)))

    def _time(self, step: int, length: RunLength) -> int:
        return step // self._time_unit(length)

    def _duration(self, length: RunLength) -> int:
        return self._time(length.total_steps - 1, length) + 1

    def _period(self, length: RunLength) -> int | Fraction:
        duration = self._duration(length)
        if self.period_rounding == "exact":
            return Fraction(duration, self.cycles)
        if self.period_rounding == "ceil":
            return -(-duration // self.cycles)
        return duration // self.cycles + (self.period_rounding == "floor_plus_one")


def _monotone_course(at: Callable[[int], Precision], first: int, end: int) -> list[tuple[Precision, int]]:
    """The course from `first` to before `end`, where precision is monotone and so changes at few steps."""
    if end <= first:
        return []
    if end - first <= 2 or at(first) == at(end - 1):
        return [(at(first), end - first)] if at(first) == at(end - 1) else [(at(first), 1), (at(end - 1), 1)]
    middle = (first + end) // 2
    return joined([*_monotone_course(at, first, middle), *_monotone_course(at, middle, end)])


@dataclass
class Delayed(Cyclic):
    """q_min until `start`, then the cyclic schedule: delayed CPT.

    Source: CPT, appendix B and table 7. The paper does not give the length of the cycles after a delayed start: all of them are
    fitted into the rest of the run.
    """

    start: float = setting(
        0.5, "fraction of the run, rounded to a whole unit, at which the cycles start; 1: never", minimum=0, maximum=1
    )

    def _check_cycles(self, length: RunLength) -> None:
        if self._first(length) < length.total_steps:
            super()._check_cycles(self._rest(length))

    def precision(self, step: int, length: RunLength) -> Precision:
        first = self._first(length)
        if step < first:
            return Precision(self.q_min, self.q_min, self.lowest_gradient)
        return super().precision(step - first, self._rest(length))

    def _turns(self, length: RunLength) -> list[int]:
        first = self._first(length)
        turns = super()._turns(self._rest(length)) if first < length.total_steps else []
        return [0, *(first + turn for turn in turns)]

    def _first(self, length: RunLength) -> int:
        return min(round(self.start * self._duration(length)) * self._time_unit(length), length.total_steps)

    def _rest(self, length: RunLength) -> RunLength:
        return RunLength(length.total_steps - self._first(length), length.steps_per_epoch)
