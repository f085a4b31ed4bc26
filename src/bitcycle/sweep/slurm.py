"""Waiting for the jobs of a sweep in SLURM: an exit code for each, whatever becomes of it; the jobs outlive whoever waits."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from bitcycle.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, RunError
from bitcycle.signals import handled_by
from bitcycle.sweep.progress import SweepProgress, tell
from bitcycle.sweep.slurm_queue import HOPELESS, Queue, QueueEntry
from bitcycle.sweep.slurm_record import SubmittedJob
from bitcycle.training.run_folder import RunFolder

logger = logging.getLogger(__name__)

LOST_AFTER_SECONDS = 60.0
"""A job that SLURM no longer has may have left an exit code that a network file system does not show yet."""


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
        with handled_by(self._handle):
            yield self

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
        jobs: Mapping[int, SubmittedJob],
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

    def _given_up(self, number: int, job: SubmittedJob) -> Outcome | None:
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


def left_by(job: SubmittedJob) -> Outcome | None:
    """The outcome that a job has written."""
    record = job.outcome()
    code = record.get("code")
    return Outcome(code, str(record.get("reason") or "")) if isinstance(code, int) else None


def outcome_of_lost(job: SubmittedJob, entry: QueueEntry | None) -> Outcome:
    """What became of a run whose job has ended without a word."""
    if RunFolder(job.run).state() == "done":
        return Outcome(EXIT_DONE, "")
    if entry is None:
        return Outcome(EXIT_FAILED, "the job has left no exit code, and SLURM does not know it any more")
    return Outcome(EXIT_FAILED, f"job {entry.job} ended without an exit code; SLURM calls it {entry.state}")


def describe(jobs: Mapping[int, SubmittedJob], queue: Queue | None) -> str:
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

    with SweepProgress(len(jobs)) as progress:

        def ended(number: int, outcome: Outcome) -> None:
            codes[number] = outcome.code
            progress.advance(outcome.code)
            log = jobs[number].log
            lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
            why = [*([outcome.reason] if outcome.reason else lines[-3:]), f"log: {log}"] if outcome.code else []
            tell(" ".join(arguments[number]), outcome.code, lines, why)

        waiter.wait(stop, ended, lambda state: progress.show(f"in SLURM: {state}"))
    if waiter.waiting:
        _say_goodbye(waiter)
    return codes


def _say_goodbye(waiter: Waiter) -> None:
    arrays = sorted({job.array.name for job in waiter.waiting.values()})
    logger.warning(
        "%d runs stay in SLURM; the same command again waits for them and submits none twice. To end them: scancel --name=%s",
        *(len(waiter.waiting), ",".join(arrays)),
    )
