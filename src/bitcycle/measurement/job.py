"""Analyses of finished networks, unit by unit: each finished unit is stored, so that the same command goes on where it was.

The result is a CSV file below `analyses/` in the run folder, its first line `# {...}`: what was computed, of which runs, with
which options and versions, and how many units are done. It has no dates: equal analyses are equal files, interrupted or not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.progress import track

from bitcycle.errors import RunError
from bitcycle.measurement.artifacts import Result, Row, read_result, write_result
from bitcycle.measurement.finished_run import FinishedRun, load_run
from bitcycle.settings import Settings
from bitcycle.training.environment import describe_environment
from bitcycle.training.run import set_up_torch
from bitcycle.training.run_folder import RunFolder

IDENTITY = ("scale", "hash", "seed")
"""What names a run in its summary and in runs.csv."""


class Analysis:
    """An analysis that is ready to compute.

    Attributes:
        columns: of its rows.
        units: how many units it has; each is computed, and stored, as one.
        facts: what holds for all rows, as plain values.
    """

    columns: tuple[str, ...]
    units: int
    facts: dict[str, Any]

    def rows(self, unit: int) -> list[Row]:
        """The rows of a unit; depends on nothing but its number."""
        raise NotImplementedError


@dataclass
class AnalysisOptions(Settings):
    """Options of a kind of analysis; every one of them can change its numbers."""

    kind: ClassVar[str]
    networks: ClassVar[int] = 1
    """How many networks it is an analysis of."""

    def prepare(self, runs: Sequence[FinishedRun], device: torch.device) -> Analysis:
        """The analysis of some networks, which it may change, on a device.

        Raises:
            RunError: for networks that it cannot analyse.
            DataError: if data are missing.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Network:
    """A trained network: a run folder, and the phase at whose end it stood; None: at the end of the run."""

    folder: RunFolder
    phase: int | None = None

    @classmethod
    def parse(cls, text: str) -> Network:
        """FOLDER or FOLDER@PHASE, as on the command line.

        >>> Network.parse("runs/seed=0@2").phase, Network.parse("runs/seed=0").phase
        (2, None)
        """
        path, _, phase = text.rpartition("@")
        return cls(RunFolder(Path(path)), int(phase)) if path and phase.isdigit() else cls(RunFolder(Path(text)))

    @property
    def identity(self) -> Row:
        """Scale, hash and seed of the run, and the phase.

        Raises:
            RunError: if the run is not finished.
        """
        summary = self.folder.read_summary()
        if self.folder.state() != "done":
            raise RunError(f"{self.folder.path} holds no finished run; run its command until it is done")
        return {**{name: summary[name] for name in IDENTITY}, "phase": self.phase}


@dataclass(frozen=True)
class Job:
    """One analysis of given networks with given options; its result lies in the folder of the last of them."""

    options: AnalysisOptions
    networks: tuple[Network, ...]
    data_root: str | None = None

    @property
    def description(self) -> Row:
        """What names the job: kind, options and runs."""
        runs = [network.identity for network in self.networks]
        return {"kind": self.options.kind, "options": asdict(self.options), "runs": runs}

    @property
    def path(self) -> Path:
        """The file of its result."""
        text = json.dumps(self.description, sort_keys=True)
        name = f"{self.options.kind}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.csv"
        return self.networks[-1].folder.analyses / name

    def run(self) -> Result:
        """Compute the units that are missing, with a progress bar; returns the whole result.

        Raises:
            RunError: if a run is not finished or cannot be analysed.
            DataError: if data are missing.
        """
        path, description = self.path, self.description
        found = read_result(path)
        if found.complete:
            return found
        runs = [load_run(network.folder.path, self.data_root, network.phase) for network in self.networks]
        device = set_up_torch(runs[-1].plan)
        analysis = self.options.prepare(runs, device)
        made_with = _made_with(device)
        computed = {"columns": list(analysis.columns), "units": analysis.units, "facts": analysis.facts}
        header: Row = {"done": 0, "made_with": [], **found.header, **description, **computed}
        if made_with not in header["made_with"]:
            header["made_with"] = [*header["made_with"], made_with]
        rows, console, units = list(found.rows), Console(stderr=True), range(header["done"], analysis.units)
        bar: dict[str, Any] = {"total": analysis.units, "completed": units.start, "console": console}
        for unit in track(units, self.options.kind, disable=not console.is_terminal, **bar):
            rows += analysis.rows(unit)
            header = {**header, "done": unit + 1}
            write_result(path, Result(header, rows))
        return read_result(path)


def _made_with(device: torch.device) -> Row:
    found = describe_environment(device)
    named = {name: found[name] for name in ("commit", "processor", "threads", "device", "python")}
    return {**named, "torch": found["packages"]["torch"]}


def rounded(value: float) -> str:
    """A number as it stands in the files: seven digits, which float32 has."""
    return f"{value:.7g}"
