"""What pictures, tables and the page read of an item: its runs grouped by what may be compared, and differences seed by seed."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Optional

import yaml

from bitcycle.analysis.aggregation import Cell, Results, find_results
from bitcycle.analysis.contrast import Pool, Selector, contrast, fact, readings, select, value
from bitcycle.analysis.items import PUBLISHED, SWEEPS, Item, Published, read_published
from bitcycle.analysis.labels import our_data, our_model, panel_of
from bitcycle.analysis.preconditions import CEILING
from bitcycle.analysis.statistics import Estimate, over_seeds
from bitcycle.settings import setting
from bitcycle.sweep.manifest import MANIFEST, read_manifest
from bitcycle.sweep.registry import Sweep, read_sweep

ANALYSE = "python -m bitcycle.measurement.after_sweep"
DESCRIPTIONS = Path(__file__).parent / "papers"
"""PAPER.yaml says of the items of a paper how they are drawn, and how their numbers are found in our runs."""


@dataclass(frozen=True)
class Spec:
    """An item as its paper's file describes it."""

    column: str = setting("final", "of runs.csv that holds the metric as the paper reports it: final or best")
    cost: str = setting("gbitops", "of runs.csv: gbitops, or gbitops_to_best")
    named: str = setting("method", "fact that names the method of a cell in the paper's words, see `contrast.FACTS`")
    base: Optional[Selector] = setting(None, "facts of the cell that the others are compared with")
    measures: Sequence[str] = setting((), "further facts of our cells, which are columns of its table")
    pictures: Sequence[Mapping[str, Any]] = setting(
        (), "kind and options of its picture, see `make.KINDS`; of several the first that has its runs"
    )


@cache
def _content(paper: str) -> dict[str, Any]:
    path = DESCRIPTIONS / f"{paper}.yaml"
    return dict(yaml.safe_load(path.read_text())) if path.exists() else {}


@dataclass(frozen=True)
class ItemData:
    """Everything that is known of an item."""

    item: Item = setting(MISSING, "what it is")
    results: Results = setting(MISSING, "our runs")
    published: Sequence[Published] = setting((), "its published numbers")
    digitized: Sequence[Published] = setting((), "those that were read from its picture")
    root: Path = setting(Path(), "of the repository, with its configuration and sweeps")
    file: Optional[Path] = setting(None, "its sweep file; None if it has none")
    sweep: Sweep = setting(Sweep(), "what that says")
    pool: Pool = setting(Pool(()), "all recorded runs, whose deviation serves where a setting has few seeds")

    @property
    def spec(self) -> Spec:
        """Its description; the usual one where its paper's file has none."""
        content = _content(self.item.paper)
        return Spec(**{**content.get("defaults", {}), **content.get("items", {}).get(self.item.name, {})})

    @property
    def command(self) -> str:
        """What trains its runs; empty if it needs none."""
        return self.item.command(self.root / SWEEPS)

    @property
    def complete_enough(self) -> bool:
        """Whether at least half of the cells have runs: nothing is drawn below that."""
        return bool(self.results.done) and 2 * len(self.results.done) >= len(self.results.cells)

    @property
    def commands(self) -> list[str]:
        """What trains and analyses its runs, at the scale of those that are there."""
        scale = f" scale={self.results.scale}" if self.results.scale not in (None, "paper") else ""
        analyse = f"{ANALYSE} {self.file.parent.name}/{self.file.stem}" if self.file and self.sweep.analyses else ""
        return [command + scale for command in (self.command, analyse) if command]


def gather(item: Item, pool: Pool, root: Path) -> ItemData:
    """Everything that is known of an item of a repository."""
    file, published = item.sweep_file(root / SWEEPS), root / PUBLISHED
    manifest = root / MANIFEST / file.parent.name / f"{file.stem}.csv" if file else Path()
    return ItemData(
        item,
        find_results(read_manifest(manifest), pool.runs) if file else Results(),
        read_published(item, published),
        read_published(item, published, "_digitized"),
        root,
        file,
        read_sweep(file) if file else Sweep(),
        pool,
    )


