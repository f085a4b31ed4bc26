"""What a sweep ends with: its finished runs, beside the published numbers of the item that it belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table as Shown

from bitcycle.analysis.aggregation import Cell, Results, Run, read_runs
from bitcycle.analysis.collect import SUMMARY, summary_row
from bitcycle.analysis.contrast import Pool
from bitcycle.analysis.items import PUBLISHED, Item, read_items
from bitcycle.figure.data import ItemData
from bitcycle.figure.make import gather
from bitcycle.figure.table import Table, tables_of
from bitcycle.resources import resource_root
from bitcycle.training.run_folder import RunFolder


def show_sweep(name: str, folders: Iterable[RunFolder]) -> None:
    """Print the tables of the sweep file `name` (empty: of no file) on standard output."""
    console = Console(width=None if Console().is_terminal else 180)
    for table in sweep_tables(name, folders):
        shown = Shown(*table.headings, title=table.caption, title_justify="left")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)


def sweep_tables(name: str, folders: Iterable[RunFolder]) -> list[Table]:
    """The tables of an item with these runs alone; of runs that no item knows, one row a setting; none without finished runs."""
    rows = [summary_row(folder) for folder in folders if folder.state() == "done" and folder.config.exists()]
    texts = [{key: "" if value is None else str(value) for key, value in row.items()} for row in rows]
    runs, root = read_runs(texts, Path(SUMMARY)), resource_root()
    items = [item for item in read_items(root / PUBLISHED) if runs and name and item.sweep == name]
    known = [gather(item, Pool(runs), root) for item in items]
    found = [table for data in known if data.results.done for table in tables_of(data)]
    return found or [
        table
        for scale in dict.fromkeys(run.row["scale"] for run in runs)
        for table in tables_of(ItemData(Item("", "", "", "", "", 0), Results(scale, settings_of(runs, scale))))
    ]


def settings_of(runs: Iterable[Run], scale: str) -> tuple[Cell, ...]:
    """A cell for each setting of the runs of a scale."""
    groups: dict[str, list[Run]] = {}
    for run in (run for run in runs if run.row["scale"] == scale):
        groups.setdefault(run.row["hash"], []).append(run)
    return tuple(Cell({}, {}, tuple(group)) for group in groups.values())
