"""What the tests of slurm share."""

import json
import os
import subprocess
import sys
import time

from tests.conftest import ROOT


def fake(folder, name, script):
    """A command of SLURM that notes its arguments in NAME.calls."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$@" >> {path}.calls\n{script}\n')
    path.chmod(0o755)


def calls(folder, name):
    path = folder / f"{name}.calls"
    return path.read_text().splitlines() if path.exists() else []


class JobInSlurm:
    """Runs a SlurmJob as task 2 of array 7 of a SLURM that answers what it is told to."""

    def __init__(self, folder):
        self.folder = folder
        self.say("COMPLETING")

    def say(self, state, requeue="exit 0"):
        answer = f'case "$1" in show) echo "JobId=9 JobState={state} Requeue=1" ;; *) {requeue} ;; esac'
        fake(self.folder / "bin", "scontrol", answer)

    def start(self, script, max_timeouts=1, warning_seconds=100):
        command = ["sh", "-c", script]
        arguments = (command, self.folder / "2.json", str(self.folder), max_timeouts, warning_seconds)
        (self.folder / "started").unlink(missing_ok=True)
        code = "from pathlib import PosixPath; from hydra_plugins.bitcycle_plugins.slurm_job import SlurmJob"
        code += f"; SlurmJob(*{arguments!r})()"
        environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "SUBMITIT_EXECUTOR": "slurm",
            "SLURM_JOB_ID": "9",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": "2",
        }
        return subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)

    def stopped(self, script, *signals, **options):
        """The exit code of a job that gets signals when its run has started."""
        process = self.start(script, **options)
        deadline = time.monotonic() + 60
        while not (self.folder / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for number in signals:
            process.send_signal(number)
        return process.wait(60)

    @property
    def outcome(self):
        record = json.loads((self.folder / "2.json").read_text())
        assert record["job"] == "7_2"
        return record["code"], record["reason"], record["timeouts"]

    @property
    def requeued(self):
        return [call for call in calls(self.folder / "bin", "scontrol") if call.startswith("requeue")]
