"""What is asked of the machine: a run or a sweep, its data, and its duration."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from bitcycle.configuration import RunConfig
from bitcycle.dataset import DATASETS, DatasetOptions
from bitcycle.doctor.duration import RunTime, measure, measure_kinds, one_of_each_kind
from bitcycle.doctor.finding import CONFIGURATION, DATA, PROBLEM, WARNING, Finding
from bitcycle.doctor.machine import LESS_MEMORY
from bitcycle.errors import DataError, RunError
from bitcycle.optional_imports import explain_missing
from bitcycle.settings import MISSING, default_of
from bitcycle.sweep.registry import FINISHED, SweepRun
from bitcycle.sweep.status import Speeds, measured_seconds, names_of
from bitcycle.training.plan import Plan, make_plan

RUN_BUDGET, SWEEP_BUDGET = 8.0, 30.0
"""Seconds of timed steps, of a run and of all runs of a sweep."""


def dataset_findings(data_root: Path) -> Iterator[Finding]:
    """Yield the presets of data sets that lie below data_root, and those that do not."""
    found: dict[str, str] = {}
    absent: dict[str, str] = {}
    for name, preset in DATASETS.items():
        if any(default_of(field) == MISSING for field in _required(preset.kind, preset.values)):
            continue  # the user's own data
        options = preset()
        try:
            place = options.place(data_root)
            found |= {name: str(place)} if place else {}
            absent |= {} if place else {name: str(options.absent(data_root))}
        except ModuleNotFoundError as error:  # a package that knows its layout
            absent[name] = explain_missing(error) or str(error)
    values = {"data_root": str(data_root), "found": found, "missing": absent}
    text = f"below {data_root}: {', '.join(found)}; not there: {', '.join(absent) or 'none'}"
    remedy = (
        "`bitcycle doctor dataset=NAME` says where to put what; some are downloaded when a run needs them"
        if absent
        else ""
    )
    yield Finding("data sets", text, remedy=remedy, values=values)


def _required(kind: type[DatasetOptions], values: Mapping[str, Any]) -> list[Any]:
    """The fields of a dataset's options that its preset leaves to the user."""
    return [field for name, field in kind.__dataclass_fields__.items() if name not in values and field.init]


def run_findings(config: RunConfig) -> Iterator[Finding]:
    """Yield whether a run can work here, and how long it takes. Raises SettingError if its settings are incompatible."""
    try:
        plan = make_plan(config)
        yield _plan_finding(plan)
        time = measure(plan, RUN_BUDGET)
    except DataError as error:
        yield data_finding([config.dataset], str(error))
        return
    except (RunError, RuntimeError, ModuleNotFoundError) as error:
        yield _failure(config.dataset.name, error)
        return
    yield Finding(DATA, f"{config.dataset.name} can be read ({time.start:.0f} s until the first step)")
    yield time_finding(plan, time)


def _plan_finding(plan: Plan) -> Finding:
    config, state = plan.config, plan.state()
    text = f"{config.model.name} on {config.dataset.name}, schedule {config.schedule.name}, scale {config.scale}: "
    text += f"{plan.total_steps} steps of {plan.batch_size} samples, {state}"
    return Finding(
        "run", text, values={"run_dir": str(plan.folder.path), "state": state, "total_steps": plan.total_steps}
    )


def data_finding(options: Sequence[DatasetOptions], problem: str) -> Finding:
    """The finding that data are missing; the error's text ends with what to do."""
    names = sorted({each.name for each in options})
    first, _, rest = problem.partition(". ")
    return Finding(DATA, first, PROBLEM, rest or "see docs/data.md", {"missing": names})


def _failure(what: str, error: Exception) -> Finding:
    reason, remedy = str(error).split("\n")[0], "the message says what to change"
    if isinstance(error, ModuleNotFoundError):
        reason, _, remedy = (explain_missing(error) or f"{reason}: install {error.name}").partition(": ")
    if isinstance(error, torch.OutOfMemoryError):
        remedy = LESS_MEMORY
    return Finding("step", f"{what}: {reason}", PROBLEM, remedy)


def time_finding(plan: Plan, time: RunTime) -> Finding:
    """Seconds of a step and of an evaluation, and the hours that they make."""
    hours = time.total / 3600
    text = f"{_seconds(time.step)} a step, {_seconds(time.evaluation)} an evaluation: {in_words(hours)} for the run"
    if time.timed_samples < plan.epoch.samples_per_step:
        text += f" (extrapolated from steps of {time.timed_samples} samples)"
    memory = f"; {time.memory / 2**30:.1f} GiB on the device" if time.memory else ""
    return Finding("time", text + memory, values={**time._asdict(), "hours": hours})


def _seconds(value: float) -> str:
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def in_words(hours: float) -> str:
    """A duration as days, hours and minutes.

    >>> in_words(1.5), in_words(0.001)
    ('1:30:00', '0:00:04')
    """
    return str(timedelta(seconds=round(3600 * hours)))


def sweep_findings(name: str, runs: Sequence[SweepRun]) -> Iterator[Finding]:
    """Yield whether the runs of a sweep can work here, and how long all of them take."""
    wrong = [run for run in runs if run.state == "wrong"]
    if wrong:
        text, remedy = f"{len(wrong)} of {len(runs)} runs, the first: {wrong[0].problem}", "correct the settings"
        yield Finding(CONFIGURATION, text, PROBLEM, remedy)
    left = [run for run in runs if run.path and run.state not in FINISHED]
    kinds = one_of_each_kind(runs)
    values: dict[str, Any] = {"runs": len(runs), "left": len(left), "kinds": len(kinds)}
    yield Finding("sweep", f"{name}: {len(runs)} runs of {len(kinds)} kinds, {len(left)} to be trained", values=values)
    times: list[tuple[SweepRun, float]] = []
    for run, found in measure_kinds(runs, SWEEP_BUDGET):
        if isinstance(found, RunTime):
            times.append((run, found.total))
        elif isinstance(found, DataError):
            yield data_finding([run.config.dataset] if run.config else [], str(found))
        else:
            yield _failure(" ".join(run.arguments), found)
    yield _sweep_time(runs, left, times)


def _sweep_time(runs: Sequence[SweepRun], left: Sequence[SweepRun], times: Sequence[tuple[SweepRun, float]]) -> Finding:
    """The hours of all runs of a sweep and of those left, one after the other, from the times of some of them."""
    speeds = Speeds([], measured_seconds(times))
    whole, rest = ([speeds.of(run) for run in several if run.path] for several in (runs, left))
    hours, hours_left = (sum(filter(None, seconds)) / 3600 for seconds in (whole, rest))
    unknown = whole.count(None)
    text = f"{in_words(hours_left)} for the runs left, one after the other"
    text += f"; estimated from {len(times)} of {len(one_of_each_kind(runs))} kinds"
    timed = ["-".join(names_of(run)) for run, _ in times]
    values = {"hours": hours, "hours_left": hours_left, "timed": timed, "unknown": unknown}
    if not unknown:
        return Finding("time", text, values=values)
    remedy = "repeat with one of these runs, as `bitcycle doctor SETTINGS`, to time it"
    return Finding(
        "time", f"{text}; without {unknown} runs whose network and data were not timed", WARNING, remedy, values
    )
