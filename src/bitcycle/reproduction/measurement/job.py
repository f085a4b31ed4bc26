"""Analyses of trained networks, computed in units. Each finished unit is stored, so an interrupted command can resume.

The result is a CSV file in the run folder's `analyses/`. Its first line `# {...}` records kind, runs, options,
versions, and the number of finished units. It contains no dates, so that equal analyses have identical files,
interrupted or not.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.progress import track

from bitcycle.door import parser_of
from bitcycle.errors import RunError
from bitcycle.guard import guarded
from bitcycle.reproduction.measurement.artifacts import IDENTITY, Result, Row, read_result, write_result
from bitcycle.settings import Settings, default_of, read_words
from bitcycle.training.environment import describe_environment, set_up_torch
from bitcycle.training.finished_run import FinishedRun, finished_summary, load_run
from bitcycle.training.run_folder import RunFolder


@dataclass
class Analysis(Settings):
    """An analysis of trained networks in a number of units, each of which is stored as a whole. Its fields are its options, each
    of which can change the result."""

    kind: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    networks: ClassVar[int] = 1
    """Number of networks per analysis."""

    def prepare(self, runs: Sequence[FinishedRun], device: torch.device) -> tuple[int, Row]:
        """Prepare some networks, which may be modified; returns the number of units, and plain values that hold for all rows.
        Raises RunError for networks that it cannot analyse; DataError if data are missing."""
        raise NotImplementedError

    def rows(self, unit: int) -> list[Row]:
        """The rows of a unit; they depend only on its number."""
        raise NotImplementedError


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network: a run folder and a phase, whose final weights are used; None: the end of the run."""

    folder: RunFolder
    phase: int | None = None

    @classmethod
    def parse(cls, text: str) -> "TrainedNetwork":
        """Parse FOLDER or FOLDER@PHASE of a command line.

        >>> TrainedNetwork.parse("runs/seed=0@2").phase, TrainedNetwork.parse("runs/seed=0").phase
        (2, None)
        """
        path, _, phase = text.rpartition("@")
        return cls(RunFolder(Path(path)), int(phase)) if path and phase.isdigit() else cls(RunFolder(Path(text)))

    @property
    def identity(self) -> Row:
        """Scale, hash and seed of the run, and the phase. Raises RunError if the run is not finished."""
        summary = finished_summary(self.folder)
        return {**{name: summary[name] for name in IDENTITY}, "phase": self.phase}


@dataclass(frozen=True)
class Job:
    """One analysis of given networks; its result is stored in the run folder of the last network."""

    analysis: Analysis
    networks: tuple[TrainedNetwork, ...]
    data_root: str | None = None

    @property
    def description(self) -> Row:
        """Identity of the job: kind, options and runs."""
        runs = [network.identity for network in self.networks]
        return {"kind": self.analysis.kind, "options": asdict(self.analysis), "runs": runs}

    @property
    def path(self) -> Path:
        """Path of the result file."""
        text = json.dumps(self.description, sort_keys=True)
        name = f"{self.analysis.kind}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.csv"
        return self.networks[-1].folder.analyses / name

    def run(self) -> Result:
        """Compute the missing units, with a progress bar; returns the whole result. Raises RunError if a run is not finished
        or cannot be analysed; DataError if data are missing."""
        path, description = self.path, self.description
        found = read_result(path)
        if found.complete:
            return found
        runs = [load_run(network.folder.path, self.data_root, network.phase) for network in self.networks]
        device = set_up_torch(runs[-1].plan.config.training)
        analysis = replace(self.analysis)  # a copy, so that what it loads is freed afterwards
        units, facts = analysis.prepare(runs, device)
        environment = describe_environment(device)
        made_with = {name: environment[name] for name in ("commit", "processor", "threads", "device", "python")}
        made_with["torch"] = environment["packages"]["torch"]
        computed = {"columns": list(self.analysis.columns), "units": units, "facts": facts}
        header: Row = {"done": 0, "made_with": [], **found.header, **description, **computed}
        if made_with not in header["made_with"]:
            header["made_with"] = [*header["made_with"], made_with]
        rows, console, done = list(found.rows), Console(stderr=True), header["done"]
        bar: dict[str, Any] = {"total": units, "completed": done, "console": console}
        for unit in track(range(done, units), self.analysis.kind, disable=not console.is_terminal, **bar):
            rows += analysis.rows(unit)
            header = {**header, "done": unit + 1}
            try:
                write_result(path, Result(header, rows))
            except OSError as error:
                remedy = "free space, or make the folder writable; what is written so far is kept"
                raise RunError(f"{path}: cannot be written: {error.strerror}. Remedy: {remedy}.") from error
        return read_result(path)


def rounded(value: float) -> str:
    """Format a number as in the result files: with seven significant digits, about float32 precision."""
    return f"{value:.7g}"


# The command line


def run_command(kind: type[Analysis], description: str | None, arguments: Sequence[str] | None = None) -> int:
    """Run the command of a kind of analysis, with one option for each of its settings, and return its exit code."""
    parser = parser_of(kind.kind, description)
    help = "folder of a finished run, ending in seed=N; with @PHASE, the weights from which the next phase started"
    parser.add_argument("networks", nargs=kind.networks, metavar="RUN_FOLDER[@PHASE]", help=help)
    for field in fields(kind):
        choices = field.metadata.get("choices")
        listed = f"; one of {', '.join(choices)}" if choices else ""
        text = f"{field.metadata['help']}{listed} (default: {json.dumps(default_of(field))})".replace("%", "%%")
        parser.add_argument(f"--{field.name.replace('_', '-')}", dest=field.name, metavar="VALUE", help=text)
    parser.add_argument("--data-root", help="data root, if it has moved")
    given = vars(parser.parse_args(arguments))
    networks, data_root = given.pop("networks"), given.pop("data_root")

    def run() -> None:
        analysis = read_words(kind, {name: value for name, value in given.items() if value is not None})
        job = Job(analysis, tuple(map(TrainedNetwork.parse, networks)), data_root)
        print(f"{job.path}: {len(job.run().rows)} rows; `make collect` adds it to results/summary")

    return guarded(run)
