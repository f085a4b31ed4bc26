"""Every schedule by its name."""

from __future__ import annotations

from typing import Any

from bitcycle.schedule.base import Schedule, ScheduleOptions
from bitcycle.schedule.cyclic import Cyclic, Delayed
from bitcycle.schedule.gated import Dfq, FracTrain
from bitcycle.schedule.phased import Hlhlp, PartialPretrain
from bitcycle.schedule.range_test import RangeTest
from bitcycle.schedule.staged import Pfq, Staged
from bitcycle.schedule.static import Deficit, Static
from bitcycle.settings import SettingError, nearest

SUITE = {
    "CR": ("cosine", "repeated"),
    "CT": ("cosine", "horizontal"),
    "LR": ("linear", "repeated"),
    "LT": ("linear", "horizontal"),
    "RR": ("rex", "repeated"),
    "RTV": ("rex", "vertical"),
    "RTH": ("rex", "horizontal"),
    "ER": ("exponential", "repeated"),
    "ETV": ("exponential", "vertical"),
    "ETH": ("exponential", "horizontal"),
}
"""The ten schedules of Better Schedules, section 3.2: profile and form of each."""

SCHEDULES: dict[str, tuple[type[ScheduleOptions], dict[str, Any]]] = {
    "static": (Static, {}),
    **{name: (Cyclic, {"profile": profile, "form": form}) for name, (profile, form) in SUITE.items()},
    "cosine_anneal": (Cyclic, {"profile": "cosine", "form": "annealing", "cycles": 32}),
    "triangular": (Cyclic, {"profile": "linear", "form": "within", "cycles": 32}),
    "gradient_cycle": (
        Cyclic,
        {"profile": "cosine", "cycles": 32, "q_min": 6, "q_max": 6, "gradient_min": 6, "gradient_max": 8},
    ),
    "delayed": (Delayed, {"profile": "cosine", "cycles": 32}),
    "deficit": (Deficit, {}),
    "pfq_manual": (Staged, {}),
    "pfq": (Pfq, {}),
    "dfq": (Dfq, {}),
    "fractrain": (FracTrain, {}),
    "hlhlp": (Hlhlp, {}),
    "hlhlhlp": (
        Hlhlp,
        {
            "bits": [32, 2, 8, 2, 8, 2],
            "rates": ["initial", "coarse", "fine", "coarse", "fine", "fine"],
            "start_from": ["previous", "best", "flattest", "best", "flattest", "best"],
        },
    ),
    "fine_tuning": (Hlhlp, {"bits": [32, 2], "rates": ["initial", "fine"], "start_from": ["previous", "best"]}),
    "partial_pretrain": (PartialPretrain, {}),
    "range_test": (RangeTest, {}),
}
"""Schedule name -> its class and the options that make it that schedule; `conf/schedule/NAME.yaml` says the same."""


def schedule(name: str, *, total_steps: int, steps_per_epoch: int | None = None, **options: Any) -> Schedule:
    """Construct the schedule `name` for a run of `total_steps` optimizer steps.

    Args:
        name: one of `SCHEDULES`.
        total_steps: length of the run in optimizer steps.
        steps_per_epoch: length of an epoch, needed with unit="epoch" only.
        options: fields of the schedule's class, such as q_min, q_max and cycles.

    Raises:
        SettingError (a ValueError): for an unknown name or option, or for values that make no sense.

    >>> rth = schedule("RTH", q_min=3, q_max=8, cycles=8, total_steps=64_000)
    >>> rth(0), rth(4_000)
    (Precision(weight=8, activation=8, gradient=8), Precision(weight=3, activation=3, gradient=8))
    """
    if name not in SCHEDULES:
        raise SettingError("schedule", name, "is not a known schedule", nearest(name, SCHEDULES))
    kind, preset = SCHEDULES[name]
    for option in options:
        if option not in kind.__dataclass_fields__:
            raise SettingError(
                option,
                options[option],
                f"schedule {name} has no such option",
                nearest(option, kind.__dataclass_fields__),
            )
    return kind(**{"name": name, **preset, **options}).bind(total_steps, steps_per_epoch)
