"""The SLURM jobs of a sweep: records on disk, queries to SLURM, waiting. Jobs continue when the sweep's process ends.

Each job array has a folder in results_root/.slurm, named like its jobs in SLURM, with `array.json`, the outcome of each
job, the logs and submitit's files. From it, a later process learns which job trains which run. SLURM is queried with
squeue and scontrol; job accounting (sacct) is not needed.
"""

import logging
import os
import re
import shutil
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from bitcycle.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, RunError
from bitcycle.files import locked, read_object, write_json
from bitcycle.sweep.progress import SweepProgress, tell

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 60.0
GLANCE_SECONDS = 3.0
"""The same for a command that only shows what the queue has."""
LOST_AFTER_SECONDS = 60.0
"""Time after which a job unknown to SLURM counts as lost; its exit code may appear late on a network file system."""

ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"),
    *("BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED"),
)
"""Final states of a job; in all other states, including unknown ones, the job is waited for."""
STARTED = ("RUNNING", "COMPLETING")
"""States of a job that has begun and not ended."""


class QueueEntry(NamedTuple):
    """A job in SLURM's queue: its id as scontrol and scancel expect it, its state, and why it waits."""

    job: str
    state: str
    reason: str


Queue = dict[tuple[str, int], QueueEntry]
"""(job name, array index) -> queue entry. Names are unique; job ids are not if there are two clusters."""


def read_queue(seconds: float = TIMEOUT_SECONDS) -> Queue:
    """All jobs of this user that SLURM lists; raises RunError if it does not answer within some seconds."""
    options = ("--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%j|%T|%r")
    return parse_queue(ask("squeue", *options, seconds=seconds))


def parse_queue(text: str) -> Queue:
    """Parse the output of squeue. The key of a job is its name and array index; the index is 0 outside an array.

    >>> parse_queue("17_3|bitcycle-0af1|PENDING|Resources\\n18_[2-9]|bitcycle-77e0|PENDING|None\\n")
    {('bitcycle-0af1', 3): QueueEntry(job='17_3', state='PENDING', reason='Resources')}
    """
    found = re.finditer(r"^\s*(\d+(?:_(\d+))?)\|([^|\n]*)\|(\w+)\|(.*)$", text, re.MULTILINE)
    return {(line[3], int(line[2] or 0)): QueueEntry(line[1], line[4], line[5]) for line in found}


def largest_array(configuration: str) -> int:
    """Maximum number of jobs in an array, from the output of `scontrol show config`; 1 if arrays are disabled.

    >>> largest_array("MaxArraySize            = 1001"), largest_array("MaxArraySize = 0")
    (1001, 1)
    >>> largest_array("MaxArraySize = 1001\\nSchedulerParameters = bf_continue,max_array_tasks=100")
    100
    """
    limits = re.findall(r"\b(?:MaxArraySize\s*=\s*|max_array_tasks=)(\d+)", configuration)
    return max(1, min(map(int, limits), default=1))


def ask(*command: str, seconds: float = TIMEOUT_SECONDS) -> str:
    """The output of one of SLURM's commands; raises RunError if it is not installed, fails, or takes longer."""
    try:  # in a separate session, so that Ctrl-C reaches only the sweep
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, start_new_session=True)
    except OSError as error:
        remedy = "use hydra/launcher=slurm where jobs are submitted, or hydra/launcher=local"
        raise RunError(f"no {command[0]} on this machine: {remedy}") from error
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{command[0]} has not answered for {seconds:.0f} s") from error
    if done.returncode:
        raise RunError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout


class JobOutcome(NamedTuple):
    """Outcome of a job: the exit code of its run, and the reason of a failure if the run's log does not show it."""

    code: int
    reason: str = ""


