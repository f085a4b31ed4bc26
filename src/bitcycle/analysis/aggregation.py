"""The finished runs of an item: the rows of runs.csv that its manifest names, cell by cell, their mean and spread over seeds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from bitcycle.analysis.collect import CURVES, read_curve
from bitcycle.analysis.deviation import group_of
from bitcycle.measurement.artifacts import ANALYSES, Result, collected
from bitcycle.sweep.grid import Overrides
from bitcycle.sweep.manifest import Place
from bitcycle.sweep.registry import SCALES


@dataclass(frozen=True)
class Run:
    """One finished run: a row of runs.csv, its settings, and where its curve lies."""

    row: Mapping[str, str]
    settings: Mapping[str, Any]
    curves: Path = Path()

    def number(self, name: str) -> float | None:
        """A number of the row; None where it has none."""
        try:
            return float(self.row.get(name) or "")
        except ValueError:
            return None

    @cached_property
    def curve(self) -> dict[str, Any]:
        """Its learning curve; empty if none was collected."""
        return read_curve(self.curves, self.row)

    @cached_property
    def analyses(self) -> list[Result]:
        """What was analysed of it; an analysis of several runs is with the last of these."""
        return collected(self.curves.parent / ANALYSES, self.row)

    @property
    def training(self) -> tuple[str, str]:
        """Names it among all runs of its scale."""
        return self.row["hash"], self.row["seed"]

    @cached_property
    def group(self) -> tuple[str, ...]:
        """Names the runs of the same network, data and length, whose deviation is taken to be the same."""
        return group_of(self.row, self.settings)


def read_runs(rows: Iterable[Mapping[str, str]], summary: Path) -> list[Run]:
    """The rows of the file `summary` with their settings."""
    return [Run(row, json.loads(row["settings"]), summary.parent / CURVES) for row in rows]


@dataclass(frozen=True)
class Cell:
    """One cell of an experiment: what the paper trains, and our runs of it, one for each seed."""

    paper: Overrides  # its settings at paper scale
    ours: Overrides  # its settings at the scale of the runs
    runs: tuple[Run, ...] = ()  # finished ones

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting as in the paper, or as our runs have it; groups by the name of the option."""
        if key in self.paper:
            return plain(self.paper[key])
        return self.actual(key, default)

    def actual(self, key: str, default: Any = None) -> Any:
        """A setting as our runs have it, by its dotted name; groups by the name of the option."""
        if not self.runs:
            return plain(self.ours[key]) if key in self.ours else default
        value: Any = self.runs[0].settings
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value.get("name", default) if isinstance(value, Mapping) else value

    @property
    def stand_ins(self) -> set[tuple[str, str]]:
        """(ours, the paper's) network or data where ours stand in for others."""
        pairs = ((self.actual(key), self.setting(key)) for key in ("model", "dataset"))
        return {(str(ours), str(paper)) for ours, paper in pairs if self.runs and ours != paper}


def plain(text: str) -> Any:
    """A value of the command line as a number, list, or text.

    >>> plain("[3,4]"), plain("1e-5"), plain("CR"), plain("null")
    ([3, 4], 1e-05, 'CR', None)
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [part.strip() for part in text.strip("[]").split(",")] if text.startswith("[") else text


@dataclass(frozen=True)
class Results:
    """The cells of an item at one scale."""

    scale: Optional[str] = None  # of the runs; None if there are none
    cells: tuple[Cell, ...] = ()  # with and without runs
    others: tuple[Results, ...] = ()  # at other scales

    @property
    def done(self) -> tuple[Cell, ...]:
        """Cells with runs."""
        return tuple(cell for cell in self.cells if cell.runs)

    @property
    def runs(self) -> list[Run]:
        """Every run, once."""
        return list({id(run): run for cell in self.cells for run in cell.runs}.values())

    @property
    def trials(self) -> str:
        """Runs for each cell: "n = 3", or "n = 1 to 3"."""
        counts = sorted({len(cell.runs) for cell in self.done})
        if not counts:
            return "n = 0"
        return f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"

    def at(self, scale: str) -> Results | None:
        """The results at a scale; None if there are no runs there."""
        return next((found for found in (self, *self.others) if found.scale == scale and found.done), None)


def find_results(places: Iterable[Place], runs: Sequence[Run]) -> Results:
    """Those runs that the manifest of an item names, at the scale where most cells have some (of two equal ones the larger)."""
    by_name: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: int(run.row["seed"])):
        by_name[run.row["scale"], run.row["hash"]].append(run)
    cells: dict[str, list[Cell]] = {scale: [] for scale in SCALES}
    for place in (place for place in places if not place.superseded):
        found = tuple(by_name[place.scale, place.hash])
        cells[place.scale].append(Cell(dict(place.paper), dict(place.ours), found))
    at_scales = [Results(scale, tuple(found)) for scale, found in cells.items()]
    some = sorted((r for r in at_scales if r.done), key=lambda r: (r.scale == "smoke", -len(r.done) / len(r.cells)))
    if not some:
        return Results(None, at_scales[0].cells)
    return Results(some[0].scale, some[0].cells, tuple(some[1:]))
