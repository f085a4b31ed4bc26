"""Precision schedules: functions of the training step, without dependence on PyTorch."""

from bitcycle.schedule.base import FeedbackSchedule, RunLength, Schedule, ScheduleOptions, SearchSchedule
from bitcycle.schedule.cyclic import Cyclic, Delayed
from bitcycle.schedule.gated import Dfq, FracTrain, GatedSchedule, GateOptions
from bitcycle.schedule.phase import Phase
from bitcycle.schedule.phased import Hlhlp, PartialPretrain, PhasedOptions
from bitcycle.schedule.plateau import PlateauIndicator
from bitcycle.schedule.precision import FLOAT, Precision
from bitcycle.schedule.range_test import RangeTest, RangeTestSchedule, UndecidedSchedule
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
    "FeedbackSchedule",
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
    "SearchSchedule",
    "Staged",
    "Static",
    "UndecidedSchedule",
    "schedule",
]
