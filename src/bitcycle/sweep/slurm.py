"""The jobs of a sweep in SLURM: what is kept of them, what SLURM says of them, and waiting; they outlive whoever waits.

An array of jobs is a folder below results_root/.slurm, whose name is the name of the jobs in SLURM, with `array.json`, the
outcome of each job, the logs, and submitit's files: another process, days later, finds there which run is where. SLURM is asked
by squeue and scontrol; it need not keep accounts (sacct).
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from bitcycle.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, RunError
from bitcycle.sweep.progress import SweepProgress, tell
from bitcycle.training.run_folder import RunFolder, read_object, write_json

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 60.0
LOST_AFTER_SECONDS = 60.0
"""A job that SLURM no longer has may have left an exit code that a network file system does not show yet."""

ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"),
    *("BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED"),
)
"""States that a job does not leave by itself; all others, also ones that are unknown here, are waited for."""


class QueueEntry(NamedTuple):
    """A job in SLURM's queue: its id, as scontrol and scancel want it, one of SLURM's states, and why it waits."""

    job: str
    state: str
    reason: str

    @property
    def is_active(self) -> bool:
        """Whether it runs or will run."""
        return self.state not in ENDED


Queue = dict[tuple[str, int], QueueEntry]
"""(name of the job, index in its array) -> what is known of it. Names are unique, numbers not: there may be two clusters."""


def read_queue() -> Queue:
    """All jobs of this user that SLURM remembers.

    Raises:
        RunError: if it does not answer.
    """
    return parse_queue(
        ask("squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%j|%T|%r")
    )


def parse_queue(text: str) -> Queue:
    """The lines of squeue. A job is known by name and index; one that is no array has index 0.

    >>> parse_queue("17_3|bitcycle-0af1|PENDING|Resources\\n18_[2-9]|bitcycle-77e0|PENDING|None\\n")
    {('bitcycle-0af1', 3): QueueEntry(job='17_3', state='PENDING', reason='Resources')}
    """
    found = re.finditer(r"^\s*(\d+(?:_(\d+))?)\|([^|\n]*)\|(\w+)\|(.*)$", text, re.MULTILINE)
    return {(line[3], int(line[2] or 0)): QueueEntry(line[1], line[4], line[5]) for line in found}


def largest_array(configuration: str) -> int:
    """How many jobs an array may have, by what `scontrol show config` says; 1 where arrays are switched off.

    >>> largest_array("MaxArraySize            = 1001"), largest_array("MaxArraySize = 0")
    (1001, 1)
    >>> largest_array("MaxArraySize = 1001\\nSchedulerParameters = bf_continue,max_array_tasks=100")
    100
    """
    limits = re.findall(r"\b(?:MaxArraySize\s*=\s*|max_array_tasks=)(\d+)", configuration)
    return max(1, min(map(int, limits), default=1))


def ask(*command: str) -> str:
    """The answer of one of SLURM's commands.

    Raises:
        RunError: if it is not installed, fails, or takes too long.
    """
    if shutil.which(command[0]) is None:
        remedy = "use hydra/launcher=slurm where jobs are submitted, or hydra/launcher=local"
        raise RunError(f"no {command[0]} on this machine: {remedy}")
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=True, timeout=TIMEOUT_SECONDS)
    try:  # in a session of its own, as Ctrl-C is for the sweep, not for this question
        return run(command, start_new_session=True).stdout
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{command[0]} has not answered for {TIMEOUT_SECONDS:.0f} s") from error
    except subprocess.CalledProcessError as error:
        raise RunError(f"{command[0]} failed: {error.stderr.strip()}") from error


class Outcome(NamedTuple):
    """How a job ended: the exit code of its run, and what is to be said of it."""

    code: int
    reason: str = ""


class SubmittedJob(NamedTuple):
    """A run in SLURM: the folder of its array, its number in it, and its run folder, absolute."""

    array: Path
    number: int
    run: Path

    @property
    def outcome_file(self) -> Path:
        """Where the job leaves its outcome, see `SlurmJob`."""
        return self.array / f"{self.number}.json"

    @property
    def outcome(self) -> Outcome | None:
        """What the job has left; None while it goes on, is to go on, or if it was lost."""
        record = read_object(self.outcome_file)
        code = record.get("code")
        return Outcome(code, str(record.get("reason") or "")) if isinstance(code, int) else None

    @property
    def log(self) -> Path:
        """What the job printed: NUMBER_INDEX_0_log.out, without index of a single job; else the array's folder."""
        name = re.compile(rf"\d+(_{self.number})?_0_log\.out")
        return next((path for path in sorted(self.array.glob("*.out")) if name.fullmatch(path.name)), self.array)

    def entry(self, queue: Queue) -> QueueEntry | None:
        """What SLURM knows of it."""
        return queue.get((self.array.name, self.number))