@dataclass(frozen=True)
class Panel:
    """Cells that share our network and data, and so may be compared; each training is in one of them only."""

    name: str = setting(MISSING, "our network and data")
    proxy_for: tuple[str, ...] = setting(MISSING, "the paper's networks and data that they stand for, if others")
    cells: tuple[Cell, ...] = setting(MISSING, "with the settings as they were run, not those of the paper")
    pool: Pool = setting(MISSING, "all recorded runs")

    @property
    def title(self) -> str:
        """Our network and data, and the length of training where all have the same."""
        steps = {int(run.row["total_steps"]) for cell in self.cells for run in cell.runs}
        return f"{self.name}, {steps.pop():,} steps" if len(steps) == 1 else self.name

    def first(self, base: Selector | None) -> Cell | None:
        """The first cell with some facts, those with most seeds before others; None without any."""
        found = [] if base is None else select(self.cells, base)
        return max(found, key=lambda cell: len(cell.runs), default=None)


def our_network(cell: Cell) -> str:
    """Our network and data, in words, with what tells them from the paper's."""
    skips = " with extra skips" if str(cell.actual("model")).endswith("_extra_skip") else ""
    return f"{our_model(cell)}{skips}, {our_data(cell)}"


def panels_of(data: ItemData, split: str = "") -> list[Panel]:
    """The cells with runs by our network and data, and by the fact `split`; cells filled by the same trainings are one."""
    groups: dict[str, tuple[dict[str, None], dict[frozenset[tuple[str, str]], Cell]]] = {}
    for cell in data.results.done:
        extra = fact(cell, split) if split else ""
        papers, cells = groups.setdefault(our_network(cell) + (extra and f", {extra}"), ({}, {}))
        if cell.stand_ins:
            papers[panel_of(cell)] = None
        trainings = frozenset(run.training for run in cell.runs)
        cells.setdefault(trainings, Cell({}, cell.ours, cell.runs))
    return [Panel(name, tuple(papers), tuple(cells.values()), data.pool) for name, (papers, cells) in groups.items()]


def by_length(panel: Panel) -> list[Panel]:
    """A panel divided by the length of training: runs of unequal lengths are not compared."""
    lengths = dict.fromkeys(cell.runs[0].row["total_steps"] for cell in panel.cells)
    alike = (tuple(cell for cell in panel.cells if cell.runs[0].row["total_steps"] == length) for length in lengths)
    return [replace(panel, cells=cells) for cells in alike]


def comparable(data: ItemData, split: str = "", same_length: bool = False) -> list[Panel]:
    """The panels with a baseline, room for a difference, and something beside it; none below half of the cells of the item."""
    found = panels_of(data, split) if data.complete_enough else []
    if same_length:
        found = [part for panel in found for part in by_length(panel)]
    kept = []
    for panel in found:
        first = panel.first(data.spec.base)
        accuracy = value(first, data.spec.column) if first and "accuracy" in first.runs[0].row["metric"] else None
        if first and len(panel.cells) > 1 and not (accuracy and accuracy.mean > CEILING):
            kept.append(panel)
    return kept


def differences(panel: Panel, base: Cell | None, column: str) -> dict[int, Estimate]:
    """Index of a cell -> its difference to a baseline of equal seeds; without a baseline its own value.

    Runs of equal seeds share initial weights and batches; the estimate is that of the verdicts.
    """
    found = {}
    for index, cell in enumerate(panel.cells):
        if base is None and (values := readings(cell, column)):
            found[index] = over_seeds(list(values.values()))
        elif base and cell is not base and (gap := contrast([cell], [base], (), (column, column)).estimate(panel.pool)):
            found[index] = gap
    return found


def cost_against(cell: Cell, base: Cell | None) -> float | None:
    """Cost relative to a baseline; where that has none, to the run's own static q_max."""
    own, other = value(cell, "gbitops"), value(base, "gbitops") if base else None
    if own and other and other.mean:
        return own.mean / other.mean
    relative = value(cell, "relative_to_static")
    return relative.mean if relative else None


def metric_name(cells: Sequence[Cell]) -> str:
    """The main metric of runs in words, with its unit."""
    words = cells[0].runs[0].row["metric"].replace("_", " ") if cells else "result"
    return f"{words} (%)" if "accuracy" in words else words


def status_line(data: ItemData) -> str:
    """Scale, seeds, distinct trainings and cells of our runs, and what they stand for; or what to run."""
    results = data.results
    if not results.done:
        return f"no runs yet: {'; '.join(data.commands)}" if data.commands else ""
    trainings = len({run.training for run in results.runs})
    cells = f"{len(results.done)} of {len(results.cells)} cells"
    parts = [f"{results.scale} scale, {results.trials}, {trainings} distinct trainings in {cells}"]
    for panel in panels_of(data):
        if panel.proxy_for:
            parts.append(f"{panel.title} is a proxy for {'; '.join(panel.proxy_for)}")
    return ". ".join(parts)
