"""Layers and trainers of other libraries; each module requires the library of its name and is imported on demand."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from bitcycle.layer.control.controller import PrecisionController
from bitcycle.layer.gates.gate import GateRecord
from bitcycle.layer.state import PrecisionState
from bitcycle.layer.twin import modules_of
from bitcycle.precision import effective, read_precision
from bitcycle.schedule import SCHEDULES, Schedule
from bitcycle.schedule import schedule as make_schedule
from bitcycle.settings import SettingError

logger = logging.getLogger(__name__)

EVALUATE_AT = ("step", "q_max")
"""Precision of a trainer's evaluations: that of the last training step, or the schedule's highest."""


def check_evaluate_at(word: str) -> str:
    """`word`. Raises SettingError (a ValueError) if it is not one of EVALUATE_AT."""
    if word not in EVALUATE_AT:
        raise SettingError("evaluate_at", word, "is not one of the options", f"use {' or '.join(EVALUATE_AT)}")
    return word


def bound_schedule(
    schedule: str | Schedule, options: dict[str, Any], total_steps: float, steps_per_epoch: float
) -> Schedule:
    """The schedule of a trainer's callback, bound to the trainer's number of steps if only its name is given.

    Raises:
        SettingError (a ValueError): if that number is not known, if the schedule is bound to fewer steps, or is bound and has
            `options` that would have no effect.
    """
    if isinstance(schedule, str):
        if not math.isfinite(total_steps):
            remedy = "limit the trainer's steps or epochs, or give bitcycle.schedule(..., total_steps=...)"
            raise SettingError("schedule", schedule, "cannot be bound to a training of unknown length", remedy)
        epoch = math.ceil(steps_per_epoch) if 0 < steps_per_epoch < math.inf else None
        bound = make_schedule(schedule, total_steps=int(total_steps), steps_per_epoch=epoch, **options)
        _name_phases(bound)
        return bound
    for name, value in options.items():
        raise SettingError(name, value, "has no effect on a bound schedule", "give it to bitcycle.schedule")
    if schedule.length.total_steps < total_steps < math.inf:
        problem = f"is bound to {schedule.length.total_steps} steps, and training has {int(total_steps)}"
        raise SettingError("schedule", schedule.name, problem, f"bind it with total_steps={int(total_steps)}")
    _name_phases(schedule)
    return schedule


def _name_phases(schedule: Schedule) -> None:
    """Warn that a callback sets the bits of phases only."""
    if len(schedule.phases) > 1:
        starts = ", ".join(str(phase.start) for phase in schedule.phases[1:])
        message = (
            "schedule %s has phases, which have learning rates and first weights of their own (schedule.phases); this callback "
            "sets their bits only: change the others yourself at step %s"
        )
        logger.warning(message, schedule.name, starts)


@contextmanager
def at_highest(
    control: PrecisionController | None, model: nn.Module, schedule: str | Schedule, options: dict[str, Any]
) -> Iterator[None]:
    """Context of an evaluation at the schedule's highest bits, also of a model that `control` has not trained: another one, or
    in a process that only evaluates."""
    states = modules_of(model, PrecisionState)
    if control is not None and all(state in control.states for state in states):
        with control.at_q_max():
            yield
        return
    chosen = SCHEDULES.chosen(schedule)(**options).reference if isinstance(schedule, str) else schedule.reference
    precision = effective(read_precision(chosen))
    before = [(state, state.precision, state.is_controlled) for state in states]
    gates = GateRecord(model)
    chose = gates.chooses
    gates.choose(False)
    for state in states:
        state.control(precision)
    try:
        yield
    finally:
        gates.choose(chose)
        for state, its, was_controlled in before:
            state.control(its, was_controlled)
