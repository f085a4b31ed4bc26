"""Hydra's launcher of bitcycle for one machine: several runs side by side, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig


class LocalLauncher(BasicLauncher):
    """Runs the jobs of a sweep on this machine.

    Args:
        workers: how many at a time; None: as many as are useful.
        runs_per_gpu: how many share one GPU.
    """

    def __init__(self, workers: int | None = None, runs_per_gpu: int = 1) -> None:
        super().__init__()
        self.workers, self.runs_per_gpu = workers, runs_per_gpu

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run every job and return its exit code; for another sweeper than ours, its metric, one run after the other here."""
        import torch

        from bitcycle.sweep.local import LocalPool, starter, train_command, useful_workers

        assert self.config is not None
        if not self.config.hydra.sweeper._target_.startswith("hydra_plugins.bitcycle_plugins."):
            return super().launch(job_overrides, initial_job_idx)  # this process alone learns what the task returns
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        workers = min(self.workers or useful_workers(self.runs_per_gpu), len(job_overrides))
        commands = [train_command(root_of(self.config), overrides) for overrides in job_overrides]
        codes = LocalPool(workers, gpus, starter(gpus)).run(commands)
        return [returned(overrides, code) for overrides, code in zip(job_overrides, codes, strict=True)]


def root_of(config: DictConfig) -> Path:
    """The folder of `conf/`."""
    return Path(next(s.path for s in config.hydra.runtime.config_sources if s.provider == "main")).parent


def returned(overrides: Sequence[str], code: int) -> JobReturn:
    """What Hydra wants of a run that has ended with an exit code."""
    done: Any = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
    done.return_value = code
    return done
