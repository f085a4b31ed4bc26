"""Data of an item for pictures, tables and the page: its runs in comparable groups, and differences paired by seed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Optional

import yaml

from bitcycle.configuration import SCALES
from bitcycle.reproduction.analysis.cells import Cell, Results, Run, find_results
from bitcycle.reproduction.analysis.collect import is_accuracy
from bitcycle.reproduction.analysis.contrast import Pool, contrast
from bitcycle.reproduction.analysis.facts import Selector, as_list, fact, select
from bitcycle.reproduction.analysis.items import PUBLISHED, SWEEP_FOLDER, Item, Published, read_published
from bitcycle.reproduction.analysis.labels import our_data, our_model, panel_of
from bitcycle.reproduction.analysis.metrics import estimate_of, readings
from bitcycle.reproduction.analysis.preconditions import CEILING
from bitcycle.reproduction.analysis.statistics import Estimate, over_seeds
from bitcycle.reproduction.manifest import MANIFEST, read_manifest
from bitcycle.reproduction.measurement.after_sweep import read_entry
from bitcycle.sweep.registry import Sweep, read_sweep

ANALYSE = "python -m bitcycle analyse"
DESCRIPTIONS = Path(__file__).parent / "papers"
"""PAPER.yaml describes how the items of a paper are drawn, and which of our metrics corresponds to the paper's."""


@dataclass(frozen=True)
class Spec:
    """The description of an item in its paper's file."""

    column: str = "final"  # the metric that the paper reports, see `metrics.reading`: final or best
    cost: str = "gbitops"  # column of runs.csv with the cost: gbitops or gbitops_to_best
    named: str = "method"  # fact that is the paper's name of a method, see `facts.FACTS`
    base: Optional[Selector | Sequence[Selector]] = None  # facts of the baseline; of several, the first with runs
    apart: str = ""  # fact in which a cell and its baseline agree in the table of our runs, if there is such a baseline
    measures: Sequence[str] = ()  # facts that are additional columns in the table of our runs
    pictures: Sequence[Mapping[str, Any]] = ()  # kind, MODULE.FUNCTION here, with options; draws the first with runs
    beside: Mapping[str, Selector] = field(default_factory=dict)  # sweep -> its cells that pictures show, too
    appendix: bool = False  # whether results/README.md shows it at its end
    tables: str = "table.tables_of"  # MODULE.FUNCTION here that makes its tables


@cache
def _content(paper: str) -> dict[str, Any]:
    path = DESCRIPTIONS / f"{paper}.yaml"
    return dict(yaml.safe_load(path.read_text(encoding="utf-8"))) if path.exists() else {}


@dataclass(frozen=True)
class ItemData:
    """An item with its published numbers and our runs."""

    item: Item
    results: Results  # our runs
    published: Sequence[Published] = ()
    digitized: Sequence[Published] = ()  # published numbers that were read from its picture
    root: Path = Path()  # folder of the repository with its configuration and sweeps
    file: Optional[Path] = None  # sweep file; None if it has none
    sweep: Sweep = Sweep()  # content of the sweep file
    pool: Pool = Pool(())  # all recorded runs, whose pooled deviation is used for settings with few seeds
    beside: tuple[Cell, ...] = ()  # cells of other sweeps that its picture shows

    @property
    def drawn(self) -> "ItemData":
        """What its picture shows: these data, with the cells beside them among its own."""
        cells = (*self.results.cells, *self.beside) if self.results.done else self.results.cells
        return replace(self, results=replace(self.results, cells=cells))

    @property
    def spec(self) -> Spec:
        """Its description in its paper's file, completed by defaults."""
        content = _content(self.item.paper)
        return Spec(**{**content.get("defaults", {}), **content.get("items", {}).get(self.item.name, {})})

    @property
    def commands(self) -> list[str]:
        """The commands that train and analyse its runs, at the scale of the existing ones."""
        name = f"{self.file.parent.name}/{self.file.stem}" if self.file else self.item.sweep
        scale = f" scale={self.results.scale}" if self.results.scale not in (None, "paper") else ""
        found = [f"python train.py -m +sweeps={name}{scale}"] if name else []
        return [*found, f"{ANALYSE} {name}{scale}"] if self.sweep.analyses else found


