"""Runs of a sweep on this machine, several at a time, each in a process of its own."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bitcycle.errors import EXIT_INTERRUPTED

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
STOPPED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
MEMORY_OF_A_RUN = 3 * 2**30
"""Bytes of main memory that a run is expected to need (CIFAR-10 in memory and PyTorch: 1 to 2 GiB)."""


@dataclass
class _Child:
    """A run in progress: its number, its process, its output, and the GPU it was given."""

    number: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    slot: int


def useful_workers(runs_per_gpu: int = 1) -> int:
    """How many runs at once make good use of this machine: a few for each GPU, or one for each core that memory allows."""
    if torch.cuda.is_available():
        return torch.cuda.device_count() * runs_per_gpu
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores, memory // MEMORY_OF_A_RUN))


class LocalPool:
    """Runs commands side by side. A failing one does not stop the others; a signal stops all of them gracefully.

    Args:
        workers: how many at a time.
        gpus: number of GPUs that they share in turn; 0: none.
    """

    def __init__(self, workers: int, gpus: int = 0) -> None:
        self.workers, self.gpus = max(1, workers), gpus
        self.stopped_by: int | None = None

    def run(self, commands: Sequence[Sequence[str]]) -> list[int]:
        """The exit code of each command; 75 for those that a signal kept from running."""
        codes = [EXIT_INTERRUPTED] * len(commands)
        waiting = list(enumerate(commands))[::-1]
        children: list[_Child] = []
        with self._signals(children), _progress(len(commands)) as (progress, task):
            while children or (waiting and self.stopped_by is None):
                while waiting and len(children) < self.workers and self.stopped_by is None:
                    children.append(self._start(*waiting.pop(), children))
                for child in [child for child in children if child.process.poll() is not None]:
                    children.remove(child)
                    codes[child.number] = child.process.returncode
                    _tell(child, commands[child.number])
                    progress.advance(task)
                time.sleep(POLL_SECONDS)
        return codes

    def _start(self, number: int, command: Sequence[str], children: Sequence[_Child]) -> _Child:
        slot = min(set(range(self.workers)) - {child.slot for child in children})
        output = tempfile.TemporaryFile()
        environment = {**os.environ}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(slot % self.gpus)
        elif self.workers > 1:
            cores = len(os.sched_getaffinity(0))
            environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.workers)))
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        return _Child(number, process, output, slot)

    @contextmanager
    def _signals(self, children: list[_Child]) -> Iterator[None]:
        """Pass a signal on to all runs, which save a checkpoint and stop; begin no others."""

        def handle(number: int, frame: FrameType | None) -> None:
            self.stopped_by = number
            logger.warning("%s: stopping %d runs; each saves a checkpoint", signal.Signals(number).name, len(children))
            for child in children:
                child.process.send_signal(signal.SIGTERM)

        previous = {number: signal.signal(number, handle) for number in STOPPED_BY}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _tell(child: _Child, command: Sequence[str]) -> None:
    """Say how a run ended: its last lines where it failed, its result in one line otherwise."""
    child.output.seek(0)
    lines = child.output.read().decode(errors="replace").strip().splitlines()
    child.output.close()
    settings = " ".join(argument for argument in command if "=" in argument)
    if child.process.returncode == 0:
        result = next((line for line in lines if ": final " in line), lines[-1] if lines else "")
        logger.info("done    %s  %s", settings, result)
    elif child.process.returncode == EXIT_INTERRUPTED:
        logger.warning("stopped %s", settings)
    else:
        why = "\n        ".join(lines[-3:]) or f"killed by signal {-child.process.returncode}"
        logger.error("failed  %s (exit code %d)\n        %s", settings, child.process.returncode, why)


@contextmanager
def _progress(total: int) -> Iterator[tuple[Progress, TaskID]]:
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not sys.stderr.isatty()) as progress:
        yield progress, progress.add_task("runs", total=total)


def train_command(root: Path, arguments: Sequence[str]) -> list[str]:
    """One run as a command of its own."""
    return [sys.executable, str(root / "train.py"), *arguments]
