"""Static precision, and static precision with a window of low precision."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from bitcycle.precision import Precision
from bitcycle.schedule.base import RunLength, ScheduleOptions
from bitcycle.settings import SettingError, setting


@dataclass
class Static(ScheduleOptions):
    """The same precision at every step: q_max forward, `gradient` backward. The baseline of all papers."""

    name: str = "static"
    q_min: Any = setting(3, "", affects_result=False, unused=True)
    gradient: Optional[int] = setting(None, "gradient precision in bits; null means q_max", minimum=1, maximum=32)

    def validate(self) -> None:
        self.check_q_min()

    @property
    def reference(self) -> Precision:
        return Precision(self.q_max, self.q_max, self.q_max if self.gradient is None else self.gradient)

    def precision(self, step: int, length: RunLength) -> Precision:
        return self.reference

    def changes(self, length: RunLength) -> Sequence[int]:
        return (0,)


@dataclass
class Deficit(ScheduleOptions):
    """q_min inside a window of the run, q_max outside it, gradients at q_max throughout.

    Source: Better Schedules, section 5 (critical learning periods). Differs from the authors' code in measuring the window
    as a fraction of the run unless `unit` is set; their CIFAR deficit runs include the last step (`inclusive`).
    """

    start: float = setting(0.0, "where the window of low precision begins, in `unit`", minimum=0)
    end: float = setting(0.25, "where the window of low precision ends, in `unit`", minimum=0)
    unit: str = setting("fraction", "unit of start and end", choices=("fraction", "step", "epoch"))
    inclusive: bool = setting(False, "include the step or epoch `end` in the window (the authors' CIFAR code: t <= R)")

    def validate(self) -> None:
        super().validate()
        if self.start > self.end:
            raise SettingError("start", self.start, f"is after end={self.end}", "choose start <= end")
        if self.unit == "fraction" and self.end > 1:
            raise SettingError(
                "end", self.end, "a fraction of the run is at most 1", "use 0 to 1, or set unit to step or epoch"
            )

    def check_length(self, length: RunLength) -> None:
        _, begin, end, after = self.changes(length)
        if self.start < self.end and begin == (after if self.inclusive else end):
            problem = f"the window to {self.end:g} ({self.unit}) has none of the run's {length.total_steps} steps"
            raise SettingError("start", self.start, problem, "choose a window within the run, or schedule=static")

    def precision(self, step: int, length: RunLength) -> Precision:
        start, end, unit = self._window(length)
        position = step // unit
        low = start <= position < end or (self.inclusive and position == end)
        bits = self.q_min if low else self.q_max
        return Precision(bits, bits, self.q_max)

    def changes(self, length: RunLength) -> Sequence[int]:
        start, end, unit = self._window(length)
        edges = (0, math.ceil(start), math.ceil(end), math.ceil(end) + 1)  # the last one if inclusive
        return [min(edge * unit, length.total_steps) for edge in edges]

    def _window(self, length: RunLength) -> tuple[float, float, int]:
        """(begin, end, unit): the window, in multiples of `unit` steps."""
        if self.unit == "fraction":
            return round(self.start * length.total_steps), round(self.end * length.total_steps), 1
        return self.start, self.end, length.epoch("unit", self.unit) if self.unit == "epoch" else 1