def gather(item: Item, pool: Pool, root: Path) -> ItemData:
    """Collect the data of an item of a repository."""
    file, published = item.sweep_file(root / SWEEP_FOLDER), root / PUBLISHED
    manifest = root / MANIFEST / file.parent.name / f"{file.stem}.csv" if file else Path()
    sweep = read_sweep(file) if file else Sweep()
    results = find_results(read_manifest(manifest), with_analyses_of(sweep, pool.runs)) if file else Results()
    numbers, digitized = (read_published(item, published, suffix) for suffix in ("", "_digitized"))
    data = ItemData(item, results, numbers, digitized, root, file, sweep, pool)
    return replace(data, beside=tuple(_beside(data))) if data.spec.beside else data


def _beside(data: ItemData) -> Iterator[Cell]:
    """The cells with runs, at the scale of an item's, that its description names of other sweeps."""
    for name, selector in data.spec.beside.items():
        others = find_results(read_manifest(data.root / MANIFEST / f"{name}.csv"), data.pool.runs)
        same = others.at(data.results.scale) if data.results.scale else None
        yield from select(same.done, selector) if same else ()


def with_analyses_of(sweep: Sweep, runs: Sequence[Run]) -> Sequence[Run]:
    """The runs, with only those analyses that the sweep asks for; others, as from the command line, have other options and are
    not averaged with them."""
    if not sweep.analyses:
        return runs
    wanted = {
        scale: [(one.kind, asdict(one)) for entry in sweep.analyses for one in read_entry(entry, scale)[0]]
        for scale in SCALES
    }
    return [replace(run, wanted=wanted[run.row["scale"]]) for run in runs]


@dataclass(frozen=True)
class Panel:
    """Cells with the same network and data, which can be compared; no two of them have the same runs."""

    name: str  # our network and data
    proxy_for: tuple[str, ...]  # the paper's networks and data, if ours stand in for them
    cells: tuple[Cell, ...]  # cells with the settings of our runs, not those of the paper
    pool: Pool

    @property
    def scale(self) -> str:
        """The scale of the runs."""
        return self.cells[0].runs[0].row["scale"]

    @property
    def title(self) -> str:
        """Our network and data, and the training length if all runs have the same."""
        steps = {int(run.row["total_steps"]) for cell in self.cells for run in cell.runs}
        return f"{self.name}, {steps.pop():,} steps" if len(steps) == 1 else self.name

    def first(self, base: Selector | Sequence[Selector] | None, alike: Selector | None = None) -> Cell | None:
        """The cell with most runs among those that match a selector, the first of several that has any, and of these those that
        match `alike`, if there are such; None if there is none."""
        for selector in [] if base is None else as_list(base):
            if found := select(self.cells, selector):
                return max(select(found, alike or {}) or found, key=lambda cell: len(cell.runs))
        return None


def our_network(cell: Cell) -> str:
    """Our network and data in words."""
    skips = " with extra skips" if str(cell.actual("model")).endswith("_extra_skip") else ""
    return f"{our_model(cell)}{skips}, {our_data(cell)}"


def panels_of(data: ItemData, split: str = "") -> list[Panel]:
    """The cells with runs, grouped by our network and data, the fact `split`, and the scale if it is not that of most; those of
    paper scale come first. Cells with the same runs are merged."""
    groups: dict[str, tuple[dict[str, None], dict[frozenset[tuple[str, str]], Cell]]] = {}
    for cell in sorted(data.results.shown, key=lambda cell: cell.runs[0].row["scale"] != "paper"):
        extra = fact(cell, split) if split else ""
        scale = cell.runs[0].row["scale"]
        other = f"{scale} scale" if scale != data.results.scale else ""
        name = ", ".join(filter(None, (our_network(cell), extra, other)))
        papers, cells = groups.setdefault(name, ({}, {}))
        if cell.is_proxy:
            papers[panel_of(cell)] = None
        trainings = frozenset(run.training for run in cell.runs)
        cells.setdefault(trainings, Cell({}, cell.ours, cell.runs))
    return [Panel(name, tuple(papers), tuple(cells.values()), data.pool) for name, (papers, cells) in groups.items()]


def timed(panel: Panel) -> Panel:
    """A panel with runs of one processor alone, whose times can be compared: those that had their machine to themselves if they
    fill half of the cells, of several processors those with most runs, else those that fill most cells; its name tells which."""

    def kind(run: Run) -> tuple[str, bool]:
        return run.row.get("processor", ""), not panel.pool.shared_machine(run)

    def restricted(processor: str, alone: bool) -> list[Cell]:
        several = (tuple(run for run in cell.runs if kind(run) == (processor, alone)) for cell in panel.cells)
        return [replace(cell, runs=runs) for cell, runs in zip(panel.cells, several) if runs]

    kinds = sorted({kind(run) for cell in panel.cells for run in cell.runs})
    filled = {one: restricted(*one) for one in kinds}

    def merit(one: tuple[str, bool]) -> tuple[bool, int]:
        are_alone = one[1] and 2 * len(filled[one]) >= len(panel.cells)
        return are_alone, sum(len(cell.runs) for cell in filled[one]) if are_alone else len(filled[one])

    processor, alone = max(kinds, key=merit)
    words = f"{processor or 'unknown processor'}, {'alone' if alone else 'shared'}"
    return replace(panel, name=f"{panel.name}; {words}", cells=tuple(filled[processor, alone]))