@contextmanager
def new_array(root: Path, runs: Sequence[Path], prefix: str) -> Iterator[list[SubmittedJob]]:
    """Write down an array, by the run folders of its jobs and the beginning of their name, that is submitted inside.

    It is known from then on, whatever happens to this process; after an error it is forgotten.
    """
    folder = root.absolute() / ".slurm" / f"{prefix}-{uuid.uuid4().hex[:8]}"
    jobs = [SubmittedJob(folder, index, run.absolute()) for index, run in enumerate(runs)]
    folder.mkdir(parents=True)
    record = {"submitted": datetime.now(UTC).isoformat(), "runs": [os.fspath(job.run) for job in jobs]}
    write_json(folder / "array.json", record)
    try:
        yield jobs
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def jobs_in_queue(root: Path, runs: Sequence[Path], ask: Callable[[], Queue] = read_queue) -> dict[Path, SubmittedJob]:
    """Those of some runs that have left no exit code, and that SLURM runs or will run, each with its newest job.

    Raises:
        RunError: if some were submitted, and SLURM does not say what became of them.
    """
    wanted = {run.absolute() for run in runs}
    records = [(path.parent, read_object(path)) for path in (root.absolute() / ".slurm").glob("*/array.json")]
    records.sort(key=lambda record: str(record[1].get("submitted")))
    jobs = [
        SubmittedJob(array, i, Path(run)) for array, found in records for i, run in enumerate(found.get("runs", []))
    ]
    unfinished = [job for job in jobs if job.run in wanted and job.outcome is None]
    queue = ask() if unfinished else {}
    entries = [(job, job.entry(queue)) for job in unfinished]
    return {job.run: job for job, entry in entries if entry is not None and entry.is_active}


class Waiter:
    """Looks at jobs until each has an outcome.

    Args:
        jobs: by any key.
        poll_seconds: how often SLURM is asked.
        ask: what SLURM knows; raises RunError where it does not answer, which ends nothing.
    """

    def __init__(
        self, jobs: Mapping[int, SubmittedJob], poll_seconds: float, ask: Callable[[], Queue] = read_queue
    ) -> None:
        self.waiting, self.poll_seconds, self.ask = dict(jobs), poll_seconds, ask
        self.queue: Queue | None = None
        self._missing_since: dict[int, float] = {}

    def look(self) -> dict[int, Outcome]:
        """Those that have ended since the last look; `waiting` has the rest."""
        try:
            self.queue = self.ask()
        except RunError as error:
            self.queue = None
            logger.warning("%s; asking again in %.0f s", error, self.poll_seconds)
        looked = {number: job.outcome or self._given_up(number, job) for number, job in self.waiting.items()}
        ended = {number: outcome for number, outcome in looked.items() if outcome is not None}
        self.waiting = {number: job for number, job in self.waiting.items() if number not in ended}
        return ended

    def _given_up(self, number: int, job: SubmittedJob) -> Outcome | None:
        """What became of a run whose job has ended without a word, some time ago."""
        if self.queue is None:
            return None
        entry = job.entry(self.queue)
        if entry is not None and entry.is_active:
            self._missing_since.pop(number, None)
            return None
        if time.monotonic() - self._missing_since.setdefault(number, time.monotonic()) < LOST_AFTER_SECONDS:
            return None
        if RunFolder(job.run).state() == "done":
            return Outcome(EXIT_DONE)
        if entry is None:
            return Outcome(EXIT_FAILED, "the job has left no exit code, and SLURM does not know it any more")
        return Outcome(EXIT_FAILED, f"job {entry.job} ended without an exit code; SLURM calls it {entry.state}")

    def describe(self) -> str:
        """How many jobs are in which state, in words."""
        if self.queue is None:
            return f"{len(self.waiting)} unknown"
        entries = [job.entry(self.queue) or QueueEntry("", "leaving", "") for job in self.waiting.values()]
        states = Counter(
            f"pending ({each.reason})" if each.state == "PENDING" else each.state.lower() for each in entries
        )
        return ", ".join(f"{count} {state}" for state, count in states.most_common())


def wait_for_jobs(waiter: Waiter, signals: Sequence[int], arguments: Sequence[Sequence[str]]) -> list[int]:
    """The exit code of each run with its arguments; 75 for those that still wait or run in SLURM when one of the signals came.

    The waiter has a job for some of the runs, by number; the others could not be submitted and count as failed.
    """
    jobs = dict(waiter.waiting)
    codes = [EXIT_INTERRUPTED if number in jobs else EXIT_FAILED for number in range(len(arguments))]
    with SweepProgress(len(jobs)) as progress:
        while waiter.waiting and not signals:
            ended = waiter.look()
            for number, (code, reason) in ended.items():
                codes[number], log = code, jobs[number].log
                lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
                why = [*([reason] if reason else lines[-3:]), f"log: {log}"] if code else []
                tell(" ".join(arguments[number]), code, lines, why)
            progress.show(len(ended), f"in SLURM: {waiter.describe()}")
            until = (
                time.monotonic() + waiter.poll_seconds
            )  # a thousand jobs are a thousand files on a network file system
            while waiter.waiting and not signals and time.monotonic() < until:
                time.sleep(min(0.5, waiter.poll_seconds))
    if waiter.waiting:
        arrays = ",".join(sorted({job.array.name for job in waiter.waiting.values()}))
        again = "the same command again waits for them and submits none twice"
        logger.warning("%d runs stay in SLURM; %s. To end them: scancel --name=%s", len(waiter.waiting), again, arrays)
    return codes
