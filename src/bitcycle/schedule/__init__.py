"""When is which precision used: pure functions of the step that know nothing but numbers."""

from bitcycle.schedule.base import RunLength, Schedule, ScheduleOptions
from bitcycle.schedule.cyclic import Cyclic, Delayed
from bitcycle.schedule.gated import Dfq, FracTrain, GatedSchedule, GateOptions
from bitcycle.schedule.phase import Phase
from bitcycle.schedule.phased import Hlhlp, PartialPretrain, PhasedOptions
from bitcycle.schedule.plateau import PlateauIndicator
from bitcycle.schedule.precision import FLOAT, Precision, run_lengths
from bitcycle.schedule.range_test import RangeTest, RangeTestSchedule
from bitcycle.schedule.registry import SCHEDULES, SUITE, schedule
from bitcycle.schedule.staged import Pfq, PfqSchedule, Staged
from bitcycle.schedule.static import Deficit, Static

__all__ = [
    "FLOAT",
    "SCHEDULES",
    "SUITE",
    "Cyclic",
    "Deficit",
    "Delayed",
    "Dfq",
    "FracTrain",
    "GateOptions",
    "GatedSchedule",
    "Hlhlp",
    "PartialPretrain",
    "Pfq",
    "PfqSchedule",
    "Phase",
    "PhasedOptions",
    "PlateauIndicator",
    "Precision",
    "RangeTest",
    "RangeTestSchedule",
    "RunLength",
    "Schedule",
    "ScheduleOptions",
    "Staged",
    "Static",
    "run_lengths",
    "schedule",
]
