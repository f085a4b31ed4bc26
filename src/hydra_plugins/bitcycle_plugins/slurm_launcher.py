"""Hydra launcher for SLURM clusters: one job of an array for each run, submitted with submitit.

It has the parameters of hydra-submitit-launcher. Waiting for jobs is implemented here, as submitit needs sacct, which not
every cluster has, and loses the results of all runs when one fails. So is the reaction of a job to interruption, see
`slurm_job`: submitit ignores the SIGTERM of a preemption.
"""

import io
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from bitcycle.errors import RunError
from bitcycle.optional_imports import require
from bitcycle.settings import SettingError
from bitcycle.signals import record_signals
from bitcycle.sweep.slurm import (
    SubmittedJob,
    Waiter,
    ask,
    jobs_in_queue,
    largest_array,
    new_array,
    turn_to_submit,
    wait_for_jobs,
)
from hydra_plugins.bitcycle_plugins.local_launcher import root_of
from hydra_plugins.bitcycle_plugins.slurm_job import WARNING, SlurmJob

logger = logging.getLogger("bitcycle.sweep.slurm")

OWN = (
    *("name", "array_size", "array_parallelism", "requeue", "max_num_timeout", "poll_seconds", "signal_delay_s"),
    "additional_parameters",
)
"""Parameters that are not passed to submitit unchanged."""
LEAST = {"array_parallelism": 1, "poll_seconds": 0, "signal_delay_s": 0, "max_num_timeout": 0}
"""Smallest values of numbers."""
LEAST_OR_NULL = {"array_size": 1, "nodes": 1, "gpus_per_node": 0, "tasks_per_node": 1, "cpus_per_task": 1}
"""The same of numbers that may be null."""


