"""Hydra sweeper: expands a list of grids instead of a single product, and launches only the missing runs."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from bitcycle.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_WRONG_CONFIGURATION
from bitcycle.presets import add_sources
from bitcycle.settings import SettingError
from bitcycle.sweep.grid import expand

if TYPE_CHECKING:
    from bitcycle.sweep.registry import SweepRun

GROUP = "sweeps"
"""Config group of the sweep files; its choice is not a setting of a run."""
NEUTRAL = {"scale", "seed", "dry_run", "results_root", "data_root"}
"""Command-line settings with which a sweep's runs still belong to its item."""


@runtime_checkable
class RunLauncher(Protocol):
    """A launcher that knows runs by their folders and returns exit codes, as ours do."""

    def queued(self, folders: Sequence[Path]) -> set[Path]:
        """The run folders whose runs are in a queue that outlives the sweep's process."""

    def launch_into(self, job_overrides: Sequence[Sequence[str]], folders: Sequence[Path]) -> list[int]:
        """Launch the runs that are not queued, and wait for all; returns their exit codes."""


class GridSweeper(Sweeper):
    """Expands the grids of a sweep file and of the command line, and passes the missing runs to the launcher."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields  # of `bitcycle.sweep.registry.Sweep`

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from bitcycle.sweep.composition import Composer, without_hydra

        add_sources(config.hydra.runtime.config_sources)
        self.loader = hydra_context.config_loader
        composer = Composer(lambda arguments: without_hydra(self.loader.load_sweep_config(config, arguments)))
        self.compose = composer.checked
        self.runner: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """List all runs, launch the missing ones, and raise SweepEnded with the worst exit code, as Hydra would discard a return
        value. Raises SettingError for several sweeps, or if the sweep was started in several processes."""
        from bitcycle.sweep.execution import SweepEnded, worst
        from bitcycle.sweep.registry import Sweep
        from bitcycle.training.processes import process_variables

        if variables := process_variables(os.environ):
            problem = "only a single run can use several processes; a sweep starts its own processes"
            remedy = "omit torchrun and srun; on a cluster, hydra.launcher.gpus_per_node sets the processes per run"
            raise SettingError("WORLD_SIZE", variables["WORLD_SIZE"], problem, remedy)

        sweep = Sweep(**self.fields)
        overrides = OverridesParser.create(config_loader=self.loader).parse_overrides(arguments)
        for override in overrides:
            if override.key_or_group == GROUP and override.is_sweep_override():
                chosen = ",".join(override.sweep_string_iterator())
                raise SettingError(f"+{GROUP}", chosen, "is several sweeps", "give a command for each")
        fixed, swept = _settings(overrides)
        wanted = [run for extra in expand([swept], fixed) for run in sweep.expand(extra.get("scale", "paper"), extra)]
        names = [str(override.value()) for override in overrides if override.key_or_group == GROUP]
        # runs with other settings belong to no cell of the item
        item = names[0] if names and not swept and set(fixed) <= NEUTRAL else ""
        codes, located = self._train(wanted, sweep.title, names, fixed, item)
        if fixed.get("dry_run", "false").lower() == "false":
            _show("".join(names[:1]), located)
        raise SweepEnded(worst(codes))

    def _train(
        self, wanted: Sequence[dict[str, str]], title: str, names: Sequence[str], fixed: Mapping[str, str], item: str
    ) -> "tuple[list[int], list[SweepRun]]":
        """Launch the missing runs, then those that waited for weights that these trained; returns the exit codes and the
        runs that have a folder, and records these in the manifest of `item`."""
        from bitcycle.door import reproduction
        from bitcycle.sweep.execution import plans_of, report
        from bitcycle.sweep.registry import index_runs, mark
        from bitcycle.training.run_folder import RunFolder

        dry_run = fixed.get("dry_run", "false").lower()  # Hydra says True
        codes: list[int] = []
        skipped: list[int] = []
        located: list[SweepRun] = []
        while True:
            runs = index_runs(wanted, self.compose)
            if isinstance(self.runner, RunLauncher):
                unfinished = [run.folder.path for run in runs if run.path and run.state != "done"]
                runs = mark(runs, {str(path) for path in self.runner.queued(unfinished)}, "queued")
            plans = plans_of(runs) if dry_run != "false" else {}
            waits = getattr(self.runner, "waits_for_others", False)
            missing = report(runs, title, dry_run, waits, plans)
            codes += [plan.code for plan in plans.values()]
            if not waits and dry_run == "false":
                skipped += [EXIT_INTERRUPTED for run in runs if run.state == "running"]  # has to be run again
            located += (ready := [run for run in runs if run.path is not None])
            if item and dry_run == "false" and (manifest := reproduction("manifest")) is not None:
                hashes = [run.key[1] for run in ready]
                manifest.record_launch(item, fixed.get("scale", "paper"), hashes, self.compose, Path.cwd())
            codes += self._launch(missing, names, fixed) if missing and dry_run == "false" else []
            left = [run for run in runs if run.path is None]
            freed = [run for run in left if run.waits_for and RunFolder(Path(run.waits_for)).state() == "done"]
            if not freed or EXIT_INTERRUPTED in codes:
                return codes + skipped + [EXIT_WRONG_CONFIGURATION] * len(left), located
            codes += [EXIT_WRONG_CONFIGURATION] * (len(left) - len(freed))
            wanted = [run.overrides for run in freed]

    def _launch(self, runs: "Sequence[SweepRun]", names: Sequence[str], fixed: Mapping[str, str]) -> list[int]:
        """The exit codes of runs; in Weights & Biases the name of the sweep file is their group."""
        grouped = fixed.get("logging.wandb", "disabled") != "disabled" and "logging.group" not in fixed
        group = [f"logging.group={name}" for name in names[:1] if grouped]
        arguments = [[*run.arguments, *group] for run in runs]
        if isinstance(self.runner, RunLauncher):
            return self.runner.launch_into(arguments, [run.folder.path for run in runs])
        return [_exit_code(job) for job in self.runner.launch(arguments, initial_job_idx=0)]


def _show(name: str, runs: "Sequence[SweepRun]") -> None:
    """The tables of a paper, if `name` is one of its sweeps; else a plain table of the runs."""
    from bitcycle.door import reproduction
    from bitcycle.optional_imports import explain_missing
    from bitcycle.sweep.table import finished_runs, show_runs

    finished = finished_runs(runs)
    try:
        papers = reproduction("figure.table") if name else None
    except ModuleNotFoundError as error:
        print(f"no published numbers beside the results: {explain_missing(error) or error}", file=sys.stderr)
        papers = None
    if papers is None or not papers.show_sweep(name, finished):
        show_runs(finished)


def _exit_code(job: JobReturn) -> int:
    """The exit code of a run of one of Hydra's own launchers, which return a metric or raise an exception."""
    from bitcycle.guard import JobFailed

    try:
        _ = job.return_value
    except JobFailed as failure:
        return failure.code
    return EXIT_DONE


def _settings(overrides: Sequence[Override]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The settings with one value on the command line, and those that the command line sweeps over."""
    wanted = [override for override in overrides if override.key_or_group != GROUP]
    fixed = {_key(o): _value(o) for o in wanted if not o.is_sweep_override()}
    return fixed, {_key(o): list(o.sweep_string_iterator()) for o in wanted if o.is_sweep_override()}


def _key(override: Override) -> str:
    """The name of a setting, without the ++ that changes nothing for one that exists; ++a.b.c may add to a mapping."""
    key: str = override.get_key_element()
    return key.removeprefix("++") if key.count(".") < 2 else key


def _value(override: Override) -> str:
    """A value as it is written, but a folder without its quotes, as paths below it are formed."""
    return str(override.value() if _key(override) == "results_root" else override.get_value_element_as_str())
