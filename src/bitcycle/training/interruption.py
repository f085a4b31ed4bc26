"""Interruptions: a signal sets a flag, which the training loop checks between steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from bitcycle.signals import STOP_SIGNALS


class Interrupted(Exception):
    """The run was interrupted and has saved a checkpoint, from which the same command resumes. Exit code 75."""


class StopSignal:
    """While active, SIGTERM, SIGUSR1 (SLURM's warning) and SIGINT stop the loop after a step; a second SIGINT at once."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._is_held = False
        self._previous: dict[signal.Signals, Any] = {}

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
            self._previous = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT and not self._is_held:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
