"""Hydra's launcher of bitcycle for SLURM clusters: one job of an array for each run, built on hydra-submitit-launcher.

Its parameters are those of hydra-submitit-launcher and submitit submits. Waiting is ours, as theirs asks sacct, which not every
cluster has, and loses the results of all runs when one fails; so is what a job does when it is stopped, see `slurm_job`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.bitcycle_plugins.local_launcher import returned, root_of
from hydra_plugins.bitcycle_plugins.slurm_job import WARNING, SlurmJob

if TYPE_CHECKING:
    from bitcycle.sweep.slurm_record import SubmittedJob

logger = logging.getLogger("bitcycle.sweep.slurm")

OWN = ("name", "array_size", "array_parallelism", "requeue", "max_num_timeout", "poll_seconds", "additional_parameters")
"""Parameters that are not handed to submitit as they are."""


class SlurmLauncher(Launcher):
    """Submits the runs of a sweep to SLURM and waits for them; `conf/hydra/launcher/slurm.yaml` explains the parameters.

    Args:
        name: beginning of the name of the jobs.
        array_size: jobs in an array at most; None: what the cluster allows.
        array_parallelism: jobs that run at the same time at most.
        requeue: whether a stopped job is to go on.
        max_num_timeout: how many times a job goes on after its time limit.
        poll_seconds: how often SLURM is asked.
        additional_parameters: further options of sbatch.
        submitit: parameters of hydra-submitit-launcher.
    """

    def __init__(
        self,
        name: str = "bitcycle",
        array_size: int | None = None,
        array_parallelism: int = 256,
        requeue: bool = True,
        max_num_timeout: int = 100,
        poll_seconds: float = 15.0,
        additional_parameters: Mapping[str, Any] | None = None,
        **submitit: Any,
    ) -> None:
        self.name, self.array_size, self.array_parallelism = name, array_size, array_parallelism
        self.requeue, self.max_num_timeout, self.poll_seconds = requeue, max_num_timeout, poll_seconds
        self.additional_parameters = dict(_plain(additional_parameters) or {})
        self.parameters = {key: _plain(value) for key, value in submitit.items()}
        self.config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.config = hydra_context, config

    @property
    def results_root(self) -> Path:
        """Where the records of the jobs are kept, below .slurm."""
        assert self.config is not None
        return Path(self.config.results_root)

    def queued(self, folders: Sequence[Path]) -> set[Path]:
        """Those of some run folders whose job SLURM runs or will run.

        Raises:
            RunError: if some were submitted, and SLURM does not say what became of them.
        """
        return {folder for folder in folders if folder.absolute() in self._in_queue(folders)}

    def _in_queue(self, folders: Sequence[Path]) -> dict[Path, SubmittedJob]:
        from bitcycle.sweep.slurm_queue import read_queue
        from bitcycle.sweep.slurm_record import jobs_in_queue, open_jobs

        jobs = open_jobs(self.results_root, folders)
        return jobs_in_queue(jobs, read_queue()) if jobs else {}

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run every job and return its metric, as sweepers want it that optimize; ours uses `launch_into`."""
        folders = [self._folder(overrides) for overrides in job_overrides]
        return [self._measured(job, folder) for job, folder in zip(self.launch_into(job_overrides, folders), folders)]

    def _measured(self, job: JobReturn, folder: Path) -> JobReturn:
        from bitcycle.command import JobFailed, objective
        from bitcycle.training.run_folder import RunFolder

        assert self.config is not None
        if code := job.return_value:
            job.status, job.return_value = JobStatus.FAILED, JobFailed(code)
        else:
            summary = RunFolder(folder).read_summary()
            found = [objective(summary, name) for name in self.config.logging.objective]
            job.return_value = found[0] if len(found) == 1 else found
        return job

    def _folder(self, overrides: Sequence[str]) -> Path:
        from bitcycle.configuration import read_config
        from bitcycle.training.plan import locate

        assert self.config is not None
        composed = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        OmegaConf.set_readonly(composed, False)
        OmegaConf.set_struct(composed, False)
        composed.pop("hydra")
        return locate(read_config(composed)).path

    def launch_into(self, job_overrides: Sequence[Sequence[str]], folders: Sequence[Path]) -> Sequence[JobReturn]:
        """Submit every run whose job is not in the queue yet, wait for all, and return their exit codes.

        Args:
            job_overrides: the arguments of each run.
            folders: its run folder.

        Raises:
            RunError: if SLURM does not answer or refuses all of them.
        """
        from bitcycle.sweep.slurm import StopWaiting, Waiter, wait_for_jobs
        from bitcycle.sweep.slurm_queue import read_queue

        with StopWaiting().active() as stop:
            present = self._in_queue(folders)
            jobs = {i: present[folder.absolute()] for i, folder in enumerate(folders) if folder.absolute() in present}
            if jobs:
                logger.info("%d runs are in SLURM already: waiting for them", len(jobs))
            absent = [i for i in range(len(folders)) if i not in jobs]
            if absent:
                jobs |= self._submit(absent, job_overrides, folders, stop)
            waiter = Waiter(jobs, read_queue, self.poll_seconds)
            codes = wait_for_jobs(waiter, stop, job_overrides)
        return [returned(overrides, code) for overrides, code in zip(job_overrides, codes, strict=True)]

    def _submit(
        self, numbers: Sequence[int], job_overrides: Sequence[Sequence[str]], folders: Sequence[Path], stop: Any
    ) -> dict[int, SubmittedJob]:
        """Submit runs as arrays, as long as SLURM takes them; those that it did not take are not in the result."""
        from bitcycle.errors import RunError
        from bitcycle.sweep.slurm_queue import largest_array
        from bitcycle.sweep.slurm_record import new_array, split

        largest = min(self.array_size or sys.maxsize, largest_array())
        parts = split(len(numbers), largest)
        jobs: dict[int, SubmittedJob] = {}
        for part in parts:
            chosen = [numbers[position] for position in part]
            if stop.received:
                break
            try:
                with new_array(self.results_root, [folders[number] for number in chosen], self.name) as array:
                    ids = self._submit_array(array, [job_overrides[number] for number in chosen], len(parts))
            except RunError as error:
                if not jobs:
                    raise
                logger.error(
                    "%d runs are not submitted: %s. Run the same command again later", len(numbers) - part.start, error
                )
                break
            jobs |= dict(zip(chosen, array, strict=True))
            logger.info("submitted %d runs: job %s, name %s", len(chosen), ids, array[0].array.name)
        return jobs

    def _submit_array(self, array: Sequence[SubmittedJob], job_overrides: Sequence[Sequence[str]], arrays: int) -> str:
        """Submit one array; returns its number."""
        from bitcycle.errors import RunError
        from bitcycle.sweep.local import train_command

        assert self.config is not None
        tasks = [
            SlurmJob(
                [sys.executable, *train_command(root_of(self.config), overrides)],
                folder=os.getcwd(),
                outcome=os.fspath(job.outcome_file),
                max_timeouts=self.max_num_timeout if self.requeue else 0,
                warning_seconds=float(self.parameters.get("signal_delay_s", 120)),
            )
            for job, overrides in zip(array, job_overrides, strict=True)
        ]
        with _outside_of_jobs():
            executor = self.executor(array[0].array, arrays)
            try:
                return str(executor.submit_array(tasks)[0].job_id).partition("_")[0]
            except (RuntimeError, ValueError) as error:  # submitit's own kinds of error derive from these
                raise RunError(f"SLURM takes no jobs: {str(error).strip()}") from error

    def executor(self, folder: Path, arrays: int) -> Any:
        """What submits an array: submitit with the parameters of this launcher.

        Raises:
            SettingError: for a parameter that hydra-submitit-launcher does not have.
        """
        from bitcycle.optional_imports import require
        from bitcycle.settings import SettingError, nearest

        theirs = require("hydra_plugins.hydra_submitit_launcher.config", "slurm")
        submitit = require("submitit", "slurm")
        common, known = theirs.BaseQueueConf.__dataclass_fields__, theirs.SlurmQueueConf.__dataclass_fields__
        for key in self.parameters:
            if key not in known:
                raise SettingError(
                    f"hydra.launcher.{key}", self.parameters[key], "nobody reads this", nearest(key, [*known, *OWN])
                )
        executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
        parameters = {key if key in common else f"slurm_{key}": value for key, value in self.parameters.items()}
        cpus, tasks = self.parameters.get("cpus_per_task"), self.tasks_per_node
        several = tasks * int(self.parameters.get("nodes") or 1) > 1
        executor.update_parameters(
            **{key: value for key, value in parameters.items() if value is not None and value != []}
            | {
                "name": folder.name,
                "stderr_to_stdout": True,
                "tasks_per_node": tasks,
                "slurm_array_parallelism": max(1, self.array_parallelism // arrays),
                "slurm_srun_args": [
                    *([f"--cpus-per-task={cpus}"] if cpus else []),  # not inherited from sbatch since SLURM 22.05
                    *(["--kill-on-bad-exit=1"] if several else []),  # the others would wait for the one that failed
                ],
                "slurm_additional_parameters": self._sbatch_options(),
            }
        )
        return executor

    @property
    def tasks_per_node(self) -> int:
        """Processes of a run on each machine: one for each GPU, unless said otherwise."""
        given = self.parameters.get("tasks_per_node")
        return int(given or self.parameters.get("gpus_per_node") or 1)

    def _sbatch_options(self) -> dict[str, Any]:
        delay = self.parameters.get("signal_delay_s", 120)
        return {
            ("requeue" if self.requeue else "no-requeue"): True,
            "signal": f"{WARNING.name.removeprefix('SIG')}@{delay}",
            **self.additional_parameters,
        }


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


@contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Hide the variables of the job in which the sweep itself may run: sbatch and srun would take them for options."""
    hidden = {key: os.environ.pop(key) for key in list(os.environ) if key.startswith("SLURM_") and key != "SLURM_CONF"}
    try:
        yield
    finally:
        os.environ.update(hidden)
