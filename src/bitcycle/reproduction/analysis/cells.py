"""The finished runs of an item, cell by cell: the rows of runs.csv that its manifest names."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional

from bitcycle.configuration import SCALES
from bitcycle.reproduction.analysis.collect import CURVES, read_curve
from bitcycle.reproduction.manifest import Place
from bitcycle.reproduction.measurement.artifacts import ANALYSES, Result, collected
from bitcycle.schedule import SCHEDULES, ScheduleOptions
from bitcycle.sweep.grid import Overrides


class Group(NamedTuple):
    """A group of runs with the same network, data and length, which are assumed to have the same deviation between seeds."""

    scale: str
    model: str
    data: str
    metric: str
    steps: str
    batch: str


LOWER_IS_BETTER = ("perplexity", "cer", "loss")
"""How the names of metrics end of which less is better."""


@dataclass(frozen=True)
class Run:
    """One finished run: its row in runs.csv, its settings, and the folder of its curve."""

    row: Mapping[str, str]
    settings: Mapping[str, Any]
    curves: Path = Path()
    wanted: Optional[Sequence[tuple[str, Mapping[str, Any]]]] = (
        None  # kind and options of analyses that count; None: all
    )

    def number(self, name: str) -> float | None:
        """The number in a column; None if it has none."""
        try:
            return float(self.row.get(name) or "")
        except ValueError:
            return None

    @property
    def higher_is_better(self) -> bool:
        """Whether more of its metric is better: as recorded, or by the name of the metric for runs from before it was."""
        recorded = self.row.get("higher_is_better")
        return recorded == "True" if recorded else not self.row.get("metric", "").endswith(LOWER_IS_BETTER)

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting by its dotted name; for a group, the name of the chosen option. A setting that was added after the run has
        the schedule's default, or else the given one."""
        value: Any = self.settings
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return _default(key, self.settings.get("schedule", {}).get("name"), default)
            value = value[part]
        return value.get("name", default) if isinstance(value, Mapping) else value

    @cached_property
    def curve(self) -> dict[str, Any]:
        """The learning curve; empty if none was collected."""
        return read_curve(self.curves, self.row)

    @cached_property
    def analyses(self) -> list[Result]:
        """The results of its analyses that count; an analysis of several runs belongs to the last of them."""
        found = collected(self.curves.parent / ANALYSES, self.row)
        return [result for result in found if self.wanted is None or any(result.is_of(*one) for one in self.wanted)]

    @property
    def epochs(self) -> float:
        """Length in epochs; 0 if the number of samples is not recorded. The samples of a text are its words, and an element of
        a batch has several. A step on a whole graph is an epoch, however many training nodes it has."""
        samples, batch = self.number("train_samples"), self.setting("training.batch_size")
        words = self.setting("task.sequence_length") or 1
        return float(self.row["total_steps"]) * min(1.0, batch * words / samples) if samples and batch else 0.0

    @property
    def training_seconds(self) -> float | None:
        """Time of all steps without evaluations, as in partial pre-training, section 5.2; None if the speed is not recorded."""
        speed = self.number("steps_per_second")
        return float(self.row["total_steps"]) / speed if speed else None

    @property
    def training(self) -> tuple[str, str]:
        """Hash and seed, which identify the run among those of its scale."""
        return self.row["hash"], self.row["seed"]

    @cached_property
    def group(self) -> Group:
        """The group of the run; its data include the part, vocabulary size and number of samples if these are settings."""
        words = {"vocabulary": "vocabulary of {:,}", "train_samples": "{:,} samples"}
        sizes = [text.format(size) for name, text in words.items() if (size := self.setting(f"dataset.{name}"))]
        limits = [*filter(None, [PARTS.get(self.setting("dataset.part"))]), *sizes]
        data = self.row.get("dataset", "") + (f" ({', '.join(limits)})" if limits else "")
        row, batch = self.row, self._batch
        return Group(row["scale"], row.get("model", ""), data, row["metric"], row["total_steps"], batch)

    @property
    def _batch(self) -> str:
        """Training samples of a step: all, if it takes a whole graph with fewer than `training.batch_size`."""
        size, samples = self.setting("training.batch_size", ""), self.number("train_samples")
        return str(int(min(size, samples)) if size and samples else size)


PARTS = {
    "first_classes": "half of the classes",
    "second_classes": "the other half of the classes",
    "first_samples": "half of each class",
    "second_samples": "the other half of each class",
}
"""Parts of image data sets in words; `all` has none."""


def read_runs(rows: Iterable[Mapping[str, str]], summary: Path) -> list[Run]:
    """The runs in rows of the file `summary`."""
    return [Run(row, json.loads(row["settings"]), summary.parent / CURVES) for row in rows]


@dataclass(frozen=True)
class Cell:
    """One cell of an experiment: a configuration of the paper, and our runs of it, one per seed."""

    paper: Overrides  # settings at paper scale
    ours: Overrides  # settings at the scale of the runs
    runs: tuple[Run, ...] = ()  # finished runs

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting of the paper's configuration; if it does not determine it, that of our runs."""
        return parse_value(self.paper[key]) if key in self.paper else self.actual(key, default)

    def actual(self, key: str, default: Any = None) -> Any:
        """A setting of our runs by its dotted name; for a group, the name of the chosen option."""
        if self.runs:
            return self.runs[0].setting(key, default)
        return parse_value(self.ours[key]) if key in self.ours else _default(key, self.ours.get("schedule"), default)

    @property
    def stand_ins(self) -> set[tuple[str, str]]:
        """Networks and datasets that stand in for the paper's, as (ours, the paper's)."""
        pairs = ((self.actual(key), self.setting(key)) for key in ("model", "dataset"))
        return {(str(ours), str(paper)) for ours, paper in pairs if self.runs and ours != paper}

    @property
    def remark(self) -> str:
        """How the data of our runs differ from the official ones, as recorded with them."""
        return next((run.row["remark"] for run in self.runs if run.row.get("remark")), "")

    @property
    def is_proxy(self) -> bool:
        """Whether network or data of our runs are not the paper's."""
        return bool(self.stand_ins or self.remark)