class SubmittedJob(NamedTuple):
    """A submitted run: the folder of its job array, its index in the array, and its absolute run folder."""

    array: Path
    number: int
    run: Path

    @property
    def outcome_file(self) -> Path:
        """File to which the job writes its outcome, see `SlurmJob`."""
        return self.array / f"{self.number}.json"

    @property
    def outcome(self) -> JobOutcome | None:
        """The outcome that the job has written; None while it runs or is to continue, or if it was lost."""
        record = read_object(self.outcome_file)
        code = record.get("code")
        return JobOutcome(code, str(record.get("reason") or "")) if isinstance(code, int) else None

    @property
    def log(self) -> Path:
        """The job's log: JOB_INDEX_0_log.out, or JOB_0_log.out outside an array; without a log, the array's folder."""
        name = re.compile(rf"\d+(_{self.number})?_0_log\.out")
        return next((path for path in sorted(self.array.glob("*.out")) if name.fullmatch(path.name)), self.array)

    def entry(self, queue: Queue) -> QueueEntry | None:
        """The job's entry in SLURM's queue, if any."""
        return queue.get((self.array.name, self.number))

    def is_active(self, queue: Queue) -> bool:
        """Whether SLURM still runs or will run the job."""
        entry = self.entry(queue)
        return entry is not None and entry.state not in ENDED


@contextmanager
def turn_to_submit(root: Path) -> Iterator[None]:
    """Wait until no other sweep looks into the queue and submits below the folder of all runs, so that two sweeps submit no run
    twice. Raises RunError if the folder cannot be written or its disk has no locks."""
    folder = root.absolute() / ".slurm"
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / "submission"))
        except OSError as error:
            raise RunError(f"cannot write to {folder}: {error}. Set results_root to a writable folder.") from error
        yield


def new_array(root: Path, runs: Sequence[Path], prefix: str) -> list[SubmittedJob]:
    """Record a job array of these run folders on disk, below the folder of all runs; PREFIX-NUMBER names its jobs.

    This comes before its submission, so that it is known even if this process is killed in between. Raises RunError if the folder
    cannot be written.
    """
    folder = root.resolve() / ".slurm" / f"{prefix}-{uuid.uuid4().hex[:8]}"
    jobs = [SubmittedJob(folder, index, run.resolve()) for index, run in enumerate(runs)]
    try:
        folder.mkdir(parents=True)
        write_json(folder / "array.json", {"runs": [os.fspath(job.run) for job in jobs]})
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error}. Set results_root to a writable folder.") from error
    return jobs


def jobs_in_queue(root: Path, runs: Sequence[Path], ask: Callable[[], Queue] = read_queue) -> dict[Path, SubmittedJob]:
    """Run folder -> job, for the runs that SLURM still runs or will run; raises RunError if it does not answer."""
    wanted = {run.resolve() for run in runs}
    arrays = [(path.parent, read_object(path).get("runs", [])) for path in root.resolve().glob(".slurm/*/array.json")]
    jobs = [SubmittedJob(array, i, Path(run).resolve()) for array, its in arrays for i, run in enumerate(its)]
    unfinished = [job for job in jobs if job.run in wanted and job.outcome is None]
    queue = ask() if unfinished else {}
    return {job.run: job for job in unfinished if job.is_active(queue)}


def states_in_queue(root: Path, runs: Sequence[Path]) -> dict[Path, str]:
    """Run folder -> queued or running, for the runs that SLURM will run or runs, at a glance: without squeue on this machine
    there are none, and if it does not answer soon, that is logged."""
    if shutil.which("squeue") is None:
        return {}
    queue: Queue = {}

    def glance() -> Queue:
        queue.update(read_queue(GLANCE_SECONDS))
        return queue

    try:
        jobs = jobs_in_queue(root, runs, glance)
    except RunError as error:
        logger.warning("%s; runs in SLURM's queue are shown as if they were not", error)
        return {}
    entries = {run: job.entry(queue) for run in runs if (job := jobs.get(run.resolve()))}
    return {run: "running" if entry and entry.state in STARTED else "queued" for run, entry in entries.items()}


