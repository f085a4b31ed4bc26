"""The registry of sweeps and runs: what `sweeps/PAPER/ITEM.yaml` says, and every run of it once, with folder, hash and state.

Whatever launches, counts or records runs takes them from here. Composing thousands of configurations takes half a minute, so
`sweep_index` keeps them in the user's cache until a file of the sweeps, the configuration or the code changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from bitcycle.cache import remembered
from bitcycle.configuration import RunConfig
from bitcycle.resources import resource_root
from bitcycle.settings import SettingError, nearest
from bitcycle.sweep.composition import composing
from bitcycle.sweep.grid import Overrides, as_text, command_line, expand, substitute
from bitcycle.training.plan import locate
from bitcycle.training.run_folder import RunFolder

SCALES = ("paper", "mini", "smoke")
STATES = ("done", "recorded", "running", "queued", "resumable", "failed", "missing", "wrong")
FINISHED = ("done", "recorded")
"""States of runs that nobody has to train."""
Compose = Callable[[Overrides], RunConfig | str]
"""Settings of a run -> its validated configuration, or what is wrong with them."""


@dataclass(frozen=True)
class Sweep:
    """The runs of one item.

    Attributes:
        title: what it shows, in one line.
        published: the file of published numbers below results/published, without ending; empty if there is none.
        runs: number of trainings at paper scale, shared ones included, as the inventory of experiments states it.
        hours: estimated time of them all on one data-centre GPU, at paper scale.
        grids: see `grid.expand`.
        trials: scale -> number of seeds, from 0 on.
        at_scale: scale -> replacements, see `grid.substitute`; `regime: NAME` stands for those of sweeps/regimes.yaml,
            `leave_out: {setting: value}` drops the runs that have it, `seed: null` lets `trials` say the seeds.
        note: what is a stand-in, or an own choice where the paper is silent.
        analyses: what is computed of the finished runs, see `bitcycle.measurement.after_sweep`.
    """

    title: str = ""
    published: str = ""
    runs: int = 0
    hours: float = 0.0
    grids: list[Any] = field(default_factory=list)
    trials: dict[str, int] = field(default_factory=dict)
    at_scale: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    analyses: list[Any] = field(default_factory=list)

    def combinations(
        self, scale: str, fixed: Mapping[str, str] | None = None
    ) -> Iterator[tuple[Overrides, Overrides | None]]:
        """Each combination of the grids as it is written, beside its settings at a scale; None where it is left out.

        `fixed` are settings of the command line, which replace those of the sweep.

        Raises:
            SettingError: for a scale that does not exist, or a grid without values.
        """
        if scale not in SCALES:
            raise SettingError("scale", scale, "is not one of the scales", nearest(scale, SCALES))
        fixed = dict(fixed or {})
        replacements = {key: value for key, value in self.replacements(scale).items() if key not in fixed}
        left_out = replacements.pop("leave_out", {}).items()
        for run in expand(self.grids, fixed):
            is_left_out = any(run.get(key) == as_text(value) for key, value in left_out)
            yield run, None if is_left_out else substitute(run, replacements)

    def expand(self, scale: str = "paper", fixed: Mapping[str, str] | None = None) -> list[Overrides]:
        """Every run at a scale, the first seed of all of them before the second of any; see `combinations`."""
        cells: list[Overrides] = []
        for _, run in self.combinations(scale, fixed):
            if run is not None and run not in cells:
                cells.append(run)
        seeds = [
            str(seed) for seed in range(self.trials.get(scale, 1))
        ]  # the command line or a grid may have their own
        first = [cell if "seed" in cell else {**cell, "seed": seed} for seed in seeds[:1] for cell in cells]
        return first + [{**cell, "seed": seed} for seed in seeds[1:] for cell in cells if "seed" not in cell]

    def replacements(self, scale: str) -> dict[str, Any]:
        """Those of a scale, where a regime that they name is spelled out; what stands beside it goes before it.

        Raises:
            SettingError: for a regime that `sweeps/regimes.yaml` does not have.
        """
        own = dict(self.at_scale.get(scale) or {})
        name = own.pop("regime", None)
        if name is None:
            return own
        regimes: Any = OmegaConf.to_container(OmegaConf.load(resource_root() / "sweeps" / "regimes.yaml"))
        if name not in regimes:
            raise SettingError("regime", name, "is not in sweeps/regimes.yaml", nearest(name, regimes))
        return {**regimes[name], **own}


def read_sweep(path: Path) -> Sweep:
    """The sweep in a file of `sweeps/`.

    Raises:
        SettingError: for a file that is missing, no YAML, without `hydra.sweeper`, or with a field that no sweep has.
    """
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
        return Sweep(**content["hydra"]["sweeper"])
    except (OSError, TypeError, KeyError, YAMLError, OmegaConfBaseException) as error:
        raise SettingError("sweeps", path, str(error), "see sweeps/README.md for the form of a sweep") from error


def sweep_files(root: Path) -> dict[str, Path]:
    """PAPER/ITEM -> its file, of all sweeps below a repository.

    Raises:
        SettingError: where there are none.
    """
    files = sorted((root / "sweeps").glob("*/*.yaml"))
    if not files or not (root / "conf").is_dir():
        raise SettingError("sweeps", root, "has no folders conf and sweeps", "start this in the repository's root")
    return {f"{file.parent.name}/{file.stem}": file for file in files}


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        overrides: its settings, as on the command line.
        path: its run folder; None if the configuration is wrong.
        problem: what is wrong with it.
        config: the configuration.
        elsewhere: queued where a cluster has it in its queue, recorded where its results are, as of another machine.
    """

    overrides: Overrides
    path: str | None
    problem: str = ""
    config: RunConfig | None = field(default=None, compare=False, repr=False)
    elsewhere: str = ""

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
        """Scale, hash (what the run computes, seeds apart) and seed, as the path of the run folder says them."""
        scale, name, seed = self.folder.path.parts[-3:]
        return scale, name.rpartition("-")[2], seed.partition("=")[2]

    @property
    def samples(self) -> int | None:
        """Training samples of its steps; None where its length is given in epochs."""
        if self.config is None or self.config.training.steps is None:
            return None
        return self.config.training.steps * self.config.training.batch_size

    @property
    def state(self) -> str:
        """One of `STATES`, as it is now; resumable: begun, and nobody goes on with it."""
        if self.path is None:
            return "wrong"
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
        """What is wrong with it, or why it failed last time; empty if it did not."""
        return self.problem or str((self.state == "failed" and self.folder.read_status().get("reason")) or "")


