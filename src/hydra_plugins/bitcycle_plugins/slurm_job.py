"""What a job in SLURM runs: `python train.py ...` as a child, and the answer to SLURM when it wants the machine back.

Imports nothing but the standard library: a job that loads PyTorch twice would be slow to take its first signal.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 75  # as in bitcycle.errors

WARNING = getattr(signal, "SIGUSR1", signal.SIGTERM)  # Windows, which has no SLURM, imports this module too
"""What SLURM sends before the time limit, as the launcher asks it to."""

POLL_SECONDS = 0.2
SCONTROL_SECONDS = 30.0


class SlurmJob:
    """One run as a job. It ends when the run has ended, or makes way and is in the queue again; never with a stopped run.

    | who stops it | what SLURM does | what the job does once the run has saved its checkpoint |
    |---|---|---|
    | time limit | SIGUSR1 some time before | requeues itself, at most `max_timeouts` times |
    | preemption with a time of grace | SIGTERM; job state stays RUNNING | requeues itself |
    | preemption, `scontrol requeue` | SIGTERM; requeues the job when it has ended | ends |
    | `scancel` | SIGTERM; job state CANCELLED | ends |

    A crash of the node is SLURM's to requeue. A run in several processes is as many tasks of one job, each of which starts one
    of them and passes signals on; the first speaks for all, unless another one fails, whose task then ends the job.

    The outcome goes into a small file, as SLURM may keep no accounts:
    {"job": its id, "code": exit code, null while the run goes on or is to go on, "reason": ..., "timeouts": number so far}.

    Args:
        command: the run.
        folder: where it starts.
        outcome: path of the file with the outcome.
        max_timeouts: how many times it goes on after its time limit.
        warning_seconds: how long before the time limit the warning comes.
    """

    def __init__(
        self, command: Sequence[str], folder: str, outcome: str, max_timeouts: int, warning_seconds: float
    ) -> None:
        self.command, self.folder, self.outcome = list(command), folder, Path(outcome)
        self.max_timeouts, self.warning_seconds = max_timeouts, warning_seconds

    def __call__(self) -> None:
        """Run the job.

        Raises:
            SystemExit: with the exit code of the run, so that SLURM calls a failed run FAILED.
        """
        self.received: list[int] = []
        for number in (signal.SIGTERM, WARNING, signal.SIGINT):
            signal.signal(number, self._note)
        self.timeouts = int(self._read().get("timeouts") or 0)
        self.task = int(os.environ.get("SLURM_PROCID", "0"))
        if self.task:
            sys.exit(self._after_task(self._train()))
        self._write(None)
        code = self._train()
        sys.exit(self._after_stop(code) if self.received and code != EXIT_DONE else self._after_end(code))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    def _train(self) -> int:
        """The exit code of the run, to which signals are passed on."""
        environment = dict(os.environ)
        if "SLURM_CPUS_PER_TASK" in environment:
            environment.setdefault("OMP_NUM_THREADS", environment["SLURM_CPUS_PER_TASK"])
        try:
            process = subprocess.Popen(self.command, cwd=self.folder, env=environment)
        except OSError as error:
            say(f"cannot start {self.command[0]}: {error}")
            return EXIT_FAILED
        passed_on, deadline = 0, float("inf")
        while process.poll() is None:
            for number in self.received[passed_on:]:
                passed_on += 1
                process.send_signal(number)
                if number == WARNING:
                    deadline = time.monotonic() + max(self.warning_seconds - 45, self.warning_seconds / 2)
            if time.monotonic() > deadline:
                say("the run has not stopped in time: it will go on from its last checkpoint")
                return EXIT_INTERRUPTED
            time.sleep(POLL_SECONDS)
        return process.returncode

    def _after_task(self, code: int) -> int:
        """Another process than the first has ended; a code that is not 0 ends the whole job."""
        if self.received or code in (EXIT_DONE, EXIT_INTERRUPTED):
            return EXIT_DONE
        code, reason = explained(code)
        if self._failure() is None:
            self._write(code, f"process {self.task}: {reason or f'exit code {code}'}")
        return code

    def _after_end(self, code: int) -> int:
        """The run ended by itself."""
        code, reason = explained(code)
        failure = self._failure()
        if code == EXIT_DONE or failure is None:
            self._write(code, reason)
            return code
        return failure  # that of another process, which ended this one

    def _failure(self) -> int | None:
        """The exit code of a process of the run that has failed before this one."""
        code = self._read().get("code")
        return code if isinstance(code, int) else None

    def _after_stop(self, code: int) -> int:
        """The run was asked to stop: see that it goes on later, if SLURM does not."""
        if (failure := self._failure()) is not None:
            return failure  # of another process: there is nothing to go on with
        timed_out = WARNING in self.received and signal.SIGTERM not in self.received
        state = "RUNNING" if timed_out else job_state(self._job_id())
        if state != "RUNNING":
            say(f"stopped by SLURM, which decides whether the job goes on (state {state})")
            return EXIT_INTERRUPTED
        self.timeouts += timed_out
        if self.timeouts > self.max_timeouts:
            self._write(EXIT_INTERRUPTED, f"reached its time limit {self.timeouts} times")
            return EXIT_INTERRUPTED
        self._write(None)
        problem = requeue(self._job_id())
        if problem and job_state(self._job_id()) == "RUNNING":  # else SLURM was faster
            self._write(EXIT_INTERRUPTED, f"stopped, and SLURM does not requeue it: {problem}")
        return EXIT_INTERRUPTED

    def _job_id(self) -> str:
        return job_id(os.environ)

    def _read(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self.outcome.read_text()))
        except (OSError, ValueError, TypeError):
            return {}

    def _write(self, code: int | None, reason: str | None = None) -> None:
        record = {"job": self._job_id(), "code": code, "reason": reason, "timeouts": self.timeouts}
        temporary = self.outcome.with_name(f".{self.outcome.name}.tmp")
        temporary.write_text(json.dumps(record) + "\n")
        os.replace(temporary, self.outcome)


def explained(code: int) -> tuple[int, str | None]:
    """The exit code of a run, and what killed it, if something did.

    >>> explained(-15), explained(3)
    ((1, 'killed by SIGTERM'), (3, None))
    """
    if code >= 0:
        return code, None
    killer = signal.Signals(-code).name
    return EXIT_FAILED, f"killed by {killer}" + (", as is done when memory runs out" if killer == "SIGKILL" else "")


def job_id(environment: Any) -> str:
    """The id by which SLURM means this job alone; the number of an array's last job means the whole array.

    >>> job_id({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}), job_id({"SLURM_JOB_ID": "9"})
    ('7_2', '9')
    """
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return str(environment["SLURM_JOB_ID"])


def job_state(job: str) -> str:
    """The state of a job as its controller sees it; waits until it answers, as this job is to end anyway."""
    while True:
        answer = _scontrol("show", "job", "--oneliner", job)
        found = re.search(r"\bJobState=(\w+)", answer.stdout)
        if found:
            return found[1]
        if "Invalid job id" in answer.stderr:
            return "UNKNOWN"
        say(f"scontrol: {answer.stderr.strip()}")
        time.sleep(5)


def requeue(job: str) -> str:
    """Put a running job into the queue again; returns what SLURM has against it, else an empty string."""
    for pause in (1.0, 2.0, 0.0):
        answer = _scontrol("requeue", job)
        if answer.returncode == 0:
            say("in the queue again")
            return ""
        time.sleep(pause)
    return answer.stderr.strip() or f"scontrol ended with {answer.returncode}"


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["scontrol", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def say(message: str) -> None:
    """A line in the log of the job."""
    print(f"bitcycle job: {message}", file=sys.stderr, flush=True)
