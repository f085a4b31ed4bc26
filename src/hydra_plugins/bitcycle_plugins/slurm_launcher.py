"""Hydra launcher for SLURM clusters, based on hydra-submitit-launcher: one job of an array for each run.

It has the parameters of hydra-submitit-launcher and submits with submitit. Waiting for jobs is implemented here, as
submitit needs sacct, which not every cluster has, and loses the results of all runs when one fails. So is the reaction
of a job to interruption, see `slurm_job`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from bitcycle.errors import RunError
from bitcycle.optional_imports import require
from bitcycle.settings import SettingError, nearest
from bitcycle.signals import noted
from hydra_plugins.bitcycle_plugins.local_launcher import returned, root_of
from hydra_plugins.bitcycle_plugins.slurm_job import WARNING, SlurmJob

if TYPE_CHECKING:
    from bitcycle.sweep.slurm import SubmittedJob

logger = logging.getLogger("bitcycle.sweep.slurm")

OWN = (
    *("name", "array_size", "array_parallelism", "requeue", "max_num_timeout", "poll_seconds", "signal_delay_s"),
    "additional_parameters",
)
"""Parameters that are not passed to submitit unchanged."""


class SlurmLauncher(Launcher):
    """Submits the runs of a sweep to SLURM and waits for them.

    Args:
        parameters: those documented in `conf/hydra/launcher/slurm.yaml`, and any others of hydra-submitit-launcher.
    """

    def __init__(self, **parameters: Any) -> None:
        self.own = {key: parameters.pop(key) for key in OWN}
        self.parameters = {key: value for key, value in parameters.items() if value not in (None, [])}
        self.config: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.config = hydra_context, config

    def queued(self, folders: Sequence[Path]) -> set[Path]:
        """The run folders whose jobs SLURM still runs or will run.

        Raises:
            RunError: if the state of submitted jobs is needed and SLURM does not answer.
        """
        from bitcycle.sweep.slurm import jobs_in_queue

        present = jobs_in_queue(Path(self.config.results_root), folders)
        return {folder for folder in folders if folder.absolute() in present}

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run every job and return its metric, for sweepers that optimize it; `GridSweeper` uses `launch_into`."""
        from bitcycle.command import JobFailed, objective
        from bitcycle.configuration import read_config
        from bitcycle.sweep.composition import without_hydra
        from bitcycle.training.plan import locate

        load = self.context.config_loader.load_sweep_config
        folders = [locate(read_config(without_hydra(load(self.config, list(words))))) for words in job_overrides]
        jobs = self.launch_into(job_overrides, [folder.path for folder in folders])
        for job, folder in zip(jobs, folders, strict=True):
            if code := job.return_value:
                job.status, job.return_value = JobStatus.FAILED, JobFailed(code)
            else:
                found = [objective(folder.read_summary(), name) for name in self.config.logging.objective]
                job.return_value = found[0] if len(found) == 1 else found
        return jobs

    def launch_into(self, job_overrides: Sequence[Sequence[str]], folders: Sequence[Path]) -> Sequence[JobReturn]:
        """Submit every run that is not in the queue yet, wait for all runs, and return their exit codes.

        Raises:
            RunError: if SLURM does not answer or rejects all jobs.
        """
        from bitcycle.sweep.slurm import Waiter, jobs_in_queue, wait_for_jobs

        runs = list(enumerate(zip(job_overrides, folders, strict=True)))
        with noted() as signals:
            present = jobs_in_queue(Path(self.config.results_root), folders)
            jobs = {i: present[folder.absolute()] for i, (_, folder) in runs if folder.absolute() in present}
            if jobs:
                logger.info("%d runs are in SLURM already: waiting for them", len(jobs))
            if absent := [run for run in runs if run[0] not in jobs]:
                jobs |= self._submit(absent, signals)
            codes = wait_for_jobs(Waiter(jobs, self.own["poll_seconds"]), signals, job_overrides)
        return [returned(overrides, code) for overrides, code in zip(job_overrides, codes, strict=True)]

    def _submit(
        self, runs: Sequence[tuple[int, tuple[Sequence[str], Path]]], signals: Sequence[int]
    ) -> dict[int, SubmittedJob]:
        """Submit runs as job arrays until SLURM rejects one; runs that were not submitted are not in the result."""
        from bitcycle.sweep.slurm import ask, largest_array, new_array

        root = Path(self.config.results_root)
        largest = min(self.own["array_size"] or sys.maxsize, largest_array(ask("scontrol", "show", "config")))
        arrays = -(-len(runs) // largest)
        jobs: dict[int, SubmittedJob] = {}
        for part in range(arrays):
            chosen = runs[len(runs) * part // arrays : len(runs) * (part + 1) // arrays]
            if signals:
                break
            try:
                with new_array(root, [folder for _, (_, folder) in chosen], self.own["name"]) as array:
                    submitted = self._submit_array(array, [words for _, (words, _) in chosen], arrays)
            except RunError as error:
                if not jobs:
                    raise
                left = len(runs) - len(jobs)
                logger.error("%d runs were not submitted: %s. Run the same command again later", left, error)
                break
            jobs |= {number: job for (number, _), job in zip(chosen, array, strict=True)}
            logger.info("submitted %d runs: job %s, name %s", len(chosen), submitted, array[0].array.name)
        return jobs

    def _submit_array(self, array: Sequence[SubmittedJob], job_overrides: Sequence[Sequence[str]], arrays: int) -> str:
        """Submit one of several job arrays; returns its job id."""
        from bitcycle.sweep.local import train_command

        timeouts = self.own["max_num_timeout"] if self.own["requeue"] else 0
        commands = [[sys.executable, *train_command(root_of(self.config), overrides)] for overrides in job_overrides]
        tasks = [
            SlurmJob(command, os.getcwd(), os.fspath(job.outcome_file), timeouts, self.own["signal_delay_s"])
            for job, command in zip(array, commands, strict=True)
        ]
        with _outside_of_jobs():
            executor = self.executor(array[0].array, arrays)
            try:
                return str(executor.submit_array(tasks)[0].job_id).partition("_")[0]
            except (RuntimeError, ValueError) as error:  # submitit's own kinds of error derive from these
                raise RunError(f"SLURM rejects the jobs: {str(error).strip()}") from error

    def executor(self, folder: Path, arrays: int) -> Any:
        """submitit's executor for one of several job arrays, with the parameters of this launcher.

        Raises:
            SettingError: for a parameter that hydra-submitit-launcher does not have.
        """
        theirs = require("hydra_plugins.hydra_submitit_launcher.config", "slurm")
        common, known = theirs.BaseQueueConf.__dataclass_fields__, theirs.SlurmQueueConf.__dataclass_fields__
        for key, value in self.parameters.items():
            if key not in known:
                problem, remedy = "is not a parameter of this launcher", nearest(key, [*known, *OWN])
                raise SettingError(f"hydra.launcher.{key}", value, problem, remedy)
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
            "slurm_srun_args": [*cpus, *["--kill-on-bad-exit=1"] * several],
            "slurm_additional_parameters": {
                ("requeue" if own["requeue"] else "no-requeue"): True,
                "signal": f"{WARNING.name.removeprefix('SIG')}@{own['signal_delay_s']}",
                **own["additional_parameters"],
            },
        }
        values = {key if key in common else f"slurm_{key}": value for key, value in self.parameters.items()}
        executor.update_parameters(**values | chosen)
        return executor


@contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Hide the variables of the job in which the sweep itself may run: sbatch and srun would read them as options."""
    hidden = {key: os.environ.pop(key) for key in list(os.environ) if key.startswith("SLURM_") and key != "SLURM_CONF"}
    try:
        yield
    finally:
        os.environ.update(hidden)