class Waiter:
    """Checks jobs, by number, until each has an outcome; if `ask`, which queries SLURM's queue, raises a RunError, that is
    logged and the query repeated."""

    def __init__(
        self, jobs: Mapping[int, SubmittedJob], poll_seconds: float, ask: Callable[[], Queue] = read_queue
    ) -> None:
        self.waiting, self.poll_seconds, self.ask = dict(jobs), poll_seconds, ask
        self.queue: Queue | None = None
        self._missing_since: dict[int, float] = {}

    def look(self) -> dict[int, JobOutcome]:
        """The jobs that have ended since the last call; `waiting` holds the others."""
        try:
            self.queue = self.ask()
        except RunError as error:
            self.queue = None
            logger.warning("%s; asking again in %.0f s", error, self.poll_seconds)
        looked = {number: job.outcome or self._given_up(number, job) for number, job in self.waiting.items()}
        self.waiting = {number: job for number, job in self.waiting.items() if looked[number] is None}
        return {number: outcome for number, outcome in looked.items() if outcome is not None}

    def _given_up(self, number: int, job: SubmittedJob) -> JobOutcome | None:
        """The outcome of a run whose job ended some time ago without writing an exit code; None for all other jobs."""
        if self.queue is None:
            return None
        if job.is_active(self.queue):
            self._missing_since.pop(number, None)
            return None
        if time.monotonic() - self._missing_since.setdefault(number, time.monotonic()) < LOST_AFTER_SECONDS:
            return None
        from bitcycle.training.run_folder import RunFolder  # with PyTorch, which a job imports this module without

        if RunFolder(job.run).state() == "done":
            return JobOutcome(EXIT_DONE)
        if (entry := job.entry(self.queue)) is None:
            return JobOutcome(EXIT_FAILED, "the job wrote no exit code, and SLURM no longer lists it")
        reason = f"job {entry.job} ended without an exit code; its state in SLURM is {entry.state}"
        return JobOutcome(EXIT_FAILED, reason)

    def describe(self) -> str:
        """The number of jobs in each state, as text."""
        if self.queue is None:
            return f"{len(self.waiting)} unknown"
        entries = [job.entry(self.queue) or QueueEntry("", "leaving", "") for job in self.waiting.values()]
        states = Counter(
            f"pending ({each.reason})" if each.state == "PENDING" else each.state.lower() for each in entries
        )
        return ", ".join(f"{count} {state}" for state, count in states.most_common())


def wait_for_jobs(waiter: Waiter, signals: Sequence[int], arguments: Sequence[Sequence[str]]) -> list[int]:
    """Wait for the jobs, by number of the run; returns the exit code of each run.

    It is 75 for runs still in SLURM when a signal arrives, and 1 for runs without a job, which could not be submitted.
    """
    jobs = dict(waiter.waiting)
    codes = [EXIT_INTERRUPTED if number in jobs else EXIT_FAILED for number in range(len(arguments))]
    with SweepProgress(len(jobs)) as progress:
        while waiter.waiting and not signals:
            ended = waiter.look()
            for number, (code, reason) in ended.items():
                codes[number], log = code, jobs[number].log
                lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
                why = [*filter(None, [reason]), *lines[-3:], f"log: {log}"] if code else []
                tell(" ".join(arguments[number]), code, lines, why)
            progress.show(len(ended), f"in SLURM: {waiter.describe()}")
            # no shorter interval: each check reads one file per job on a network file system
            until = time.monotonic() + waiter.poll_seconds
            while waiter.waiting and not signals and time.monotonic() < until:
                time.sleep(min(0.5, waiter.poll_seconds))
    if waiter.waiting:
        arrays = ",".join(sorted({job.array.name for job in waiter.waiting.values()}))
        again = "run the same command again to wait for them; it submits none twice"
        logger.warning("%d runs stay in SLURM: %s. To cancel: scancel --name=%s", len(waiter.waiting), again, arrays)
    return codes
