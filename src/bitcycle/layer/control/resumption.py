"""What the saved state of a controller says of its schedule, so that going on with another one does not pass unnoticed."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from bitcycle.schedule import Schedule
from bitcycle.settings import SettingError

logger = logging.getLogger(__name__)


def schedule_record(schedule: Schedule) -> dict[str, dict[str, Any]]:
    """The settings of a schedule that affect bits, and the length of its run, as JSON has them."""
    kept = {field.name for field in fields(schedule.options) if field.metadata.get("affects_result", True)}
    settings = {name: value for name, value in asdict(schedule.options).items() if name in kept}
    length = {name: None if number is None else int(number) for name, number in asdict(schedule.length).items()}
    record: dict[str, dict[str, Any]] = json.loads(json.dumps({"settings": settings, "length": length}, default=str))
    return record


def check_resumed(saved: Mapping[str, Mapping[str, Any]], schedule: Schedule) -> None:
    """Compare a saved record with the schedule that goes on. Raises SettingError for another schedule. Another length, as of a
    run that is extended, is legitimate but moves the cycles: a warning names it."""
    own = schedule_record(schedule)
    if changed := _changes(saved["settings"], own["settings"]):
        problem = f"the saved state is of a schedule with {changed}"
        remedy = "make the controller with the schedule of that state, or use a new one without loading the state"
        raise SettingError("schedule", schedule.name, problem, remedy)
    changed = _changes(saved["length"], own["length"])
    if changed and len(schedule.precisions) > 1:
        logger.warning(
            "schedule %s goes on in a run of another length than the saved state was in, with %s: its remaining bits are those"
            " of a run of the new length",
            *(schedule.name, changed),
        )


def _changes(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """The values that differ, in words; what only one of the two has, or knows, is not compared."""
    return ", ".join(
        f"{name}={value} (now {own[name]})"
        for name, value in saved.items()
        if name in own and own[name] != value and (name != "steps_per_epoch" or None not in (value, own[name]))
    )
