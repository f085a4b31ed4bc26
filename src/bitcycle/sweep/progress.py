"""How far the runs of a sweep are, and how each ended."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bitcycle.errors import EXIT_DONE, EXIT_INTERRUPTED

logger = logging.getLogger(__name__)

TELL_SECONDS = 60.0
"""Where the output is no terminal, how far the sweep is is said so often at most."""


class SweepProgress:
    """A bar on a terminal, now and then a line elsewhere; the time left is that at the speed so far.

    Args:
        total: number of runs.
    """

    def __init__(self, total: int) -> None:
        columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        state = TextColumn("{task.fields[state]}")
        self.bar = Progress(*columns, state, transient=True, disable=not sys.stderr.isatty(), speed_estimate_period=600)
        self.task = self.bar.add_task("runs", total=total, state="")
        self.total, self.ended, self.failed = total, 0, 0
        self.began = self.told = time.monotonic()

    def __enter__(self) -> SweepProgress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def advance(self, code: int) -> None:
        """One run has ended."""
        self.bar.advance(self.task)
        self.ended += 1
        self.failed += code not in (EXIT_DONE, EXIT_INTERRUPTED)
        left = (time.monotonic() - self.began) / self.ended * (self.total - self.ended)
        failed = f", {self.failed} failed" if self.failed else ""
        self._say(f"{self.ended} of {self.total} runs ended{failed}; about {left / 60:.0f} min left")

    def show(self, state: str) -> None:
        """What is known of the runs that have not ended."""
        self.bar.update(self.task, state=state)
        self._say(state)

    def _say(self, words: str) -> None:
        now = time.monotonic()
        if self.bar.disable and now - self.told >= TELL_SECONDS:
            self.told = now
            logger.info(words)


def tell(settings: str, code: int, lines: Sequence[str], why: Sequence[str] = ()) -> None:
    """Say how a run ended: its result in one line, or why it failed.

    Args:
        settings: of the run.
        code: its exit code; negative for the signal that killed it.
        lines: what it printed.
        why: it failed, in lines, where others than its last ones say so.
    """
    if code == EXIT_DONE:
        logger.info(
            "done    %s  %s", settings, next((line for line in lines if ": final " in line), "".join(lines[-1:]))
        )
    elif code == EXIT_INTERRUPTED and not why:
        logger.warning("stopped %s", settings)
    else:
        why = why or lines[-3:] or [f"killed by signal {-code}"]
        logger.error("failed  %s (exit code %d)\n        %s", settings, code, "\n        ".join(why))
