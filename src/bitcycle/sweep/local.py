"""Parallel runs on this machine, each in a separate process (`forkserver.py`)."""

import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

import torch

from bitcycle.errors import EXIT_FAILED, EXIT_INTERRUPTED
from bitcycle.signals import STOP_SIGNALS, record_signals
from bitcycle.sweep.forkserver import restore, start
from bitcycle.sweep.progress import SweepProgress, tell
from bitcycle.threads import allowed_cores, memory_limit, share_of

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
MEMORY_OF_A_RUN = 3 * 2**30
"""Bytes of main memory reserved for a run (CIFAR-10 in memory and PyTorch: 1 to 2 GiB)."""

K = TypeVar("K")


def useful_workers(runs_per_gpu: int = 1, gpus: int | None = None) -> int:
    """Default number of parallel runs: `runs_per_gpu` per GPU (None: all), or one per CPU core, limited by main memory, that of
    the container if this has a limit."""
    if gpus := torch.accelerator.device_count() if gpus is None else gpus:
        return gpus * runs_per_gpu
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not available on this system
        memory = 4 * MEMORY_OF_A_RUN
    memory = min(memory, memory_limit() or memory)
    return max(1, min(allowed_cores(), memory // MEMORY_OF_A_RUN))


class LocalPool:
    """Runs scripts in parallel, on a number of GPUs (None: all) in turn. The failure of a run does not stop the others; a signal
    stops all of them gracefully. Runs are started by `forkserver.start`, forked if possible; CUDA does not survive a fork."""

    def __init__(self, workers: int, gpus: int | None = None, method: str | None = None) -> None:
        self.workers, self.gpus = max(1, workers), torch.accelerator.device_count() if gpus is None else gpus
        self.method = method or ("spawn" if self.gpus or sys.platform != "linux" else "forkserver")
        self.stopped_by: int | None = None
        self.until = math.inf
        """Time (`time.monotonic`) from which runs in progress are stopped as by a signal, and none begins."""

    @classmethod
    def on(cls, devices: Collection[str], most: int, workers: int | None = None, runs_per_gpu: int = 1) -> "LocalPool":
        """A pool for at most that many runs with these values of `training.device`. GPUs are not dealt out to runs on the CPU,
        nor to runs that name theirs, such as cuda:1, which would not be there among the one GPU that each run sees."""
        if set(devices) == {"cpu"}:
            return cls(min(workers or useful_workers(gpus=0), most), gpus=0)
        if any(":" in device for device in devices):
            return cls(min(workers or len(set(devices)) * runs_per_gpu, most), gpus=0, method="spawn")
        return cls(min(workers or useful_workers(runs_per_gpu), most))

    def run(
        self,
        commands: Sequence[Sequence[str]],
        is_taken: Callable[[int], bool] = lambda number: False,
        is_done: Callable[[int], bool] = lambda number: False,
    ) -> list[int]:
        """Run scripts with their arguments; returns their exit codes, 75 for scripts not run because of a signal.

        Those whose run another process is training, as `is_taken` says of their number, come last and wait until it has ended;
        they then find the run finished, or go on with it. One that fails although its run `is_done` is tried once more,
        as another process may have begun the run at the same moment and finished it meanwhile.
        """
        codes, left = [EXIT_INTERRUPTED] * len(commands), list(range(len(commands)))
        tried_again: set[int] = set()

        def take() -> tuple[int, Sequence[str]] | None:
            number = next((number for number in left if not is_taken(number)), None)
            if number is None:
                return None
            left.remove(number)
            return number, commands[number]

        def put_back(number: int) -> bool:
            if not is_taken(number):  # in this order, as the other process may end in between
                if not is_done(number) or number in tried_again:
                    return False
                tried_again.add(number)
            left.append(number)
            return True

        def ended(number: int, code: int) -> None:
            codes[number] = code
            progress.show(1)

        with SweepProgress(len(commands)) as progress:
            while left and self.stopped_by is None:
                self.serve(take, ended, put_back)
                if left and self.stopped_by is None:
                    logger.info("waiting for another process, which is training the rest: %d", len(left))
                    while all(map(is_taken, left)):
                        time.sleep(POLL_SECONDS)
        return codes

    def serve(
        self,
        take: Callable[[], tuple[K, Sequence[str]] | None],
        ended: Callable[[K, int], None],
        put_back: Callable[[K], bool] = lambda key: False,
    ) -> None:
        """Run scripts until none are left or a signal arrives: `take` returns the next one as (key, script with arguments), or
        None if there is none until another run ends; `ended` is called with key and exit code of each run that has ended, except
        a failed one that `put_back` keeps for later, as another process had begun its run at the same moment."""
        running: dict[int, tuple[K, Sequence[str], BaseProcess]] = {}  # by slot; each slot has a GPU and an output file
        is_empty, passed_on = False, 0
        with tempfile.TemporaryDirectory() as scratch, record_signals() as signals:
            while running or not is_empty:
                if time.monotonic() >= self.until and not signals:
                    signals.append(signal.SIGTERM)
                for number in signals[passed_on:]:
                    self.stopped_by, passed_on = number, passed_on + 1
                    _stop([process for _, _, process in running.values()], number)
                while not is_empty and len(running) < self.workers:
                    taken = None if signals else take()
                    is_empty = taken is None
                    if taken is not None:
                        slot = min(set(range(self.workers)) - running.keys())
                        output = Path(scratch, str(slot))
                        output.touch()  # as a run may end before it opens the file
                        running[slot] = *taken, start(taken[1], output, self._environment(slot), self.method)
                for slot, (key, command, process) in list(running.items()):
                    code, output = process.exitcode, Path(scratch, str(slot))
                    if code is not None:
                        del running[slot]
                        is_empty = False
                        lines = output.read_text(errors="replace").strip().splitlines()
                        output.unlink()
                        if code == EXIT_FAILED and put_back(key):
                            continue
                        if signals and -code in STOP_SIGNALS:  # killed before it had installed its signal handler
                            code = EXIT_INTERRUPTED
                        settings = " ".join(argument for argument in command if "=" in argument)
                        tell(settings, code, lines)
                        ended(key, code)
                time.sleep(POLL_SECONDS)

    def _environment(self, slot: int) -> dict[str, str]:
        """Environment variables that assign a GPU or CPU threads to a run."""
        if self.gpus:
            number = slot % self.gpus
            return {name: _nth_visible(name, number) for name in ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")}
        return share_of(self.workers)


def _nth_visible(variable: str, number: int) -> str:
    """The GPU `number`, counted among those that an environment variable leaves visible, as this variable names it.

    >>> _nth_visible("UNSET", 1)
    '1'
    """
    listed = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
    return listed[number] if number < len(listed) else str(number)


def _stop(processes: Sequence[BaseProcess], number: int) -> None:
    """Make runs save a checkpoint and stop."""
    message = "%s: stopping %d runs; each saves a checkpoint, from which the same command resumes"
    logger.warning(message, signal.Signals(number).name, len(processes))
    for process in processes:
        assert process.pid is not None
        restore(process.pid)  # at idle priority, writing the checkpoint could take long
        process.terminate()


def train_command(root: Path, arguments: Sequence[str]) -> list[str]:
    """Interpreter arguments of a run: train.py of a checkout, or the module of an installed package."""
    script = root / "train.py"
    return [*([str(script)] if script.is_file() else ["-m", "bitcycle"]), *arguments]
