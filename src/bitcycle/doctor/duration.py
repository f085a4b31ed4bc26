"""How long runs take on this machine, from a few of their steps with their data; nothing is written or downloaded."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch

from bitcycle.benchmark.measure import timed
from bitcycle.dataset.sources import without_downloads
from bitcycle.sweep.registry import SweepRun
from bitcycle.sweep.status import names_of
from bitcycle.training.display import ProgressBar
from bitcycle.training.environment import set_up_torch
from bitcycle.training.loop import Trainer
from bitcycle.training.plan import Plan, make_plan
from bitcycle.training.run_folder import RunFolder

MOST_STEPS = 50
SECONDS_OF_A_KIND = 3.0
"""Seconds for which each kind of run is timed."""
MOST_MACS = 1e11
"""Multiply-accumulates of a timed step on a CPU, about ten seconds on two cores; larger batches are timed in part."""
FORWARD_SHARE = 1 / 3
"""Share of the forward pass in the time of a training step: it has one of three products."""
MEASURED_EVALUATION = 2.5
"""Longest evaluation in seconds, as estimated, that is measured."""


class RunTime(NamedTuple):
    """Wall-clock seconds of a run's parts."""

    start: float
    """Until the first step: the data are read, the network is built."""
    step: float
    steps: int
    evaluation: float
    evaluations: int
    timed_samples: int
    """Samples of a timed step; `step` is that of a whole batch."""
    memory: int | None
    """Most bytes allocated on an accelerator; None on a CPU."""

    @property
    def total(self) -> float:
        """Seconds of the whole run."""
        return self.start + self.steps * self.step + self.evaluations * self.evaluation


def measure(plan: Plan, budget: float) -> RunTime:
    """Time the first steps of a run for about `budget` seconds, after its data are read and its kernels are compiled, and an
    evaluation if it is short.

    Raises DataError if the data are not on disk, RunError or RuntimeError if the run cannot work here.
    """
    began = time.perf_counter()
    device = set_up_torch(plan.config.training)
    first = plan.preliminary
    small = _affordable(first or plan, device)
    with without_downloads():
        trainer = Trainer(replace(small, folder=RunFolder(small.folder.path, writes=False)), device)
    start = time.perf_counter() - began
    batches = trainer.task.batches(0)

    def step() -> None:
        if trainer.phases.due(trainer.step):
            trainer.begin_phase()
        trainer.train_step(next(batches))

    try:
        seconds = typical_seconds(step, device, budget, most=min(MOST_STEPS, small.schedule.phases[0].end))
        evaluation = _evaluation(trainer, seconds)
    finally:
        trainer.close()
    samples = small.epoch.samples_per_step
    steps = plan.total_steps + (first.total_steps if first else 0)
    every = plan.config.training.evaluation_steps or plan.epoch.steps
    whole_batch = seconds * plan.epoch.samples_per_step / samples
    return RunTime(start, whole_batch, steps, evaluation, -(-steps // every), samples, _peak(device))


def typical_seconds(action: Callable[[], object], device: torch.device, budget: float, most: int) -> float:
    """The median wall-clock time of an action, repeated until the budget of seconds or the number of calls is used up; the first
    calls, which compile kernels and allocate memory, count only if there are no others."""
    found = [timed(action, device, "wall")]
    end = time.perf_counter() + budget - found[0]
    while len(found) < most and time.perf_counter() < end:
        found.append(timed(action, device, "wall"))
    later = sorted(found[min(2, len(found) - 1) :])
    return later[len(later) // 2]


def _affordable(plan: Plan, device: torch.device) -> Plan:
    """The plan, on a CPU with a batch of which a step takes seconds."""
    macs = plan.workload.macs_of_sample / FORWARD_SHARE
    most = max(2, int(MOST_MACS / macs))
    if device.type != "cpu" or plan.batch_size <= most:
        return plan
    options = replace(plan.config.training, batch_size=most)
    found = make_plan(replace(plan.config, training=options))
    return found.preliminary or found


def _evaluation(trainer: Trainer, step: float) -> float:
    """Seconds of an evaluation: at the bits of the step and, if it differs, at q_max."""
    plan = trainer.plan
    schedule = plan.schedule
    once = schedule.fixed and all(bits == schedule.highest(bits) for bits, _ in schedule.run_lengths)
    passes = FORWARD_SHARE * (1 if once else 2)
    batches = 1.0 if plan.epoch.steps == 1 else plan.info.test_samples / plan.epoch.samples_per_step
    estimated = passes * batches * step
    if estimated > MEASURED_EVALUATION:
        return estimated

    def evaluate() -> None:
        trainer.evaluate(ProgressBar(1, 0, enabled=False))

    log = logging.getLogger(Trainer.__module__)
    level = log.level
    log.setLevel(logging.WARNING)  # the accuracy after a few steps is that of no run
    try:
        evaluate()  # imports metrics
        return timed(evaluate, trainer.device, "wall")
    finally:
        log.setLevel(level)


def _peak(device: torch.device) -> int | None:
    if device.type != "cpu":
        with suppress(RuntimeError):  # Metal does not count
            return torch.accelerator.max_memory_allocated()
    return None


def measure_kinds(
    runs: Sequence[SweepRun], budget: float, known: Iterable[SweepRun] = ()
) -> Iterator[tuple[SweepRun, RunTime | Exception]]:
    """Time one run of each kind (network, dataset, quantizer, schedule) until the budget of seconds is used up, one of each
    network and dataset before others of the same; yields the run and its time, or the error that prevents it. Kinds of `known`
    runs are left out."""
    end, kinds = time.perf_counter() + budget, {names_of(run) for run in known}
    for run in one_of_each_kind(runs):
        if names_of(run) in kinds:
            continue
        if time.perf_counter() > end:
            return
        assert run.config is not None, "its configuration is valid"
        try:
            yield run, measure(make_plan(run.config), SECONDS_OF_A_KIND)
        except (OSError, RuntimeError, ValueError, ImportError) as error:  # the first three include our own errors
            yield run, error


def one_of_each_kind(runs: Sequence[SweepRun]) -> list[SweepRun]:
    """The first run of each kind, the first of each network and dataset before the others."""
    kinds: dict[tuple[str, ...], SweepRun] = {}
    for run in runs:
        if run.path is not None:
            kinds.setdefault(names_of(run), run)
    leading = {names[:2]: names for names in reversed(kinds)}
    return sorted(kinds.values(), key=lambda run: leading[names_of(run)[:2]] != names_of(run))
