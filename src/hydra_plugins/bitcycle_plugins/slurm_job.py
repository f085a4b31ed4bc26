"""The body of a SLURM job: runs `python train.py ...` as a child process and handles time limits and preemption.

It does not import PyTorch, which would delay the installation of the signal handlers.
"""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bitcycle.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, RunError
from bitcycle.files import read_object, write_json
from bitcycle.sweep.slurm import ask

WARNING = getattr(signal, "SIGUSR1", signal.SIGTERM)  # Windows, which has no SLURM, imports this module too
"""Signal before the time limit, requested by the launcher."""


@dataclass
class SlurmJob:
    """One run as a job. The job ends when the run has ended; after an interruption it is requeued and resumes the run.

    | cause | action of SLURM | action of the job after the run has saved its checkpoint |
    |---|---|---|
    | time limit | SIGUSR1 some time before | requeues itself, at most `max_timeouts` times |
    | preemption with a grace period | SIGTERM; job state stays RUNNING | requeues itself |
    | preemption, `scontrol requeue` | SIGTERM; requeues the job when it has ended | ends |
    | `scancel` | SIGTERM; job state CANCELLED | ends |

    After a node failure, SLURM requeues the job. A run in several processes has one task of the job per process; each
    task starts its process and forwards signals to it. The first task writes the outcome; if the process of another
    task fails, that task writes the outcome and ends the job.

    The outcome is written to a small file, as SLURM may not have job accounting:
    {"job": id, "code": exit code or null before the run has ended, "reason": why it failed, "timeouts": count so far,
    "attempt": how often SLURM has restarted the job}.
    """

    command: list[str]
    outcome: Path
    folder: str  # working directory
    max_timeouts: int  # maximum number of continuations after the time limit
    warning_seconds: float  # time between the warning and the time limit

    def __call__(self) -> None:
        """Run the job; raises SystemExit with the exit code of the run, so that SLURM calls a failed run FAILED."""
        import submitit

        self.received: list[int] = []
        for number in (signal.SIGTERM, WARNING, signal.SIGINT):
            signal.signal(number, lambda number, frame: self.received.append(number))
        self.job = submitit.JobEnvironment().job_id  # 7_2; the last job's SLURM_JOB_ID would mean the whole array
        self.attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
        before = read_object(self.outcome)
        self.timeouts = int(before.get("timeouts") or 0)
        task = os.environ.get("SLURM_PROCID", "0")
        if task != "0":
            sys.exit(self._after_process(task, self._train()))
        if before.get("code") is None or (before.get("job"), before.get("attempt")) != (self.job, self.attempt):
            self._write(None)  # unless another process of this attempt has failed already
        sys.exit(self._after_run(self._train()))

    def _train(self) -> int:
        """Start the run, forward signals to it, and return its exit code."""
        try:
            process = subprocess.Popen(self.command, cwd=self.folder)
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
                say("the run did not stop in time; it will resume from its last checkpoint")
                return EXIT_INTERRUPTED
            time.sleep(0.2)
        return process.returncode

    def _after_process(self, task: str, code: int) -> int:
        """Exit code of a task other than the first after its process has ended; nonzero ends the whole job."""
        if self.received or code in (EXIT_DONE, EXIT_INTERRUPTED):
            return EXIT_DONE
        code, reason = explained(code)
        if read_object(self.outcome).get("code") is None:
            self._write(code, f"process {task}: {reason or f'exit code {code}'}")
        return code

    def _after_run(self, code: int) -> int:
        """Exit code of the first task after its process has ended by itself or because of a signal."""
        failure: int | None = read_object(self.outcome).get("code")
        if code != EXIT_DONE and failure is not None:
            return failure  # another process failed, which ended this one
        if code == EXIT_DONE or not self.received:
            code, reason = explained(code)
            self._write(code, reason)
            return code
        if problem := self._go_on_later():
            self._write(EXIT_INTERRUPTED, problem)
        return EXIT_INTERRUPTED

    def _go_on_later(self) -> str:
        """Requeue the job of an interrupted run, unless SLURM does; returns why this failed, else an empty string."""
        timed_out = WARNING in self.received and signal.SIGTERM not in self.received
        state = "RUNNING" if timed_out else job_state(self.job)
        if state != "RUNNING":
            say(f"stopped by SLURM, which decides whether the job continues (state {state})")
            return ""
        self.timeouts += timed_out
        if self.timeouts > self.max_timeouts:
            return f"reached its time limit {self.timeouts} times"
        self._write(None)
        if not requeue(self.job) or job_state(self.job) != "RUNNING":  # SLURM has requeued or ended it in the meantime
            return ""
        problem = requeue(self.job)  # the controller, which may have been away, answers again
        return f"stopped, and SLURM does not requeue it: {problem}" if problem else ""

    def _write(self, code: int | None, reason: str | None = None) -> None:
        state = {"job": self.job, "attempt": self.attempt, "timeouts": self.timeouts}
        write_json(self.outcome, {**state, "code": code, "reason": reason})


def explained(code: int) -> tuple[int, str | None]:
    """The exit code of a run, 1 if a signal killed it, and the reason in that case.

    >>> explained(-15), explained(3)
    ((1, 'killed by SIGTERM'), (3, None))
    """
    if code >= 0:
        return code, None
    killer = signal.Signals(-code).name
    return EXIT_FAILED, f"killed by {killer}" + (", possibly out of memory" if killer == "SIGKILL" else "")


def job_state(job: str) -> str:
    """The state of a job according to SLURM's controller; retries until it answers, as the job ends in any case."""
    while True:
        try:
            if found := re.search(r"\bJobState=(\w+)", ask("scontrol", "show", "job", "--oneliner", job)):
                return found[1]
        except RunError as error:
            if "Invalid job id" in str(error):
                return "UNKNOWN"
            say(str(error))
        time.sleep(5)


def requeue(job: str) -> str:
    """Requeue a running job; returns SLURM's error message if it refuses, else an empty string."""
    problem = ""
    for pause in (1.0, 2.0, 0.0):
        try:
            ask("scontrol", "requeue", job)
            say("requeued")
            return ""
        except RunError as error:
            problem = str(error)
        time.sleep(pause)
    return problem


def say(message: str) -> None:
    """Print a line to the log of the job."""
    print(f"bitcycle job: {message}", file=sys.stderr, flush=True)