def distinct_runs(cells: Iterable[Cell]) -> list[Run]:
    """The runs of some cells, each once."""
    return list({run.training: run for cell in cells for run in cell.runs}.values())


def _default(key: str, schedule: str | None, other: Any) -> Any:
    """The default of a setting of a schedule; `other` for other settings."""
    group, _, name = key.partition(".")
    return getattr(_options(schedule), name, other) if group == "schedule" else other


@cache
def _options(schedule: str | None) -> ScheduleOptions | None:
    return SCHEDULES[schedule]() if schedule and schedule in SCHEDULES else None


def parse_value(text: str) -> Any:
    """Parse a value as written on the command line.

    >>> parse_value("[3,4]"), parse_value("1e-5"), parse_value("CR"), parse_value("null")
    ([3, 4], 1e-05, 'CR', None)
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [part.strip() for part in text.strip("[]").split(",")] if text.startswith("[") else text


@dataclass(frozen=True)
class Results:
    """The cells of an item at one scale."""

    scale: Optional[str] = None  # None if there are no runs
    cells: tuple[Cell, ...] = ()  # with and without runs
    others: tuple["Results", ...] = ()  # results at other scales
    replaced: tuple[Cell, ...] = ()  # cells with runs to which the sweep assigns other runs by now

    @property
    def done(self) -> tuple[Cell, ...]:
        """Cells with runs."""
        return tuple(cell for cell in self.cells if cell.runs)

    @property
    def parts(self) -> "tuple[Results, ...]":
        """These results, and those at paper scale if this is another and there are some."""
        paper = self.at("paper")
        return (self,) if paper is None or paper is self else (self, paper)

    @property
    def shown(self) -> tuple[Cell, ...]:
        """The cells of `parts` with runs."""
        return tuple(cell for part in self.parts for cell in part.done)

    @property
    def scales(self) -> str:
        """The scales of `parts`, such as "mini and paper"."""
        return " and ".join(part.scale or "" for part in self.parts)

    @property
    def runs(self) -> list[Run]:
        """All runs, without duplicates."""
        return distinct_runs(self.cells)

    @property
    def trials(self) -> str:
        """Number of runs per cell, see `trials_of`."""
        return trials_of(self.done)

    def at(self, scale: str) -> "Results | None":
        """The results at a given scale; None if it has no runs."""
        return next((found for found in (self, *self.others) if found.scale == scale and found.done), None)


def trials_of(cells: Iterable[Cell]) -> str:
    """Number of runs per cell, such as "n = 3" or "n = 1 to 3"."""
    return numbers_of_seeds(len(cell.runs) for cell in cells)


def numbers_of_seeds(counts: Iterable[int]) -> str:
    """Several numbers of seeds in words.

    >>> numbers_of_seeds([3, 1, 2]), numbers_of_seeds([3, 3]), numbers_of_seeds([])
    ('n = 1 to 3', 'n = 3', 'n = 0')
    """
    several = sorted(set(counts)) or [0]
    return f"n = {several[0]}" if len(several) == 1 else f"n = {several[0]} to {several[-1]}"


def find_results(places: Iterable[Place], runs: Sequence[Run]) -> Results:
    """The results of an item, from the rows of its manifest (of a seed without a run, that with the other `training.compute`
    counts): at the scale at which the largest share of cells has runs (the
    larger scale if equal, smoke last), with those at other scales in `others`."""
    by_name: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: int(run.row["seed"])):
        by_name[run.row["scale"], run.row["hash"]].append(run)
    cells: dict[str, list[Cell]] = {scale: [] for scale in SCALES}
    replaced: dict[str, list[Cell]] = {scale: [] for scale in SCALES}
    places = list(places)
    superseded = {place.assignment for place in places if place.superseded}
    for place in places:
        found = by_name[place.scale, place.hash]
        if replace(place, hash=place.otherwise).assignment not in superseded:
            found = _with_other_seeds(found, by_name[place.scale, place.otherwise])
        kept = replaced if place.superseded else cells
        kept[place.scale].append(Cell(dict(place.paper), dict(place.ours), tuple(found)))
    at_scales = [Results(scale, tuple(found), replaced=tuple(replaced[scale])) for scale, found in cells.items()]
    some = sorted((r for r in at_scales if r.done), key=lambda r: (r.scale == "smoke", -len(r.done) / len(r.cells)))
    if not some:
        return Results(None, at_scales[0].cells)
    return replace(some[0], others=tuple(some[1:]))


def _with_other_seeds(runs: Sequence[Run], others: Iterable[Run]) -> list[Run]:
    """These runs, and the others of seeds that they lack, by seed."""
    seeds = {run.row["seed"] for run in runs}
    return sorted(
        [*runs, *(run for run in others if run.row["seed"] not in seeds)], key=lambda run: int(run.row["seed"])
    )