class SlurmLauncher(Launcher):
    """Submits the runs of a sweep to SLURM and waits for them. Its parameters are those that `conf/hydra/launcher/slurm.yaml`
    documents, and any others of hydra-submitit-launcher."""

    def __init__(self, **parameters: Any) -> None:
        self.own = {key: parameters.pop(key) for key in OWN}
        self.own["srun_args"] = parameters.pop("srun_args", None)
        self.parameters = {key: value for key, value in parameters.items() if value not in (None, [])}
        self.config: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.config = hydra_context, config

    def queued(self, folders: Sequence[Path]) -> set[Path]:
        """The run folders whose jobs SLURM still runs or will run; raises RunError if it does not answer."""
        present = jobs_in_queue(Path(self.config.results_root), folders)
        return {folder for folder in folders if folder.resolve() in present}

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run every job and return its metric, for sweepers that optimize it; `GridSweeper` uses `launch_into`."""
        from bitcycle.configuration import read_config
        from bitcycle.guard import JobFailed
        from bitcycle.sweep.composition import without_hydra
        from bitcycle.training.naming import run_path
        from bitcycle.training.outcome import objective
        from bitcycle.training.run_folder import RunFolder

        load = self.context.config_loader.load_sweep_config
        configs = [read_config(without_hydra(load(self.config, list(words)))) for words in job_overrides]
        folders = [RunFolder(run_path(config)) for config in configs]
        codes = self.launch_into(job_overrides, [folder.path for folder in folders])
        jobs = [JobReturn(overrides=words, status=JobStatus.COMPLETED) for words in job_overrides]
        for job, code, folder in zip(jobs, codes, folders, strict=True):
            if code:
                job.status, job.return_value = JobStatus.FAILED, JobFailed(code)
            else:
                found = [objective(folder.read_summary(), name) for name in self.config.logging.objective]
                job.return_value = found[0] if len(found) == 1 else found
        return jobs

    def launch_into(self, job_overrides: Sequence[Sequence[str]], folders: Sequence[Path]) -> list[int]:
        """Submit the runs that are not in the queue, each once, wait for all, and return their exit codes. Raises RunError if
        SLURM does not answer or rejects all jobs, and SettingError for a parameter that cannot be meant."""
        check(self.own | self.parameters)
        places = [folder.resolve() for folder in folders]
        root = Path(self.config.results_root)
        with ExitStack() as turn:
            turn.enter_context(turn_to_submit(root))  # a signal ends this wait at once
            with record_signals() as signals:
                jobs = jobs_in_queue(root, places)
                if jobs:
                    logger.info("%d runs are in SLURM already: waiting for them", len(jobs))
                # a sweeper that optimizes may ask for the same run twice
                if absent := {run[1]: run for run in zip(job_overrides, places, strict=True) if run[1] not in jobs}:
                    jobs |= self._submit(list(absent.values()), signals)
                turn.close()
                numbered = {number: jobs[place] for number, place in enumerate(places) if place in jobs}
                return wait_for_jobs(Waiter(numbered, self.own["poll_seconds"]), signals, job_overrides)

    def _submit(self, runs: Sequence[tuple[Sequence[str], Path]], signals: Sequence[int]) -> dict[Path, SubmittedJob]:
        """Submit runs as job arrays until SLURM rejects one; runs that were not submitted are not in the result."""
        root = Path(self.config.results_root)
        largest = min(self.own["array_size"] or sys.maxsize, largest_array(ask("scontrol", "show", "config")))
        arrays = -(-len(runs) // largest)
        if arrays > self.own["array_parallelism"]:
            text = "%d arrays of at most %d runs run up to %d at once, more than hydra.launcher.array_parallelism=%d"
            logger.warning(text, arrays, largest, arrays, self.own["array_parallelism"])
        jobs: dict[Path, SubmittedJob] = {}
        for part in range(arrays):
            chosen = runs[len(runs) * part // arrays : len(runs) * (part + 1) // arrays]
            if signals:
                break
            array = new_array(root, [folder for _, folder in chosen], self.own["name"])
            try:
                submitted = self._submit_array(array, [words for words, _ in chosen], arrays)
            except (RunError, SettingError) as error:
                problem = _withdraw(array[0].array, error)
                if not jobs:
                    raise problem from error
                left = len(runs) - len(jobs)
                logger.error("%d runs were not submitted: %s. Run the same command again later", left, problem)
                break
            jobs |= {job.run: job for job in array}
            logger.info("submitted %d runs: job %s, name %s", len(chosen), submitted, array[0].array.name)
        return jobs

    def _submit_array(self, array: Sequence[SubmittedJob], job_overrides: Sequence[Sequence[str]], arrays: int) -> str:
        """Submit one of several job arrays; returns its job id."""
        from bitcycle.sweep.local import train_command

        timeouts = self.own["max_num_timeout"] if self.own["requeue"] else 0
        commands = [[sys.executable, *train_command(root_of(self.config), overrides)] for overrides in job_overrides]
        more = (os.getcwd(), timeouts, self.own["signal_delay_s"])
        tasks = [SlurmJob(command, job.outcome_file, *more) for job, command in zip(array, commands, strict=True)]
        with _outside_of_jobs():
            executor, printed = self.executor(array[0].array, arrays), io.StringIO()
            try:
                with redirect_stderr(printed):  # submitit prints the message of a refusal before it raises it
                    jobs = executor.submit_array(tasks)
            except (RuntimeError, ValueError) as error:  # submitit's own kinds of error derive from these
                raise RunError(f"SLURM rejects the jobs: {str(error).strip()}") from error
        print(printed.getvalue(), end="", file=sys.stderr)
        return str(jobs[0].job_id).partition("_")[0]

    def executor(self, folder: Path, arrays: int) -> Any:
        """submitit's executor of one of several arrays; raises SettingError for a parameter that submitit does not have."""
        given, own = self.parameters.get, self.own
        tasks = int(given("tasks_per_node") or given("gpus_per_node") or 1)  # one per GPU
        # srun does not inherit this option from sbatch
        cpus = [f"--cpus-per-task={given('cpus_per_task')}"] if given("cpus_per_task") else []
        several = tasks * int(given("nodes") or 1) > 1  # if one fails, the others would wait for it
        executor = require("submitit", "slurm").AutoExecutor(folder=folder, cluster="slurm")
        chosen = {
            "name": folder.name,
            "stderr_to_stdout": True,
            "tasks_per_node": tasks,
            "slurm_array_parallelism": max(1, own["array_parallelism"] // arrays),
            "slurm_srun_args": [*cpus, *["--kill-on-bad-exit=1"] * several, *(own["srun_args"] or [])],
            "slurm_additional_parameters": {
                ("requeue" if own["requeue"] else "no-requeue"): True,
                "signal": f"{WARNING.name.removeprefix('SIG')}@{own['signal_delay_s']}",
                **(own["additional_parameters"] or {}),
            },
        }
        try:
            executor.update_parameters(**{f"slurm_{key}": value for key, value in self.parameters.items()}, **chosen)
        except NameError as error:
            problem, remedy = str(error).partition("\n")[0], "conf/hydra/launcher/slurm.yaml documents the usual ones"
            raise SettingError("hydra.launcher", ", ".join(self.parameters), problem, remedy) from error
        return executor


def check(parameters: Mapping[str, Any]) -> None:
    """Raise SettingError for parameters with which no job could be submitted or none could train."""
    for name, least in (LEAST | LEAST_OR_NULL).items():
        number = parameters.get(name)
        if number is None and name in LEAST_OR_NULL:
            continue
        if not isinstance(number, int | float) or number < least:
            remedy = "write a number" + (", or null" if name in LEAST_OR_NULL else "")
            raise SettingError(f"hydra.launcher.{name}", number, f"is not a number of {least} or more", remedy)
    name, minutes, warning = parameters["name"], parameters.get("timeout_min"), parameters["signal_delay_s"]
    if not re.fullmatch(r"[\w.-]+", str(name or "")):  # SLURM's queue, in which runs are found by it, would be misread
        problem = "does not name a folder and its jobs"
        raise SettingError("hydra.launcher.name", name, problem, "use letters, digits and . _ - only")
    for option in ("setup", "srun_args"):
        if isinstance(given := parameters.get(option), str):
            remedy = f"write hydra.launcher.{option}=['{given}']"
            raise SettingError(f"hydra.launcher.{option}", given, "is not a list", remedy)
    if isinstance(minutes, (int, float)) and 60 * minutes <= warning:
        problem = f"leaves no time to train: each run is told to stop {warning} s before its limit (signal_delay_s)"
        raise SettingError(
            "hydra.launcher.timeout_min", minutes, problem, "raise it, or lower hydra.launcher.signal_delay_s"
        )


def _withdraw(array: Path, error: RunError | SettingError) -> RunError | SettingError:
    """Cancel the jobs of an array whose submission failed, as SLURM may have taken them before its answer was lost, and remove
    its folder; if they cannot be cancelled, the next command finds them by the folder. Returns the error to report."""
    if isinstance(error, RunError):
        try:
            ask("scancel", f"--name={array.name}")
        except RunError as failure:
            if "No active jobs" not in str(failure):
                return RunError(f"{error}; {failure}; the jobs may be in its queue: scancel --name={array.name}")
    shutil.rmtree(array)
    return error


@contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Hide the variables of the job in which the sweep itself may run: sbatch and srun would read them as options."""
    hidden = {key: os.environ.pop(key) for key in list(os.environ) if key.startswith("SLURM_") and key != "SLURM_CONF"}
    try:
        yield
    finally:
        os.environ.update(hidden)
