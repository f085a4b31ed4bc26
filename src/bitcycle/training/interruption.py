"""Interruptions: a signal sets a flag, which the training loop checks between steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from bitcycle.signals import handled_by


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

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._handlers.enter_context(handled_by(self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT and not self._is_held:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
