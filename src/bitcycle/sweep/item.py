"""The sweep of one figure or table: what `sweeps/PAPER/ITEM.yaml` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from bitcycle.resources import resource_root
from bitcycle.settings import SettingError, nearest
from bitcycle.sweep.grid import Overrides, as_text, expand, substitute

SCALES = ("paper", "mini", "smoke")


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

    def expand(self, scale: str = "paper", fixed: Mapping[str, str] | None = None) -> list[Overrides]:
        """Every run at a scale, the first seed of all of them before the second of any.

        Args:
            scale: paper, mini or smoke.
            fixed: settings of the command line, which replace those of the sweep.

        Raises:
            SettingError: for a scale that does not exist, or a grid without values.
        """
        if scale not in SCALES:
            raise SettingError("scale", scale, "is not one of the scales", nearest(scale, SCALES))
        fixed = dict(fixed or {})
        replacements = {k: v for k, v in with_regime(self.at_scale.get(scale) or {}).items() if k not in fixed}
        left_out = replacements.pop("leave_out", {}).items()
        cells: list[Overrides] = []
        for run in expand(self.grids, fixed):
            if any(run.get(key) == as_text(value) for key, value in left_out):
                continue
            run = substitute(run, replacements)
            if run not in cells:
                cells.append(run)
        return list(self._with_seeds(cells, self.trials.get(scale, 1), fixed))

    def _with_seeds(self, cells: list[Overrides], trials: int, fixed: Mapping[str, str]) -> Iterator[Overrides]:
        for seed in range(1 if "seed" in fixed else trials):
            for cell in cells:
                if "seed" in cell:  # the grid has seeds of its own
                    if seed == 0:
                        yield cell
                else:
                    yield {**cell, "seed": str(seed)}


def with_regime(replacements: Mapping[str, Any]) -> dict[str, Any]:
    """The replacements, where a regime that they name is spelled out; what stands beside it goes before it.

    Raises:
        SettingError: for a regime that `sweeps/regimes.yaml` does not have.
    """
    own = dict(replacements)
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
