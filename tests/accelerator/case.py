"""One run on the pretended accelerator, in a process of its own: trained, evaluated, interrupted, resumed; what it waited for."""

from __future__ import annotations

import collections
import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from bitcycle.doctor.numerics import numerics_findings
from bitcycle.reproduction.gpu_day import GOLDEN, GOLDEN_DEVICE
from bitcycle.training.loop import Trainer
from bitcycle.training.run import execute
from tests.accelerator.pretended import DEVICE, start
from tests.conftest import ROOT, digits_plan
from tests.made_data import with_made_data

Watch = Callable[[], AbstractContextManager["collections.Counter[str]"]]
"""Counts waits and blocking copies by where they come from."""


class Crash(BaseException):
    """Ends a run as a kill does."""


class Watched:
    """Waits and blocking copies of the steady steps of a run: those directly after a step of the same process at the same bits,
    in the same phase and epoch, without an evaluation or averaging between them, that no schedule observes. `watch` is a context
    that counts them."""

    def __init__(self, patch: pytest.MonkeyPatch, watch: Watch = DEVICE.watch) -> None:
        self.watch = watch
        self.found: collections.Counter[str] = collections.Counter()
        self.steady = self.observed = 0
        self.before: Any = None
        self.crash_after: int | None = None
        self.drawn: collections.Counter[str] = collections.Counter()
        train_step, init = Trainer.train_step, Trainer.__init__

        def step(trainer: Trainer, batch: Any) -> None:
            if trainer.step == self.crash_after:
                raise Crash
            interval = getattr(trainer.schedule, "observation_steps", None)
            with watch() as seen:
                train_step(trainer, batch)
            trainer.options.checkpoint_seconds = 0 if trainer.step + 1 == self.crash_after else 1e9
            now = (id(trainer), trainer.phases.index, trainer.controller.precision, trainer.step // trainer.epoch.steps)
            if interval and trainer.step % interval == 0:
                self.observed += 1
            elif now == self.before:
                self.steady += 1
                self.found += seen
                self.found += self.drawn
            self.before = now

        def made(trainer: Trainer, *arguments: Any) -> None:
            init(trainer, *arguments)
            batches = trainer.task.batches
            trainer.task.batches = lambda step: self._drawn(batches(step))  # type: ignore[method-assign]

        evaluate_at, average_weights = Trainer.evaluate_at, Trainer.average_weights

        def evaluated(trainer: Trainer, *arguments: Any, **options: Any) -> dict[str, float]:
            self.before = None  # the next step adapts to other bits again
            return evaluate_at(trainer, *arguments, **options)

        def averaged(trainer: Trainer) -> None:
            self.before = None  # as after an evaluation
            average_weights(trainer)

        patch.setattr(Trainer, "evaluate_at", evaluated)
        patch.setattr(Trainer, "average_weights", averaged)
        patch.setattr(Trainer, "train_step", step)
        patch.setattr(Trainer, "__init__", made)

    def _drawn(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self.watch() as self.drawn:
                batch = next(batches)
            yield batch


def outcome(overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """What a run with these settings did on the pretended accelerator, as `trained_twice`."""
    start()
    return trained_twice(overrides, folder)


def trained_twice(
    overrides: Sequence[str], folder: Path, watch: Watch = DEVICE.watch, compile: bool = False
) -> dict[str, Any]:
    """What a run with these settings did, whole and killed: `error` (None: none), whether it is the `same` after a resume,
    `steady` steps, `found` in them; both runs stay in the folder, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)  # data and weights are written there before the first run
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch, watch)
        try:
            settings = with_made_data(list(overrides), folder, patch)
            settings.append(f"training.compile={str(compile).lower()}")
            plans = [digits_plan(folder / name, *settings) for name in ("whole", "parts")]
            execute(plans[0])
            watched.crash_after = plans[0].total_steps * 2 // 3
            try:
                execute(plans[1])
            except Crash:
                watched.crash_after = None
                execute(plans[1])
            states = [plan.folder.checkpoint.load() for plan in plans]
            same = plans[0].folder.metrics.read_bytes() == plans[1].folder.metrics.read_bytes()
            torch.testing.assert_close(states[0]["model"], states[1]["model"], rtol=0, atol=0)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {str(error)[:600]}\n{traceback.format_exc()[-1500:]}"}
        found = dict(watched.found)
        return {"error": None, "same": same, "steady": watched.steady, "observed": watched.observed, "found": found}


def record(target: Path, function: Callable[..., Any], *arguments: Any) -> None:
    """Write what a function finds to a file; for a process of its own, as the device stays in it."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.fsync = lambda descriptor: None  # as in the other tests
    target.write_text(json.dumps(function(*arguments)))


def noticed() -> dict[str, Any]:
    """What the device notes of a few actions, and the errors of those that it refuses."""
    device = start()
    x, host = torch.ones(3, device=device), torch.ones(3)
    noted: dict[str, Callable[[], Any]] = {
        "blocking": lambda: host.to(device),
        "not pinned": lambda: host.to(device, non_blocking=True),
        "pinned": lambda: host.pin_memory().to(device, non_blocking=True),
        "value": lambda: float(x.sum()),
        "size": lambda: x.nonzero(),
        "sum": lambda: x + x,
        "two devices": lambda: x + host,
        "float64": lambda: torch.ones(3, dtype=torch.float64, device=device),
    }
    found: dict[str, Any] = {}
    for name, action in noted.items():
        with DEVICE.watch() as seen:
            try:
                action()
                found[name] = [what.partition(" at ")[0] for what in seen]
            except (RuntimeError, TypeError) as error:
                found[name] = str(error)
    return found


def golden_tests() -> int:
    """The exit code of the golden tests on the device, as `bitcycle gpu-day` runs them there, with float64."""
    DEVICE.refuse_float64 = False
    torch.__future__.set_swap_module_params_on_conversion(True)  # `data = ` would keep values of another type
    os.environ[GOLDEN_DEVICE] = str(start())
    return pytest.main(["-q", "-m", "golden", "-p", "no:cacheprovider", "-o", "addopts=", str(ROOT / GOLDEN)])


def self_check() -> list[dict[str, Any]]:
    """The doctor's findings on the numbers of this device."""
    return [asdict(finding) for finding in numerics_findings(start())]
