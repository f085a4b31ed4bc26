"""The runs of every sweep file at a scale: how each is started, where it lies, and its state.

Composing thousands of configurations takes a minute; where the runs lie follows from files alone, so it is kept beside them
and used as long as no file of the sweeps, the configuration or the code has changed. Runs that begin from files of weights are
named by what these hold, and composed each time.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

import bitcycle
from bitcycle.configuration import GROUPS, RunConfig, read_config, register_schemas
from bitcycle.settings import SettingError
from bitcycle.sweep.composition import Composer
from bitcycle.sweep.grid import Overrides, command_line
from bitcycle.sweep.inventory import SweepRun, state_of, take_stock
from bitcycle.sweep.item import Sweep, read_sweep
from bitcycle.training.run_folder import RunFolder, read_object, write_json

CONTENT = {
    f"{group}.{field.name}"
    for group, options in GROUPS.items()
    for kind in options.values()
    for field in dataclasses.fields(kind)
    if field.metadata.get("content")
}
"""Settings that name a file of weights."""


@dataclass(frozen=True)
class PlannedRun:
    """A run of a sweep.

    Attributes:
        arguments: of train.py.
        path: its run folder; None if the configuration is wrong.
        problem: what is wrong with it.
        samples: training samples of its steps; None where its length is given in epochs.
    """

    arguments: tuple[str, ...]
    path: Optional[str]
    problem: str = ""
    samples: Optional[int] = None

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        assert self.path is not None, "a wrong configuration has no folder"
        return RunFolder(Path(self.path))

    @property
    def state(self) -> str:
        """One of `inventory.STATES`, as it is now."""
        return "wrong" if self.path is None else state_of(self.folder)[1]


Stock = dict[str, list[PlannedRun]]
"""PAPER/ITEM -> its runs, each once."""


def stock_of_all(root: Path, scale: str, results_root: str = "results/runs", watch: Callable[..., Any] = iter) -> Stock:
    """The runs of every sweep file.

    Args:
        root: folder of `conf` and `sweeps`.
        scale: paper, mini or smoke.
        results_root: folder of the run folders.
        watch: goes through the sweep files and may show how far it is.

    Raises:
        SettingError: for an unknown scale, or where there are no sweep files.
    """
    files = sorted((root / "sweeps").glob("*/*.yaml"))
    if not files or not (root / "conf").is_dir():
        raise SettingError("sweeps", root, "has no folders conf and sweeps", "start this in the repository's root")
    cache = Path(results_root) / scale / ".sweeps.json"
    version = _version(root)
    kept = read_object(cache)
    known: dict[str, Any] = kept.get("sweeps", {}) if kept.get("version") == version else {}
    stock: Stock = {}
    register_schemas()
    with initialize_config_dir(str((root / "conf").absolute()), version_base="1.3"):
        composer = Composer(lambda arguments: compose("config", overrides=arguments))
        for file in watch(files):
            name = f"{file.parent.name}/{file.stem}"
            if name in known:
                stock[name] = [
                    PlannedRun(tuple(arguments), path, samples=samples) for arguments, path, samples in known[name]
                ]
            else:
                stock[name] = _planned(read_sweep(file), scale, results_root, composer)
    lasting = {name: runs for name, runs in stock.items() if not any(map(_may_move, runs))}
    if lasting.keys() != known.keys() and cache.parent.is_dir():
        plain = {name: [(run.arguments, run.path, run.samples) for run in runs] for name, runs in lasting.items()}
        write_json(cache, {"version": version, "sweeps": plain})
    return stock


def distinct(stock: Stock) -> list[PlannedRun]:
    """All runs, those that several sweeps share once; wrong ones by their arguments."""
    return list({run.path or str(run.arguments): run for runs in stock.values() for run in runs}.values())


def _planned(sweep: Sweep, scale: str, results_root: str, composer: Composer) -> list[PlannedRun]:
    return planned_runs(sweep.expand(scale, {"scale": scale, "results_root": results_root}), composer)


def planned_runs(runs: Iterable[Overrides], composer: Composer) -> list[PlannedRun]:
    """Each of some runs once, composed and located."""

    def composed(run: Overrides) -> RunConfig | str:
        try:
            return read_config(composer(run))
        except (SettingError, HydraException, OmegaConfBaseException) as error:
            return str(error)

    return [_plan_of(run) for run in take_stock(runs, composed)]


def _plan_of(run: SweepRun) -> PlannedRun:
    arguments = tuple(command_line(run.overrides))
    if run.config is None:
        return PlannedRun(arguments, None, run.problem)
    steps, batch_size = run.config.training.steps, run.config.training.batch_size
    return PlannedRun(arguments, str(run.folder.path), samples=steps and steps * batch_size)


def _may_move(run: PlannedRun) -> bool:
    """Whether a run can get another folder without a change of any file of sweeps, configuration and code."""
    return run.path is None or any(argument.partition("=")[0] in CONTENT for argument in run.arguments)


def _version(root: Path) -> str:
    """A digest of every file that decides where runs lie."""
    digest = hashlib.sha256()
    code = Path(bitcycle.__file__).parent
    for path in _files(root / "conf", "*.yaml"), _files(root / "sweeps", "*.yaml"), _files(code, "*.py"):
        for file in path:
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _files(folder: Path, pattern: str) -> Iterable[Path]:
    return sorted(folder.rglob(pattern))