def timed_panels(panels: Iterable[Panel]) -> tuple[list[Panel], str]:
    """Panels as `timed`, and a sentence on those that are left out: if some had their machine to themselves, those that shared
    theirs are, as what ran beside them differs from point to point."""
    kinds: dict[bool, list[Panel]] = {True: [], False: []}
    for panel in map(timed, panels):
        kinds[any(panel.pool.shared_machine(run) for cell in panel.cells for run in cell.runs)].append(panel)
    if not kinds[False]:
        return kinds[True], ""
    names = "; ".join(panel.name.removesuffix(", shared") for panel in kinds[True])
    return kinds[False], f" Left out, as other programs computed beside it: {names}." if names else ""


def by_length(panel: Panel) -> list[Panel]:
    """Divide a panel by training length, as runs of different lengths are not compared."""
    lengths = dict.fromkeys(cell.runs[0].row["total_steps"] for cell in panel.cells)
    alike = (tuple(cell for cell in panel.cells if cell.runs[0].row["total_steps"] == length) for length in lengths)
    return [replace(panel, cells=cells) for cells in alike]


def comparable(data: ItemData, split: str = "", same_length: bool = False) -> list[Panel]:
    """The panels in which cells can be compared with a baseline that is below the ceiling of its metric."""
    found = [part for panel in panels_of(data, split) for part in (by_length(panel) if same_length else [panel])]
    kept = []
    for panel in found:
        first = panel.first(data.spec.base)
        accuracy = estimate_of(first, data.spec.column) if first and is_accuracy(first.runs[0].row) else None
        if first and len(panel.cells) > 1 and not (accuracy and accuracy.mean > CEILING):
            kept.append(panel)
    return kept


def differences(panel: Panel, base: Cell | None, column: str) -> dict[int, Estimate]:
    """Index of a cell -> its difference to a baseline, paired by seed and estimated as in verdicts; without a baseline, its own
    value."""
    found = {}
    for index, cell in enumerate(panel.cells):
        if base is None and (values := readings(cell, column)):
            found[index] = over_seeds(list(values.values()))
        elif gap := difference(cell, base, column, panel.pool):
            found[index] = gap
    return found


def difference(cell: Cell, base: Cell | None, column: str, pool: Pool) -> Estimate | None:
    """The difference of a cell to its baseline; None without one, and for the baseline itself."""
    if base is None or cell is base:
        return None
    return contrast([cell], [base], (), (column, column)).estimate(pool)


def cost_against(cell: Cell, base: Cell | None) -> float | None:
    """Cost relative to a baseline, or to the run's static q_max if the baseline has no recorded cost."""
    own, other = estimate_of(cell, "gbitops"), estimate_of(base, "gbitops") if base else None
    if own and other and other.mean:
        return own.mean / other.mean
    relative = estimate_of(cell, "relative_to_static")
    return relative.mean if relative else None


def metric_name(cells: Sequence[Cell], column: str = "final") -> str:
    """The main metric of the runs, with its unit; of their best evaluation if that is the column."""
    words = cells[0].runs[0].row["metric"].replace("_", " ").replace("hr10", "HR@10") if cells else "result"
    words = f"best {words}" if column == "best" else words
    return f"{words} (%)" if "accuracy" in words or "HR@10" in words else words


def status_line(data: ItemData) -> str:
    """Scale, seeds, distinct runs and cells, and what they are a proxy for; or the commands to run."""
    results = data.results
    if not results.done:
        return f"no runs yet: {'; '.join(data.commands)}" if data.commands else ""
    states = [
        f"{part.scale} scale, {part.trials}, {len(part.runs)} distinct trainings in {len(part.done)} of {len(part.cells)} cells"
        for part in results.parts
    ]
    proxies = (panel for panel in panels_of(data) if panel.proxy_for)
    return ". ".join([*states, *(f"{panel.title} is a proxy for {'; '.join(panel.proxy_for)}" for panel in proxies)])
