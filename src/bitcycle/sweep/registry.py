"""The registry of sweeps: the contents of `sweeps/PAPER/ITEM.yaml`, and each distinct run with folder, hash and state.

All code that launches, counts or records runs uses it. As composing thousands of configurations takes half a minute,
`sweep_index` caches them in the user's cache until a file of the sweeps, the configuration or the code changes, or BITCYCLE_DATA.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import track
from yaml import YAMLError

from bitcycle.cache import cached
from bitcycle.configuration import SCALES, RunConfig
from bitcycle.files import RUNS, digest_of, resource_root
from bitcycle.settings import SettingError, nearest
from bitcycle.sweep.composition import composing
from bitcycle.sweep.grid import Overrides, command_line, distinct_settings, expand, substitute
from bitcycle.training.naming import run_path
from bitcycle.training.run_folder import RunFolder

STATES = ("done", "recorded", "running", "queued", "resumable", "failed", "missing", "waiting", "wrong")
FINISHED = ("done", "recorded")
"""States of runs that need no training."""
UNFINISHED = ("missing", "resumable", "failed")
"""States of runs that need training and that no other process trains."""
DATA = "BITCYCLE_DATA"
"""Environment variable with the default of `data_root`."""
Compose = Callable[[Overrides], RunConfig | str]
"""Settings of a run -> its validated configuration, or an error message."""


@dataclass(frozen=True)
class Sweep:
    """The runs of one item: the fields of a sweep file, which `sweeps/README.md` explains. Raises SettingError for an unknown
    scale and for fields of another form."""

    title: str = ""
    published: str = ""
    runs: int = 0
    hours: float = 0.0
    grids: list[Any] = field(default_factory=list)
    trials: dict[str, int] = field(default_factory=dict)
    at_scale: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    analyses: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        given: dict[str, Any] = {"grids": self.grids, "trials": self.trials, "at_scale": self.at_scale}
        for name, fits, remedy in (
            ("grids", _are_grids, "write a list of mappings: grids: [{model: [resnet8, resnet20]}]"),
            ("trials", _are_trials, "write a number of seeds per scale: trials: {paper: 3}"),
            ("at_scale", _are_replacements, "write a mapping per scale: at_scale: {smoke: {model: resnet8}}"),
        ):
            if not fits(given[name]):
                raise SettingError(name, given[name], "has the wrong form", remedy)
        for name, by_scale in {"trials": self.trials, "at_scale": self.at_scale}.items():
            for scale in by_scale:
                if scale not in SCALES:
                    raise SettingError(name, scale, "is not one of the scales", nearest(str(scale), SCALES))

    def combinations(self, scale: str, fixed: Mapping[str, str] | None = None) -> Iterator[tuple[Overrides, Overrides]]:
        """Each combination of the grids at paper scale, paired with its settings at `scale`; `fixed`, settings of the command
        line, override those of the sweep. Raises SettingError for an unknown scale."""
        if scale not in SCALES:
            raise SettingError("scale", scale, "is not one of the scales", nearest(scale, SCALES))
        fixed = dict(fixed or {})
        for run in expand(self.grids, fixed):
            replacements = {
                key: value
                for key, value in self.replacements(scale, run.get("dataset", "")).items()
                if key not in fixed
            }
            yield run, substitute(run, replacements)

    def expand(self, scale: str = "paper", fixed: Mapping[str, str] | None = None) -> list[Overrides]:
        """Every run at a scale; all runs with the first seed precede those with the second. See `combinations`. Weights of a
        run below results/runs that is not there are looked for below another `results_root`, if `fixed` names one."""
        cells = distinct_settings(run for _, run in self.combinations(scale, fixed))
        seeds = range(self.trials.get(scale, 1))  # a seed in a grid or on the command line overrides these
        every = ({**cell, "seed": cell.get("seed", str(seed))} for seed in seeds for cell in cells)
        root = (fixed or {}).get("results_root")
        if root:
            every = ({key: _below(root, value) for key, value in run.items()} for run in every)
        return distinct_settings(every)

    def replacements(self, scale: str, dataset: str = "") -> dict[str, Any]:
        """The replacements of a scale over those of its regime, which may depend on the paper's dataset; raises SettingError
        for an unknown regime."""
        own = dict(self.at_scale.get(scale) or {})
        regime = own.pop("regime", {})
        if isinstance(regime, dict):
            regime = regime.get(dataset, {})
        if isinstance(regime, dict):
            return {**regime, **own}
        regimes = _regimes()
        if regime not in regimes:
            raise SettingError("regime", regime, "is not in sweeps/regimes.yaml", nearest(regime, regimes))
        return {**regimes[regime], **own}


def _are_grids(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and all(isinstance(grid, Mapping) for grid in given)


def _are_trials(given: Any) -> bool:
    return isinstance(given, Mapping) and all(type(seeds) is int and seeds >= 0 for seeds in given.values())


def _are_replacements(given: Any) -> bool:
    return isinstance(given, Mapping) and all(own is None or isinstance(own, Mapping) for own in given.values())


def _below(root: str, value: str) -> str:
    """A path below results/runs that does not exist, below another folder of runs; any other value as it is.

    >>> _below("elsewhere", "results/runs/mini/a/seed=0"), _below("elsewhere", "CR")
    ('elsewhere/mini/a/seed=0', 'CR')
    """
    default = f"{RUNS.as_posix()}/"
    if not value.startswith(default) or Path(value).exists():
        return value
    return f"{root.rstrip('/')}/{value.removeprefix(default)}"


@cache
def _regimes() -> dict[str, Any]:
    found: Any = OmegaConf.to_container(OmegaConf.load(resource_root() / "sweeps" / "regimes.yaml"))
    return dict(found)


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file; raises SettingError if it is missing, not YAML, lacks `hydra.sweeper`, or has an unknown field or
    scale."""
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
        return Sweep(**content["hydra"]["sweeper"])
    except SettingError as error:
        raise error.within(str(path)) from None
    except (OSError, TypeError, KeyError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise SettingError("sweeps", path, str(error), "see sweeps/README.md for the form of a sweep") from error


def sweep_files(root: Path) -> dict[str, Path]:
    """PAPER/ITEM -> sweep file, for all sweeps of a repository; raises SettingError if there are none."""
    files = sorted((root / "sweeps").glob("*/*.yaml"))
    if not files or not (root / "conf").is_dir():
        raise SettingError("sweeps", root, "has no folders conf and sweeps", "run this in the repository's root folder")
    return {f"{file.parent.name}/{file.stem}": file for file in files}


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    overrides: Overrides
    path: str | None  # run folder; None if the configuration is invalid
    problem: str = ""  # why it is invalid
    config: RunConfig | None = field(default=None, compare=False, repr=False)
    waits_for: str = ""  # run folder whose weights it starts from, if that run is not finished
    elsewhere: str = ""  # queued or running in a cluster, or recorded in the summary, as from another machine

    @property
    def arguments(self) -> list[str]:
        """The run as arguments of train.py."""
        return command_line(self.overrides)

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        assert self.path is not None, "a wrong configuration has no folder"
        return RunFolder(Path(self.path))

    @property
    def key(self) -> tuple[str, str, str]:
        """Scale, hash (of all that the run computes, excluding the seed) and seed, from the run folder's path."""
        scale, name, seed = self.folder.path.parts[-3:]
        return scale, name.rpartition("-")[2], seed.partition("=")[2]

    @property
    def samples(self) -> int | None:
        """Number of training samples, steps times batch size; None if the run length is given in epochs."""
        if self.config is None or self.config.training.steps is None:
            return None
        return self.config.training.steps * self.config.training.batch_size

    @property
    def state(self) -> str:
        """The current state, one of `STATES`; resumable: has a checkpoint, and no process is training it."""
        if self.path is None:
            return "waiting" if self.waits_for else "wrong"
        folder = self.folder
        if folder.state() == "done":
            return "done"
        if self.elsewhere:
            return self.elsewhere
        if folder.is_in_use():
            return "running"
        if folder.read_status().get("state") == "failed":
            return "failed"
        return "resumable" if folder.checkpoint.exists() else "missing"

    @property
    def reason(self) -> str:
        """Why the configuration is invalid or the run failed; else empty."""
        if self.problem or self.state != "failed":
            return self.problem
        return str(self.folder.read_status().get("reason") or "")


def index_runs(runs: Iterable[Overrides], compose: Compose) -> list[SweepRun]:
    """The distinct runs of a sweep.

    Of runs that compute the same, such as static precision with different q_min, only the first is kept.
    """
    found: dict[str, SweepRun] = {}
    for run in runs:
        config, waits_for = compose(run), ""
        try:
            if isinstance(config, RunConfig):
                if run.get("seed", "").isdigit():
                    config = replace(config, seed=int(run["seed"]))
                path = str(run_path(config))
                found.setdefault(path, SweepRun(run, path, "", config))
                continue
        except SettingError as error:
            config = str(error)
            weights = Path(run.get(error.field, ""))  # of another run?
            if weights.name.startswith("seed=") and RunFolder(weights).state() != "done":
                waits_for = str(weights)
        found[str(run)] = SweepRun(run, None, config, waits_for=waits_for)
    return list(found.values())


def mark(runs: Iterable[SweepRun], chosen: Collection[str | None], state: str) -> list[SweepRun]:
    """The runs, those in the chosen run folders with the state queued or recorded."""
    return [replace(run, elsewhere=state) if run.path in chosen else run for run in runs]


def sweep_index(root: Path, scale: str, results_root: str = RUNS.as_posix()) -> dict[str, list[SweepRun]]:
    """PAPER/ITEM -> runs of every sweep file of a repository; raises SettingError for an unknown scale, or if there are none."""
    settings = {"scale": scale, "results_root": results_root}
    expanded = {name: read_sweep(file).expand(scale, settings) for name, file in sweep_files(root).items()}

    def compose_all() -> dict[str, RunConfig | str]:
        shown = track(list(expanded.values()), "composing sweeps", console=Console(stderr=True), transient=True)
        with composing(root / "conf") as compose:
            return {str(run): compose(run) for runs in shown for run in runs}

    data = os.environ.get(DATA)  # as data_root is resolved in what is kept
    identity = f"{expanded} {digest_of(sorted((root / 'conf').rglob('*.yaml')))} {data}"
    composed = cached("sweeps", identity, compose_all)
    return {name: index_runs(runs, lambda run: composed[str(run)]) for name, runs in expanded.items()}


def distinct(sweeps: Iterable[Sequence[SweepRun]]) -> list[SweepRun]:
    """The runs of several sweeps without duplicates; invalid runs are identified by their settings."""
    return list({run.path or str(run.overrides): run for runs in sweeps for run in runs}.values())
