"""What is kept of submitted jobs, so that another process, days later, knows which run is where: results_root/.slurm.

An array of jobs is a folder, whose name is the name of the jobs in SLURM, with `array.json`, the outcome of each job, the logs,
and submitit's files.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bitcycle.sweep.slurm_queue import Queue, QueueEntry
from bitcycle.training.run_folder import read_object, write_json

FOLDER = ".slurm"


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
    def exit_code(self) -> int | None:
        """The exit code of the run; None while it goes on, is to go on, or if the job was lost."""
        code = self.outcome().get("code")
        return code if isinstance(code, int) else None

    @property
    def log(self) -> Path:
        """What the job printed: NUMBER_INDEX_0_log.out, without index of a single job; else the array's folder."""
        name = re.compile(rf"\d+(_{self.number})?_0_log\.out")
        return next((path for path in sorted(self.array.glob("*.out")) if name.fullmatch(path.name)), self.array)

    def outcome(self) -> dict[str, Any]:
        """What the job has left so far; empty if nothing."""
        return read_object(self.outcome_file)

    def entry(self, queue: Queue) -> QueueEntry | None:
        """What SLURM knows of it."""
        return queue.get((self.array.name, self.number))


@contextmanager
def new_array(root: Path, runs: Sequence[Path], prefix: str) -> Iterator[list[SubmittedJob]]:
    """Write down an array that is submitted inside; known from then on, whatever happens to this process, and forgotten
    after an error.

    Args:
        root: results_root.
        runs: the run folder of each of its jobs.
        prefix: the beginning of the jobs' name.
    """
    folder = root.absolute() / FOLDER / f"{prefix}-{uuid.uuid4().hex[:8]}"
    jobs = [SubmittedJob(folder, index, run.absolute()) for index, run in enumerate(runs)]
    folder.mkdir(parents=True)
    record = {"submitted": datetime.now(UTC).isoformat(), "runs": [os.fspath(job.run) for job in jobs]}
    write_json(folder / "array.json", record)
    try:
        yield jobs
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def open_jobs(root: Path, runs: Sequence[Path]) -> list[SubmittedJob]:
    """The jobs of some runs that have left no exit code, the newest first: they wait, run, or were lost."""
    wanted = {run.absolute() for run in runs}
    records = [(path.parent, read_object(path)) for path in (root.absolute() / FOLDER).glob("*/array.json")]
    records.sort(key=lambda record: str(record[1].get("submitted")), reverse=True)
    jobs = [
        SubmittedJob(array, i, Path(run)) for array, record in records for i, run in enumerate(record.get("runs", []))
    ]
    return [job for job in jobs if job.run in wanted and job.exit_code is None]


def jobs_in_queue(jobs: Sequence[SubmittedJob], queue: Queue) -> dict[Path, SubmittedJob]:
    """The job of each run that SLURM runs or will run, the first of several."""
    found: dict[Path, SubmittedJob] = {}
    for job in jobs:
        entry = job.entry(queue)
        if entry is not None and entry.is_active:
            found.setdefault(job.run, job)
    return found


def split(count: int, largest: int) -> list[range]:
    """Parts of a list of `count` jobs, as even as possible, none above `largest`.

    >>> split(7, 3), split(2, 3)
    ([range(0, 3), range(3, 5), range(5, 7)], [range(0, 2)])
    """
    parts = -(-count // largest)
    ends = [-(-count * part // parts) for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(ends)]
