"""Waiting for the jobs of a sweep in SLURM: an exit code for each, whatever becomes of it; the jobs outlive whoever waits."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bitcycle.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, RunError
from bitcycle.signals import STOP_SIGNALS
from bitcycle.sweep.slurm_queue import HOPELESS, Queue, QueueEntry
from bitcycle.sweep.slurm_record import JobOfArray
from bitcycle.training.run_folder import RunFolder

logger = logging.getLogger(__name__)

LOST_AFTER_SECONDS = 60.0
"""A job that SLURM no longer has may have left an exit code that a network file system does not show yet."""
TELL_SECONDS = 300.0
"""Where the output is no terminal, how many jobs wait and run is said so often at most."""


class Outcome(NamedTuple):
    """How a job ended: the exit code of its run, and what is to be said of it."""

    code: int
    reason: str


class StopWaiting:
    """While active, a signal asks to stop waiting, between two things that have to go together."""

    def __init__(self) -> None:
        self.received = False

    @contextmanager
    def active(self) -> Iterator[StopWaiting]:
        """Catch signals."""
        previous = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = True


class Waiter:
    """Waits for jobs until each has an outcome, or a signal comes.

    Args:
        jobs: by any key.
        read_queue: what SLURM knows; raises RunError where it does not answer, which ends nothing.
        poll_seconds: how often it is asked.
        lost_after: seconds after which a job that SLURM does not have, and that left no exit code, is given up.
        clock, sleep: of the time module.
    """

    def __init__(
        self,
        jobs: Mapping[int, JobOfArray],
        read_queue: Callable[[], Queue],
        poll_seconds: float,
        lost_after: float = LOST_AFTER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.waiting = dict(jobs)
        self.read_queue, self.poll_seconds, self.lost_after = read_queue, poll_seconds, lost_after
        self.clock, self.sleep = clock, sleep
        self.queue: Queue | None = None
        self._missing_since: dict[int, float] = {}
        self._warned: set[int] = set()

    def wait(self, stop: StopWaiting, tell: Callable[[int, Outcome], None], show: Callable[[str], None]) -> None:
        """Return when all have ended or a signal came; `self.waiting` has the rest.

        Args:
            stop: set by a signal.
            tell: called once for each job that ended.
            show: called with the state of the others, in words.
        """
        while self.waiting and not stop.received:
            for number, outcome in self.look().items():
                tell(number, outcome)
            if self.waiting:
                show(describe(self.waiting, self.queue))
                self._rest(stop)

    def _rest(self, stop: StopWaiting) -> None:
        """Until it is time to look again; a thousand jobs are a thousand files on a network file system."""
        until = self.clock() + self.poll_seconds
        while self.clock() < until and not stop.received:
            self.sleep(min(0.5, self.poll_seconds))

    def look(self) -> dict[int, Outcome]:
        """Those that have ended since the last look."""
        self._ask()
        ended: dict[int, Outcome] = {}
        for number, job in self.waiting.items():
            outcome = left_by(job) or self._given_up(number, job)
            if outcome is not None:
                ended[number] = outcome
        for number in ended:
            del self.waiting[number]
        return ended

    def _ask(self) -> None:
        try:
            self.queue = self.read_queue()
        except RunError as error:
            self.queue = None
            logger.warning("%s; asking again in %.0f s", error, self.poll_seconds)

    def _given_up(self, number: int, job: JobOfArray) -> Outcome | None:
        if self.queue is None:
            return None
        entry = job.entry(self.queue)
        if entry is not None and entry.is_active:
            self._missing_since.pop(number, None)
            self._warn(number, entry)
            return None
        since = self._missing_since.setdefault(number, self.clock())
        return outcome_of_lost(job, entry) if self.clock() - since >= self.lost_after else None

    def _warn(self, number: int, entry: QueueEntry) -> None:
        if entry.state != "RUNNING" and number not in self._warned and HOPELESS.search(entry.reason):
            self._warned.add(number)
            logger.warning(
                "job %s will not start by itself (%s): `scontrol release %s`, or `scancel %s`",
                *(entry.job, entry.reason, entry.job, entry.job),
            )


def left_by(job: JobOfArray) -> Outcome | None:
    """The outcome that a job has written."""
    record = job.array.outcome(job.index)
    code = record.get("code")
    return Outcome(code, str(record.get("reason") or "")) if isinstance(code, int) else None


def outcome_of_lost(job: JobOfArray, entry: QueueEntry | None) -> Outcome:
    """What became of a run whose job has ended without a word."""
    if RunFolder(job.run).state() == "done":
        return Outcome(EXIT_DONE, "")
    if entry is None:
        return Outcome(EXIT_FAILED, "the job has left no exit code, and SLURM does not know it any more")
    return Outcome(EXIT_FAILED, f"job {entry.job} ended without an exit code; SLURM calls it {entry.state}")


def describe(jobs: Mapping[int, JobOfArray], queue: Queue | None) -> str:
    """How many jobs are in which state, in words."""
    if queue is None:
        return f"{len(jobs)} unknown"
    states: Counter[str] = Counter()
    for job in jobs.values():
        entry = job.entry(queue)
        if entry is None:
            states["leaving"] += 1
        elif entry.state == "PENDING":
            states[f"pending ({entry.reason})"] += 1
        else:
            states[entry.state.lower()] += 1
    return ", ".join(f"{count} {state}" for state, count in states.most_common())


def wait_for_jobs(waiter: Waiter, stop: StopWaiting, arguments: Sequence[Sequence[str]]) -> list[int]:
    """The exit code of each run, in order; 75 for those that still wait or run in SLURM when a signal came.

    Args:
        waiter: has a job for some of the runs, by number; the others could not be submitted and count as failed.
        stop: set by a signal.
        arguments: of each run.
    """
    codes = [EXIT_INTERRUPTED if number in waiter.waiting else EXIT_FAILED for number in range(len(arguments))]
    jobs = dict(waiter.waiting)

    with _progress(len(jobs)) as (advance, show):

        def tell(number: int, outcome: Outcome) -> None:
            codes[number] = outcome.code
            advance()
            _tell(jobs[number], outcome, " ".join(arguments[number]))

        waiter.wait(stop, tell, show)
    if waiter.waiting:
        _say_goodbye(waiter)
    return codes


def _say_goodbye(waiter: Waiter) -> None:
    arrays = sorted({job.array.name for job in waiter.waiting.values()})
    logger.warning(
        "%d runs stay in SLURM; the same command again waits for them and submits none twice. To end them: scancel --name=%s",
        *(len(waiter.waiting), ",".join(arrays)),
    )


def _tell(job: JobOfArray, outcome: Outcome, settings: str) -> None:
    """Say how a run ended: its result in one line, or why it failed and where it says more."""
    log = job.array.log(job.index)
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    if outcome.code == EXIT_DONE:
        logger.info("done    %s  %s", settings, next((line for line in lines if ": final " in line), ""))
        return
    why = [outcome.reason] if outcome.reason else lines[-3:]
    logger.error(
        "failed  %s (exit code %d)\n        %s", settings, outcome.code, "\n        ".join([*why, f"log: {log}"])
    )


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[], None], Callable[[str], None]]]:
    """(one run has ended, show the state of the others): a bar on a terminal, now and then a line elsewhere."""
    columns = (
        TextColumn("runs"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
    )
    is_terminal = sys.stderr.isatty()
    said, said_at = "", float("-inf")
    with Progress(*columns, transient=True, disable=not is_terminal) as progress:
        task = progress.add_task("runs", total=total, state="")

        def show(state: str) -> None:
            nonlocal said, said_at
            progress.update(task, state=state)
            now = time.monotonic()
            if not is_terminal and state != said and now - said_at >= TELL_SECONDS:
                logger.info("in SLURM: %s", state)
                said, said_at = state, now

        yield lambda: progress.advance(task), show
