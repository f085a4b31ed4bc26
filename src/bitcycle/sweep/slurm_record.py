"""What is kept of submitted jobs, so that another process, days later, knows which run is where: results_root/.slurm."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from bitcycle.sweep.slurm_queue import Queue, QueueEntry
from bitcycle.training.run_folder import read_object, write_json

FOLDER = ".slurm"


@dataclass(frozen=True)
class JobArray:
    """An array of jobs: a folder with `array.json`, the outcome of each job, the logs, and submitit's files.

    Attributes:
        folder: its name is the name of the jobs in SLURM.
        runs: the run folder of each job, absolute.
        submitted: when, as text that sorts by time.
    """

    folder: Path
    runs: tuple[Path, ...]
    submitted: str

    @property
    def name(self) -> str:
        """The name of its jobs."""
        return self.folder.name

    def outcome_file(self, index: int) -> Path:
        """Where a job leaves its outcome."""
        return self.folder / f"{index}.json"

    def outcome(self, index: int) -> dict[str, Any]:
        """What a job has left so far, see `SlurmJob`; empty if nothing."""
        return read_object(self.outcome_file(index))

    def exit_code(self, index: int) -> int | None:
        """The exit code of the run; None while it goes on, is to go on, or if the job was lost."""
        code = self.outcome(index).get("code")
        return code if isinstance(code, int) else None

    def log(self, index: int) -> Path:
        """What a job printed; the array's folder as long as there is nothing."""
        pattern = f"*_{index}_0_log.out" if len(self.runs) > 1 else "*_0_log.out"
        return next(iter(sorted(self.folder.glob(pattern))), self.folder)


@dataclass(frozen=True)
class JobOfArray:
    """One run in SLURM."""

    array: JobArray
    index: int

    @property
    def run(self) -> Path:
        """Its run folder."""
        return self.array.runs[self.index]

    @property
    def key(self) -> tuple[str, int]:
        """How the queue calls it."""
        return self.array.name, self.index

    def entry(self, queue: Queue) -> QueueEntry | None:
        """What SLURM knows of it."""
        return queue.get(self.key)


@contextmanager
def new_array(root: Path, runs: Sequence[Path], prefix: str) -> Iterator[JobArray]:
    """Write down an array that is submitted inside; known from then on, whatever happens to this process, and forgotten
    after an error.

    Args:
        root: results_root.
        runs: the run folder of each of its jobs.
        prefix: the beginning of the jobs' name.
    """
    folder = root.absolute() / FOLDER / f"{prefix}-{uuid.uuid4().hex[:8]}"
    array = JobArray(folder, tuple(run.absolute() for run in runs), datetime.now(UTC).isoformat())
    folder.mkdir(parents=True)
    write_json(folder / "array.json", {"submitted": array.submitted, "runs": [os.fspath(run) for run in array.runs]})
    try:
        yield array
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def read_arrays(root: Path) -> Iterator[JobArray]:
    """All arrays that were ever submitted for a results folder, the newest first."""
    found = []
    for path in (root.absolute() / FOLDER).glob("*/array.json"):
        record = read_object(path)
        if "runs" in record:
            found.append(JobArray(path.parent, tuple(map(Path, record["runs"])), str(record["submitted"])))
    yield from sorted(found, key=lambda array: array.submitted, reverse=True)


def open_jobs(root: Path, runs: Iterable[Path]) -> dict[Path, list[JobOfArray]]:
    """The jobs of some runs that have left no exit code: they wait, run, or were lost."""
    wanted = {run.absolute() for run in runs}
    found: dict[Path, list[JobOfArray]] = {}
    for array in read_arrays(root):
        for index, run in enumerate(array.runs):
            if run in wanted and array.exit_code(index) is None:
                found.setdefault(run, []).append(JobOfArray(array, index))
    return found


def jobs_in_queue(jobs: dict[Path, list[JobOfArray]], queue: Queue) -> dict[Path, JobOfArray]:
    """The job of each run that SLURM runs or will run."""
    found: dict[Path, JobOfArray] = {}
    for run, candidates in jobs.items():
        for job in candidates:
            entry = job.entry(queue)
            if entry is not None and entry.is_active:
                found.setdefault(run, job)
    return found


def split(count: int, largest: int) -> list[range]:
    """Parts of a list of `count` jobs, as even as possible, none above `largest`.

    >>> split(7, 3), split(2, 3)
    ([range(0, 3), range(3, 5), range(5, 7)], [range(0, 2)])
    """
    parts = -(-count // largest)
    ends = [-(-count * part // parts) for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(ends)]
