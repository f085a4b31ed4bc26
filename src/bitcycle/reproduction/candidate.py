"""The settings that `bitcycle advise` weighs, and what they cost."""

from typing import NamedTuple

from bitcycle.schedule import SCHEDULES, SUITE, ScheduleOptions
from bitcycle.settings import SettingError
from bitcycle.training.plan import Plan

COST_STEPS = 2000
"""Steps over which a candidate's cost is summed; arbitrary, as schedules scale with the run's length."""
LOWEST = 3
"""Lowest precision of a candidate in bits, as in the papers."""
SHORTER = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Lengths of shortened baseline runs as fractions of the full run: the alternative to a schedule at equal cost."""


class Candidate(NamedTuple):
    """A setting: schedule, q_min (0: static), q_max, (lowest) bits of gradients, and length as a fraction."""

    schedule: str
    low: int
    high: int
    gradient: int
    part: float = 1.0

    @property
    def options(self) -> ScheduleOptions:
        """Options of the candidate's schedule."""
        if self.low:
            return SCHEDULES[self.schedule](q_min=self.low, q_max=self.high, gradient_min=self.gradient)
        return SCHEDULES[self.schedule](q_max=self.high, gradient=self.gradient)

    def settings(self, total_steps: int) -> str:
        """As on the command line."""
        words = [f"schedule={self.schedule}", *([f"schedule.q_min={self.low}"] if self.low else [])]
        words.append(f"schedule.q_max={self.high}")
        if self.gradient != self.high:
            words.append(f"schedule.{'gradient_min' if self.low else 'gradient'}={self.gradient}")
        if self.part != 1:
            words.append(f"training.steps={round(self.part * total_steps)}")
        return " ".join(words)


def candidates(top: int, gradient: int) -> list[Candidate]:
    """Static precisions up to the baseline's bits, the ten cyclic schedules for each q_min, and the baseline trained for fewer
    steps. Gradients have the baseline's bits, as in the papers, or the forward bits."""
    bits = range(LOWEST, top + 1)
    static = [Candidate("static", 0, high, g) for high in bits for g in dict.fromkeys((high, gradient))]
    cyclic = [Candidate(name, low, top, g) for name in SUITE for low in bits[:-1] for g in (low, gradient)]
    return [*static, *cyclic, *(Candidate("static", 0, top, gradient, part) for part in SHORTER)]


def cost_of(candidate: Candidate, plan: Plan, measure: str) -> float | None:
    """The cost as a fraction of the baseline's; None if the quantizer does not support the bits. Raises SettingError if the cost
    model does not compute this measure."""
    if candidate.part != 1:
        return candidate.part
    schedule, quantizer = candidate.options.bind(COST_STEPS), plan.config.quantizer
    try:
        quantizer.check(schedule.precisions)
        quantizer.check_ends(schedule.lowest, schedule.reference)
    except SettingError:
        return None
    cost = plan.config.hardware.cost(plan.workload, schedule.histogram, plan.config.quantizer.initial_precision)
    found: float | None = getattr(cost, f"{measure}_relative_to_static".removeprefix("bitops_"))
    if found is None:
        remedy = "use measure=bitops; latency: hardware=tensorcore, zc706 or bitfusion; energy: hardware=bitfusion"
        raise SettingError("measure", measure, "is not computed by this cost model", remedy)
    return found
