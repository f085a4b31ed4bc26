"""The signals that ask a run to save a checkpoint and stop; the training loop checks between steps whether one has arrived."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from bitcycle.errors import EXIT_INTERRUPTED

# Windows has no SIGUSR1, which is SLURM's warning
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


def stop_at_once() -> None:
    """Make each of these signals end this process with exit code 75, as outside the training loop nothing is lost.

    No exception is raised, since libraries with optional imports, such as PyTorch with NumPy, would catch it during
    import.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    print("interrupted: run the same command again", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_INTERRUPTED)


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Context in which `handler` receives these signals."""
    previous = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def record_signals() -> Iterator[list[int]]:
    """Context that collects these signals in a list instead of stopping the process; the caller must check the list."""
    received: list[int] = []
    with handled_by(lambda number, frame: received.append(number)):
        yield received


class Interrupted(Exception):
    """The run was interrupted and has saved a checkpoint, from which the same command resumes. Exit code 75."""


class StopSignal:
    """While active, SIGTERM, SIGUSR1 (SLURM's warning) and SIGINT stop the loop after a step; a second SIGINT at once."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._is_held = False
        self._handlers = ExitStack()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context in which a signal does not interrupt, for saving a checkpoint."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._handlers.enter_context(handled_by(self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT and not self._is_held:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
