"""What SLURM says, as plain values: who is in its queue and how long an array may be. Needs no accounting (sacct)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import NamedTuple

from bitcycle.errors import RunError

TIMEOUT_SECONDS = 60.0

ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"),
    *("BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED"),
)
"""States that a job does not leave by itself; all others, also ones that are unknown here, are waited for."""

HOPELESS = re.compile(
    r"Held|requeued held|PartitionTimeLimit|PartitionNodeLimit|BadConstraints|DependencyNeverSatisfied|PerJob|InvalidAccount"
)
"""Reasons of a waiting job that no waiting will cure."""


class QueueEntry(NamedTuple):
    """A job in SLURM's queue.

    Attributes:
        job: its id, as scontrol and scancel want it.
        state: one of SLURM's words.
        reason: why it waits.
    """

    job: str
    state: str
    reason: str

    @property
    def is_active(self) -> bool:
        """Whether it runs or will run."""
        return self.state not in ENDED


Queue = dict[tuple[str, int], QueueEntry]
"""(name of the job, index in its array) -> what is known of it. Names are unique, numbers not: there may be two clusters."""

FORMAT = "%i|%j|%T|%r"


def read_queue() -> Queue:
    """All jobs of this user that SLURM remembers.

    Raises:
        RunError: if it does not answer.
    """
    return parse_queue(
        ask("squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", f"--format={FORMAT}")
    )


def parse_queue(text: str) -> Queue:
    """The lines of squeue. A job is known by name and index; one that is no array has index 0.

    >>> parse_queue("17_3|bitcycle-0af1|PENDING|Resources\\n19|bitcycle-77e0|COMPLETED|None\\n")
    {('bitcycle-0af1', 3): QueueEntry(job='17_3', state='PENDING', reason='Resources'), \
('bitcycle-77e0', 0): QueueEntry(job='19', state='COMPLETED', reason='None')}
    """
    queue: Queue = {}
    for line in text.splitlines():
        job, _, rest = line.strip().partition("|")
        name, _, rest = rest.partition("|")
        state, _, reason = rest.partition("|")
        index = re.fullmatch(r"\d+(?:_(\d+))?", job)
        if index is not None:  # other forms are arrays of others, shortened
            queue[name, int(index[1] or 0)] = QueueEntry(job, state, reason)
    return queue


def largest_array() -> int:
    """How many jobs an array may have on this cluster.

    Raises:
        RunError: if SLURM does not answer.
    """
    return parse_largest_array(ask("scontrol", "show", "config"))


def parse_largest_array(text: str) -> int:
    """The limit in the configuration as scontrol shows it; 1 where arrays are switched off.

    >>> parse_largest_array("MaxArraySize            = 1001"), parse_largest_array("MaxArraySize = 0")
    (1001, 1)
    >>> parse_largest_array("MaxArraySize = 1001\\nSchedulerParameters = bf_continue,max_array_tasks=100")
    100
    """
    limits = [int(number) for number in re.findall(r"\b(?:MaxArraySize\s*=\s*|max_array_tasks=)(\d+)", text)]
    return max(1, min(limits, default=1))


def ask(*command: str) -> str:
    """The answer of one of SLURM's commands.

    Raises:
        RunError: if it is not installed, fails, or takes too long.
    """
    if shutil.which(command[0]) is None:
        raise RunError(
            f"no {command[0]} on this machine: use hydra/launcher=slurm where jobs are submitted, or hydra/launcher=local"
        )
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_SECONDS,
            start_new_session=True,  # Ctrl-C is for the sweep, not for this question
        ).stdout
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{command[0]} has not answered for {TIMEOUT_SECONDS:.0f} s") from error
    except subprocess.CalledProcessError as error:
        raise RunError(f"{command[0]} failed: {error.stderr.strip()}") from error
