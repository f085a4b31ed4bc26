"""What a sweep ends with: its finished runs, beside the published numbers of the item that it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as Shown

from bitcycle.analysis.aggregation import Cell, Run, read_runs
from bitcycle.analysis.collect import SUMMARY, summary_row
from bitcycle.analysis.contrast import Pool
from bitcycle.analysis.items import PUBLISHED, read_items
from bitcycle.figure.make import RESULTS, Places, gather
from bitcycle.figure.table import Table, number, tables_of
from bitcycle.resources import resource_root
from bitcycle.training.run_folder import RunFolder

GROUPED = ("scale", "model", "dataset", "quantizer", "schedule", "q_min", "q_max", "cycles", "total_steps", "hash")
"""Columns of runs.csv that tell runs apart which differ in more than their seed."""


def show_sweep(name: str, folders: Iterable[RunFolder]) -> None:
    """Print the tables of the sweep file `name` (empty: of no file) on standard output."""
    console = Console(width=None if Console().is_terminal else 180)
    for table in sweep_tables(name, folders):
        shown = Shown(*table.headings, title=table.caption, title_justify="left")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)


def sweep_tables(name: str, folders: Iterable[RunFolder]) -> list[Table]:
    """The tables of an item with these runs alone; a plain one where no item knows them, none without finished runs."""
    rows = [summary_row(folder) for folder in folders if folder.state() == "done" and folder.config.exists()]
    texts = [{key: "" if value is None else str(value) for key, value in row.items()} for row in rows]
    runs = read_runs(texts, Path(SUMMARY))
    root = resource_root()
    found: list[Table] = []
    for item in read_items(root / PUBLISHED) if runs and name else ():
        if item.sweep == name:
            data = gather(item, Pool(runs), Places(root, RESULTS))
            found += tables_of(data) if data.results.done else []
    return found or ([measured(runs)] if runs else [])


def measured(runs: Sequence[Run]) -> Table:
    """One row for each setting: mean and sample standard deviation of the last evaluation over its seeds, and its cost."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run.row[column] for column in GROUPED), []).append(run)
    records = []
    for key, group in groups.items():
        value, cost = Cell({}, {}, tuple(group)).value("final"), group[0].number("relative_to_static")
        assert value is not None, "a finished run has a last evaluation"
        named = {name.replace("_", " "): text for name, text in zip(GROUPED[:-1], key)}
        numbers = {"final": number(value.mean), "deviation": number(value.std), "n": str(value.n)}
        share = {"of static": "" if cost is None else f"{cost:.3f}"}
        records.append({**named, "metric": group[0].row["metric"], **numbers, **share})
    return Table("Measured", records)
