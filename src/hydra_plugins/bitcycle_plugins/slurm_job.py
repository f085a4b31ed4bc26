"""What a job in SLURM runs: `python train.py ...` as a child, and the answer to SLURM when it wants the machine back.

Imports no PyTorch: a job that loads it twice would be slow to take its first signal.
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
from typing import Any

from bitcycle.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED

WARNING = getattr(signal, "SIGUSR1", signal.SIGTERM)  # Windows, which has no SLURM, imports this module too
"""What SLURM sends before the time limit, as the launcher asks it to."""


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
        import submitit

        self.received: list[int] = []
        for number in (signal.SIGTERM, WARNING, signal.SIGINT):
            signal.signal(number, lambda number, frame: self.received.append(number))
        self.job = submitit.JobEnvironment().job_id  # 7_2: the number of an array's last job means the whole array
        self.timeouts = int(self._left().get("timeouts") or 0)
        task = os.environ.get("SLURM_PROCID", "0")
        if task == "0":
            self._write(None)
            sys.exit(self._after_run(self._train()))
        sys.exit(self._after_process(task, self._train()))

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
            time.sleep(0.2)
        return process.returncode

    def _after_process(self, task: str, code: int) -> int:
        """Another process than the first has ended; a code that is not 0 ends the whole job."""
        if self.received or code in (EXIT_DONE, EXIT_INTERRUPTED):
            return EXIT_DONE
        code, reason = explained(code)
        if self._left().get("code") is None:
            self._write(code, f"process {task}: {reason or f'exit code {code}'}")
        return code

    def _after_run(self, code: int) -> int:
        """The first process has ended, by itself or as it was asked to."""
        failure: int | None = self._left().get("code")
        if code != EXIT_DONE and failure is not None:
            return failure  # of another process, which ended this one
        if code == EXIT_DONE or not self.received:
            code, reason = explained(code)
            self._write(code, reason)
        else:
            code, reason = EXIT_INTERRUPTED, self._go_on_later()
            if reason:
                self._write(code, reason)
        return code

    def _go_on_later(self) -> str:
        """See that a stopped run goes on later, if SLURM does not; returns why it does not, else an empty string."""
        timed_out = WARNING in self.received and signal.SIGTERM not in self.received
        state = "RUNNING" if timed_out else job_state(self.job)
        if state != "RUNNING":
            say(f"stopped by SLURM, which decides whether the job goes on (state {state})")
            return ""
        self.timeouts += timed_out
        if self.timeouts > self.max_timeouts:
            return f"reached its time limit {self.timeouts} times"
        self._write(None)
        problem = requeue(self.job)
        refused = problem and job_state(self.job) == "RUNNING"  # else SLURM was faster
        return f"stopped, and SLURM does not requeue it: {problem}" if refused else ""

    def _left(self) -> dict[str, Any]:
        """What is in the file so far."""
        try:
            return dict(json.loads(self.outcome.read_text()))
        except (OSError, ValueError, TypeError):
            return {}

    def _write(self, code: int | None, reason: str | None = None) -> None:
        record = {"job": self.job, "code": code, "reason": reason, "timeouts": self.timeouts}
        temporary = self.outcome.with_suffix(".tmp")
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


def job_state(job: str) -> str:
    """The state of a job as its controller sees it; waits until it answers, as this job is to end anyway."""
    while True:
        answer = _scontrol("show", "job", "--oneliner", job)
        if found := re.search(r"\bJobState=(\w+)", answer.stdout):
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
        return subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def say(message: str) -> None:
    """A line in the log of the job."""
    print(f"bitcycle job: {message}", file=sys.stderr, flush=True)
