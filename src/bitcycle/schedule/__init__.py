"""Precision schedules: functions of the training step, without dependence on PyTorch."""

from bitcycle.schedule.base import FeedbackSchedule, Phase, RunLength, Schedule, ScheduleOptions, SearchSchedule
from bitcycle.schedule.cyclic import Cyclic, Delayed
from bitcycle.schedule.formats import FORMAT_BITS
from bitcycle.schedule.gated import Dfq, FracTrain, GatedSchedule
from bitcycle.schedule.late_switch import LateSwitch
from bitcycle.schedule.phased import Hlhlp, PartialPretrain, PhasedOptions
from bitcycle.schedule.range_test import RangeTest, RangeTestSchedule, UndecidedSchedule
from bitcycle.schedule.registry import SCHEDULES, SUITE, schedule
from bitcycle.schedule.staged import Pfq, PfqSchedule, PlateauIndicator, Staged
from bitcycle.schedule.static import Deficit, Static

__all__ = [
    "FORMAT_BITS",
    "SCHEDULES",
    "SUITE",
    "Cyclic",
    "Deficit",
    "Delayed",
    "Dfq",
    "FeedbackSchedule",
    "FracTrain",
    "GatedSchedule",
    "Hlhlp",
    "LateSwitch",
    "PartialPretrain",
    "Pfq",
    "PfqSchedule",
    "Phase",
    "PhasedOptions",
    "PlateauIndicator",
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
