"""The signals that ask a run to save a checkpoint and stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
)  # Windows has no SIGUSR1, which is SLURM's warning


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Context in which `handler` receives these signals."""
    previous = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
