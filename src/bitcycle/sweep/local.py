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
from pathlib import Path
from typing import TypeVar

import torch

from bitcycle.errors import EXIT_INTERRUPTED
from bitcycle.signals import noted
from bitcycle.sweep.forkserver import Forked, restore
from bitcycle.sweep.progress import SweepProgress, tell

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
MEMORY_OF_A_RUN = 3 * 2**30
"""Bytes of main memory that a run is expected to need (CIFAR-10 in memory and PyTorch: 1 to 2 GiB)."""

Process = subprocess.Popen[bytes] | Forked
Start = Callable[[Sequence[str], Path, Mapping[str, str]], Process]
"""Starts a script with its arguments, all it prints going to a file, with some variables of the environment changed."""
K = TypeVar("K")


def useful_workers(runs_per_gpu: int = 1) -> int:
    """How many runs at once make good use of this machine: a few for each GPU, or one for each core that memory allows."""
    if torch.cuda.is_available():
        return torch.cuda.device_count() * runs_per_gpu
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # the system does not say
        memory = 4 * MEMORY_OF_A_RUN
    return max(1, min(useful_cores(), memory // MEMORY_OF_A_RUN))


def useful_cores() -> int:
    """Cores that this process may use; on macOS and Windows all that there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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

    def run(self, commands: Sequence[Sequence[str]]) -> list[int]:
        """The exit code of each script with its arguments; 75 for those that a signal kept from running."""
        codes = [EXIT_INTERRUPTED] * len(commands)
        waiting = iter(enumerate(commands))

        def ended(number: int, code: int) -> None:
            codes[number] = code
            progress.show(1)

        with SweepProgress(len(commands)) as progress:
            self.serve(lambda: next(waiting, None), ended)
        return codes

    def serve(self, take: Callable[[], tuple[K, Sequence[str]] | None], ended: Callable[[K, int], None]) -> None:
        """Run what is given until nothing is left or a signal comes.

        Args:
            take: the next run as (key, script with arguments); None if there is none until another one ends.
            ended: called with key and exit code of each run that has ended.
        """
        running: dict[int, tuple[K, Sequence[str], Process]] = {}  # by slot, which stands for a GPU and a file
        is_empty, passed_on = False, 0
        with tempfile.TemporaryDirectory() as scratch, noted() as signals:
            while running or not is_empty:
                for number in signals[passed_on:]:
                    self.stopped_by, passed_on = number, passed_on + 1
                    _stop([process for _, _, process in running.values()], number)
                while not is_empty and len(running) < self.workers:
                    taken = None if signals else take()
                    is_empty = taken is None
                    if taken is not None:
                        slot = min(set(range(self.workers)) - running.keys())
                        running[slot] = *taken, self.start(taken[1], Path(scratch, str(slot)), self._environment(slot))
                for slot, (key, command, process) in list(running.items()):
                    code, output = process.poll(), Path(scratch, str(slot))
                    if code is not None:
                        del running[slot]
                        is_empty = False
                        if signals and code == -signal.SIGTERM:  # before the run could heed it
                            code = EXIT_INTERRUPTED
                        settings = " ".join(argument for argument in command if "=" in argument)
                        tell(settings, code, output.read_text(errors="replace").strip().splitlines())
                        output.unlink()
                        ended(key, code)
                time.sleep(POLL_SECONDS)

    def _environment(self, slot: int) -> dict[str, str]:
        """What a run is told of its share of the machine."""
        if self.gpus:
            return {"CUDA_VISIBLE_DEVICES": str(slot % self.gpus)}
        if self.workers > 1 and "OMP_NUM_THREADS" not in os.environ:
            return {"OMP_NUM_THREADS": str(max(1, useful_cores() // self.workers))}
        return {}


def _stop(processes: Sequence[Process], number: int) -> None:
    """Have runs save a checkpoint and stop."""
    logger.warning("%s: stopping %d runs; each saves a checkpoint", signal.Signals(number).name, len(processes))
    for process in processes:
        restore(process.pid)  # a checkpoint is soon written, by a process that gets its turn
        process.send_signal(signal.SIGTERM)


def train_command(root: Path, arguments: Sequence[str]) -> list[str]:
    """One run as arguments of the interpreter: train.py of a checkout, or the module of an installed package."""
    script = root / "train.py"
    return [*([str(script)] if script.is_file() else ["-m", "bitcycle"]), *arguments]
