"""`make reproduce SCALE=smoke`: trains every run of every sweep at a scale, then makes all analyses, figures and tables.

After an interruption the same command resumes. The output is in results/reproduce/SCALE, apart from the committed results:
`index.html`, `figures/` and `summary/`. The run folders are those of the sweeps.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from bitcycle.analysis.collect import RUNS, collect
from bitcycle.campaign import Campaign, Part, train
from bitcycle.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from bitcycle.figure.make import make_all
from bitcycle.figure.page import Entry
from bitcycle.guard import guarded
from bitcycle.measurement.after_sweep import analyse, sweeps_with_analyses
from bitcycle.resources import resource_root
from bitcycle.signals import stop_at_once
from bitcycle.sweep.composition import composing
from bitcycle.sweep.execution import worst
from bitcycle.sweep.local import LocalPool, useful_workers
from bitcycle.sweep.manifest import record_all
from bitcycle.sweep.registry import SCALES, sweep_files
from bitcycle.training.display import set_up_console

OUTPUT = Path("results/reproduce")


class ItemState(NamedTuple):
    """State of an item: number of cells with runs, of all cells and of files, and a description of what is missing."""

    item: str
    cells: int
    all_cells: int
    files: int
    problem: str


def reproduce(root: Path, scale: str, pool: LocalPool) -> int:
    """Train, analyse and draw what is in a repository; the exit code is 0 if every item is complete."""
    trained = train_all(root, scale, pool)
    if trained == EXIT_INTERRUPTED:
        return trained
    settings = {"scale": scale, "results_root": str(RUNS)}
    analysed = analyse(sweeps_with_analyses(root), settings, root / "conf")
    record_all(root, (scale,))
    summary = OUTPUT / scale / "summary" / "runs.csv"
    collect(RUNS / scale, summary)
    states = [state_of(entry, scale) for entry in make_all(root, OUTPUT / scale, summary)]
    Console(width=None if Console().is_terminal else 120).print(items_table(states, scale))
    complete = EXIT_FAILED if any(state.problem for state in states) else EXIT_DONE
    return worst([trained, analysed, complete])


def train_all(root: Path, scale: str, pool: LocalPool) -> int:
    """Train every unfinished run of every sweep; returns the worst exit code."""
    parts = [Part(name, scale=scale) for name in sweep_files(root)]
    with composing(root / "conf") as compose:
        return train(Campaign(root, parts, str(RUNS), compose), pool)


def state_of(entry: Entry, scale: str) -> ItemState:
    """The state of an item after everything was drawn."""
    item, results = entry.data.item, entry.data.results
    done, cells, problem = len(results.done), len(results.cells), ""
    if item.sweep and results.scale != scale:
        problem = "no runs"
    elif done < cells:
        problem = f"{cells - done} cells without runs"
    elif item.kind != "missing-from-text" and not entry.files:
        problem = "neither picture nor table"
    return ItemState(item.id, done, cells, len(entry.files), problem)


def items_table(states: Sequence[ItemState], scale: str) -> Table:
    """One row for each item."""
    table = Table("item", "cells with runs", "files", "state", title=f"{len(states)} items at scale {scale}")
    for state in states:
        cells = f"{state.cells} of {state.all_cells}" if state.all_cells else "needs no runs"
        table.add_row(state.item, cells, str(state.files), state.problem or "complete")
    complete = sum(not state.problem for state in states)
    table.caption = f"{complete} of {len(states)} complete; {OUTPUT / scale / 'index.html'}"
    return table


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bitcycle reproduce", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("scale", choices=SCALES)
    parser.add_argument("--workers", type=int, help="number of parallel runs; default: one per core or GPU")
    parser.add_argument("--runs-per-gpu", type=int, default=1, help="number of runs that share a GPU")
    given = parser.parse_args()
    stop_at_once()
    set_up_console()
    pool = LocalPool(given.workers or useful_workers(given.runs_per_gpu))
    return guarded(lambda: reproduce(resource_root(), given.scale, pool))


if __name__ == "__main__":
    sys.exit(main())