SweepIndex = dict[str, list[SweepRun]]
"""PAPER/ITEM -> its runs, each once."""


def index_runs(runs: Iterable[Overrides], compose: Compose) -> list[SweepRun]:
    """Every run of a sweep once, from its settings.

    Runs that compute the same (static precision whatever q_min, say) are one; the first stands for all.
    """
    found: dict[str, SweepRun] = {}
    for run in runs:
        config = compose(run)
        try:
            if isinstance(config, RunConfig):
                if run.get("seed", "").isdigit():
                    config = replace(config, seed=int(run["seed"]))
                path = str(locate(config).path)
                found.setdefault(path, SweepRun(run, path, "", config))
                continue
        except SettingError as error:
            config = str(error)
        found[str(run)] = SweepRun(run, None, config)
    return list(found.values())


def mark(runs: Iterable[SweepRun], chosen: Collection[str | None], state: str) -> list[SweepRun]:
    """The runs, where those in some run folders are queued, or recorded."""
    return [replace(run, elsewhere=state) if run.path in chosen else run for run in runs]


def sweep_index(
    root: Path, scale: str, results_root: str = "results/runs", watch: Callable[..., Any] = iter
) -> SweepIndex:
    """The runs of every sweep file below a repository; `watch` goes through them while they are composed, and may show how far.

    Raises:
        SettingError: for an unknown scale, or where there are no sweep files.
    """
    settings = {"scale": scale, "results_root": results_root}
    expanded = {name: read_sweep(file).expand(scale, settings) for name, file in sweep_files(root).items()}

    def compose_all() -> dict[str, RunConfig | str]:
        with composing(root / "conf") as compose:
            return {str(run): compose(run) for runs in watch(list(expanded.values())) for run in runs}

    digest = hashlib.sha256(str(expanded).encode())
    for file in sorted((root / "conf").rglob("*.yaml")):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    composed = remembered("sweeps", digest.hexdigest(), compose_all)
    return {name: index_runs(runs, lambda run: composed[str(run)]) for name, runs in expanded.items()}


def distinct(sweeps: Iterable[Sequence[SweepRun]]) -> list[SweepRun]:
    """The runs of several sweeps, those that they share once; wrong ones by their settings."""
    return list({run.path or str(run.overrides): run for runs in sweeps for run in runs}.values())
