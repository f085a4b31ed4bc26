"""Runs of a sweep on this machine, several at a time, each in a process of its own.

Without a GPU they are forked from a process that has imported what they need (`forkserver.py`).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

import torch

from bitcycle.errors import EXIT_INTERRUPTED
from bitcycle.signals import handled_by
from bitcycle.sweep.forkserver import Forked
from bitcycle.sweep.priority import restore
from bitcycle.sweep.progress import SweepProgress, tell

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
MEMORY_OF_A_RUN = 3 * 2**30
"""Bytes of main memory that a run is expected to need (CIFAR-10 in memory and PyTorch: 1 to 2 GiB)."""


class Process(Protocol):
    """A run in progress, as subprocess.Popen has it."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it goes on."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal, unless it has ended."""


class Start(Protocol):
    """Something that starts runs."""

    def __call__(self, command: Sequence[str], output: Path, environment: Mapping[str, str]) -> Process:
        """Start a script with its arguments, all it prints going to a file, with some variables of the environment changed."""


K = TypeVar("K")


@dataclass
class _Child(Generic[K]):
    """A run in progress: its key and command, its process, the file with its output, and the GPU it was given."""

    key: K
    command: Sequence[str]
    process: Process
    output: Path
    slot: int


def useful_workers(runs_per_gpu: int = 1) -> int:
    """How many runs at once make good use of this machine: a few for each GPU, or one for each core that memory allows."""
    if torch.cuda.is_available():
        return torch.cuda.device_count() * runs_per_gpu
    return max(1, min(useful_cores(), main_memory() // MEMORY_OF_A_RUN))


def useful_cores() -> int:
    """Cores that this process may use; on macOS and Windows all that there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main_memory() -> int:
    """Bytes of main memory; where the system does not say, enough for four runs."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 4 * MEMORY_OF_A_RUN


def start_interpreter(command: Sequence[str], output: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a run as a new interpreter."""
    with open(output, "wb") as stream:
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def starter(gpus: int = 0) -> Start:
    """What starts runs here: a fork server on Linux without GPU, as CUDA does not survive a fork; else new interpreters."""
    return start_interpreter if gpus or sys.platform != "linux" else Forked


class LocalPool:
    """Runs scripts side by side. A failing one does not stop the others; a signal stops all of them gracefully.

    Args:
        workers: how many at a time.
        gpus: number of GPUs that they share in turn; 0: none.
        start: what starts a run.
    """

    def __init__(self, workers: int, gpus: int = 0, start: Start = start_interpreter) -> None:
        self.workers, self.gpus, self.start = max(1, workers), gpus, start
        self.stopped_by: int | None = None
        self._is_passed_on = False

    def run(self, commands: Sequence[Sequence[str]]) -> list[int]:
        """The exit code of each script with its arguments; 75 for those that a signal kept from running."""
        codes = [EXIT_INTERRUPTED] * len(commands)
        waiting = iter(enumerate(commands))

        def ended(number: int, code: int) -> None:
            codes[number] = code
            progress.advance(code)

        with SweepProgress(len(commands)) as progress:
            self.serve(lambda: next(waiting, None), ended)
        return codes

    def serve(self, take: Callable[[], tuple[K, Sequence[str]] | None], ended: Callable[[K, int], None]) -> None:
        """Run what is given until nothing is left or a signal comes.

        Args:
            take: the next run as (key, script with arguments); None if there is none until another one ends.
            ended: called with key and exit code of each run that has ended.
        """
        children: list[_Child[K]] = []
        is_empty = False
        with tempfile.TemporaryDirectory() as scratch, handled_by(self._note):
            while children or not is_empty:
                self._pass_on_signal(children)
                while not is_empty and len(children) < self.workers:
                    taken = take() if self.stopped_by is None else None
                    is_empty = taken is None
                    if taken is not None:
                        children.append(self._start(*taken, Path(scratch), children))
                for child, code in [(child, child.process.poll()) for child in children]:
                    if code is not None:
                        children.remove(child)
                        is_empty = False
                        code = self._meant(code)
                        settings = " ".join(argument for argument in child.command if "=" in argument)
                        tell(settings, code, child.output.read_text(errors="replace").strip().splitlines())
                        child.output.unlink()
                        ended(child.key, code)
                time.sleep(POLL_SECONDS)

    def _meant(self, code: int) -> int:
        """A run that the signal to stop has reached before it could heed it was interrupted, too."""
        return EXIT_INTERRUPTED if self.stopped_by is not None and code == -signal.SIGTERM else code

    def _start(self, key: K, command: Sequence[str], scratch: Path, children: Sequence[_Child[K]]) -> _Child[K]:
        slot = min(set(range(self.workers)) - {child.slot for child in children})
        output = scratch / str(slot)
        environment = {}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(slot % self.gpus)
        elif self.workers > 1 and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, useful_cores() // self.workers))
        process = self.start(command, output, environment)
        return _Child(key, command, process, output, slot)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Note a signal; the loop passes it on, as a run that starts right now is to get it too."""
        self.stopped_by, self._is_passed_on = number, False

    def _pass_on_signal(self, children: Sequence[_Child[Any]]) -> None:
        """Have all runs save a checkpoint and stop, once for each signal."""
        if self.stopped_by is None or self._is_passed_on:
            return
        self._is_passed_on = True
        logger.warning(
            "%s: stopping %d runs; each saves a checkpoint", signal.Signals(self.stopped_by).name, len(children)
        )
        for child in children:
            restore(child.process.pid)  # a checkpoint is soon written, by a process that gets its turn
            child.process.send_signal(signal.SIGTERM)


def train_command(root: Path, arguments: Sequence[str]) -> list[str]:
    """One run as arguments of the interpreter: train.py of a checkout, or the module of an installed package."""
    script = root / "train.py"
    return [*([str(script)] if script.is_file() else ["-m", "bitcycle"]), *arguments]
