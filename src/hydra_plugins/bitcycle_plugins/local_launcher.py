"""Hydra launcher for this machine: parallel runs, each in a separate process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig


class LocalLauncher(BasicLauncher):
    """Runs the jobs of a sweep on this machine.

    Args:
        workers: number of parallel runs; None: see `bitcycle.sweep.local.useful_workers`.
        runs_per_gpu: number of runs that share a GPU.
    """

    def __init__(self, workers: int | None = None, runs_per_gpu: int = 1) -> None:
        super().__init__()
        self.workers, self.runs_per_gpu = workers, runs_per_gpu

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run every job and return its exit code; for other sweepers, run sequentially and return the metric."""
        import torch

        from bitcycle.sweep.local import LocalPool, starter, train_command, useful_workers

        assert self.config is not None
        if not self.config.hydra.sweeper._target_.startswith("hydra_plugins.bitcycle_plugins."):
            return super().launch(job_overrides, initial_job_idx)  # in this process, which receives the return values
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        workers = min(self.workers or useful_workers(self.runs_per_gpu), len(job_overrides))
        commands = [train_command(root_of(self.config), overrides) for overrides in job_overrides]
        codes = LocalPool(workers, gpus, starter(gpus)).run(commands)
        return [returned(overrides, code) for overrides, code in zip(job_overrides, codes, strict=True)]


def root_of(config: DictConfig) -> Path:
    """The parent folder of `conf/`."""
    return Path(next(s.path for s in config.hydra.runtime.config_sources if s.provider == "main")).parent


def returned(overrides: Sequence[str], code: int) -> JobReturn:
    """Hydra's job result for an exit code."""
    done: Any = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
    done.return_value = code
    return done
