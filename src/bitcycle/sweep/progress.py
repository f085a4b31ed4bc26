"""Progress of a sweep and the outcome of each run, on the console."""

import logging
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bitcycle.errors import EXIT_DONE, EXIT_INTERRUPTED

logger = logging.getLogger(__name__)

TELL_SECONDS = 60.0
"""Minimum interval between progress lines if the output is not a terminal."""


class SweepProgress(Progress):
    """A progress bar on a terminal, else occasional log lines; the time left is extrapolated from the speed so far."""

    def __init__(self, total: int) -> None:
        columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        state, silent = TextColumn("{task.fields[state]}"), not sys.stderr.isatty()
        super().__init__(*columns, state, transient=True, disable=silent, speed_estimate_period=600)
        self.add_task("runs", total=total, state="")
        self.last_written = time.monotonic()

    def show(self, ended: int, state: str = "") -> None:
        """Add `ended` finished runs; `state` describes the others."""
        [task] = self.tasks
        self.update(task.id, advance=ended, state=state)
        if self.disable and time.monotonic() - self.last_written >= TELL_SECONDS:
            self.last_written = time.monotonic()
            left = f"; about {timedelta(seconds=round(task.time_remaining))} left" if task.time_remaining else ""
            logger.info("%d of %d runs ended%s%s", task.completed, task.total, left, f"; {state}" if state else "")


def tell(settings: str, code: int, lines: Sequence[str], why: Sequence[str] = ()) -> None:
    """Log how a run ended (code: negative if a signal killed it): the result among the lines of its output, or of a failure
    `why`, else the last lines."""
    if code == EXIT_DONE:
        result = next((line for line in lines if ": final " in line), "".join(lines[-1:]))
        logger.info("done    %s  %s", settings, result)
    elif code == EXIT_INTERRUPTED and not why:
        logger.warning("stopped %s", settings)
    else:
        why = why or lines[-3:] or [f"killed by signal {-code}"]
        logger.error("failed  %s (exit code %d)\n        %s", settings, code, "\n        ".join(why))
