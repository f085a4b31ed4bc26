"""The schedules by name, and the function that constructs one."""

from typing import Any

from bitcycle.presets import Presets
from bitcycle.schedule.base import Schedule, ScheduleOptions

SUITE = ("CR", "CT", "LR", "LT", "RR", "RTV", "RTH", "ER", "ETV", "ETH")
"""The ten schedules of Better Schedules, section 3.2."""

SCHEDULES: Presets[ScheduleOptions] = Presets("schedule")
"""Schedule name -> its options."""


def schedule(name: str, *, total_steps: int, steps_per_epoch: int | None = None, **options: Any) -> Schedule:
    """Construct the schedule `name` for a run of `total_steps` optimizer steps.

    Args:
        name: one of `SCHEDULES`.
        total_steps: length of the run in optimizer steps.
        steps_per_epoch: length of an epoch, only needed with unit="epoch".
        options: fields of the schedule's class, such as q_min, q_max and cycles.

    Raises:
        SettingError (a ValueError): for an unknown name or option, or invalid values.

    >>> rth = schedule("RTH", q_min=3, q_max=8, cycles=8, total_steps=64_000)
    >>> rth(0), rth(4_000)
    (Precision(weight=8, activation=8, gradient=8), Precision(weight=3, activation=3, gradient=8))
    """
    return SCHEDULES.chosen(name)(**options).bind(total_steps, steps_per_epoch)
