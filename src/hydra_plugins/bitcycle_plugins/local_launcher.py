"""Hydra launcher for this machine: parallel runs, each in a separate process."""

from collections.abc import Sequence
from pathlib import Path

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from omegaconf import DictConfig

from bitcycle.settings import SettingError


class LocalLauncher(BasicLauncher):
    """Runs the jobs of a sweep on this machine, as many in parallel as `bitcycle.sweep.local.useful_workers` says if `workers`
    is None: those of other sweepers, which need their metrics, one after the other."""

    waits_for_others = True
    """Runs that another process is training may be launched, too; other launchers are not given them."""

    def __init__(self, workers: int | None = None, runs_per_gpu: int = 1) -> None:
        super().__init__()
        self.workers, self.runs_per_gpu = workers, runs_per_gpu

    def queued(self, folders: Sequence[Path]) -> set[Path]:
        """The run folders whose runs wait in a queue: none."""
        return set()

    def launch_into(self, job_overrides: Sequence[Sequence[str]], folders: Sequence[Path]) -> list[int]:
        """Run every job in parallel and return the exit codes; what another process is training is waited for."""
        from bitcycle.sweep.local import LocalPool, train_command
        from bitcycle.training.run_folder import RunFolder

        for name, number in {"workers": self.workers, "runs_per_gpu": self.runs_per_gpu}.items():
            if number is not None and not (isinstance(number, int) and number > 0):
                raise SettingError(f"hydra.launcher.{name}", number, "is not a number of runs", "use 1 or more")
        assert self.config is not None, "the launcher has not been set up"
        chosen = [dict(word.split("=", 1) for word in words if "=" in word) for words in job_overrides]
        devices = {words.get("training.device", str(self.config.training.device)) for words in chosen}
        pool = LocalPool.on(devices, len(job_overrides), self.workers, self.runs_per_gpu)
        commands = [train_command(root_of(self.config), words) for words in job_overrides]
        runs = [RunFolder(folder) for folder in folders]
        return pool.run(commands, lambda n: runs[n].is_in_use(), lambda n: runs[n].state() == "done")


def root_of(config: DictConfig | None) -> Path:
    """The parent folder of `conf/`."""
    assert config is not None, "the launcher has not been set up"
    return Path(next(s.path for s in config.hydra.runtime.config_sources if s.provider == "main")).parent
