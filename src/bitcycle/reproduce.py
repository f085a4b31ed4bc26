"""`make reproduce SCALE=smoke`: trains every run of every sweep at a scale, then makes all analyses, figures and tables.

After an interruption the same command resumes. The output is in results/reproduce/SCALE, apart from the committed results:
`index.html`, `figures/` and `summary/`. The run folders are those of the sweeps.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from bitcycle.campaign import Campaign, Part, train
from bitcycle.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from bitcycle.resources import resource_root
from bitcycle.signals import stop_at_once
from bitcycle.sweep.composition import composing
from bitcycle.sweep.execution import worst
from bitcycle.sweep.local import LocalPool, useful_workers
from bitcycle.sweep.registry import SCALES, sweep_files


@dataclass(frozen=True)
class Reproduction:
    """Options of the command.

    Attributes:
        root: folder of `train.py`, `conf`, `sweeps` and `results/published`.
        scale: paper, mini or smoke.
        results_root: folder of the run folders.
    """

    root: Path
    scale: str
    results_root: str = "results/runs"

    @property
    def target(self) -> Path:
        """Output folder."""
        return Path("results") / "reproduce" / self.scale


def train_all(what: Reproduction, pool: LocalPool) -> int:
    """Train every unfinished run of every sweep; returns the worst exit code."""
    parts = [Part(name, scale=what.scale) for name in sweep_files(what.root)]
    with composing(what.root / "conf") as compose:
        return train(Campaign(what.root, parts, what.results_root, compose), pool)


def analyse(what: Reproduction) -> int:
    """Run every missing analysis whose runs are done; returns the worst exit code."""
    from bitcycle.measurement.after_sweep import analyse as analyse_runs
    from bitcycle.measurement.after_sweep import sweeps_with_analyses

    settings = {"scale": what.scale, "results_root": what.results_root}
    return analyse_runs(sweeps_with_analyses(what.root), settings, what.root / "conf")


class ItemState(NamedTuple):
    """State of an item: number of cells with runs, of all cells and of files, and a description of what is missing."""

    item: str
    cells: int
    all_cells: int
    files: int
    problem: str


def draw(what: Reproduction) -> list[ItemState]:
    """Collect the runs, draw every item, and return the state of each."""
    from bitcycle.analysis.collect import collect
    from bitcycle.figure.make import make_all
    from bitcycle.sweep.manifest import record_all

    record_all(what.root, (what.scale,))
    summary = what.target / "summary" / "runs.csv"
    collect(Path(what.results_root) / what.scale, summary)
    entries = make_all(what.root, what.target, summary)
    found = []
    for entry in entries:
        results = entry.data.results
        problem = ""
        if entry.data.item.sweep and results.scale != what.scale:
            problem = "no runs"
        elif len(results.done) < len(results.cells):
            problem = f"{len(results.cells) - len(results.done)} cells without runs"
        elif entry.data.item.kind != "missing-from-text" and not entry.files:
            problem = "neither picture nor table"
        found.append(ItemState(entry.data.item.id, len(results.done), len(results.cells), len(entry.files), problem))
    return found


def items_table(states: Sequence[ItemState], what: Reproduction) -> Table:
    """One row for each item."""
    table = Table("item", "cells with runs", "files", "state", title=f"{len(states)} items at scale {what.scale}")
    for state in states:
        cells = f"{state.cells} of {state.all_cells}" if state.all_cells else "needs no runs"
        table.add_row(state.item, cells, str(state.files), state.problem or "complete")
    complete = sum(not state.problem for state in states)
    table.caption = f"{complete} of {len(states)} complete; {what.target / 'index.html'}"
    return table


def reproduce(what: Reproduction, pool: LocalPool) -> int:
    """Train, analyse and draw; the exit code is 0 if every item is complete."""
    trained = train_all(what, pool)
    if trained == EXIT_INTERRUPTED:
        return trained
    analysed = analyse(what)
    states = draw(what)
    Console(width=None if Console().is_terminal else 120).print(items_table(states, what))
    complete = EXIT_FAILED if any(state.problem for state in states) else EXIT_DONE
    return worst([trained, analysed, complete])


def main() -> int:
    """Run the command; returns the exit code."""
    from bitcycle.command import guarded
    from bitcycle.training.display import set_up_console

    parser = argparse.ArgumentParser(prog="bitcycle reproduce", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("scale", choices=SCALES)
    parser.add_argument("--workers", type=int, help="number of parallel runs; default: one per core or GPU")
    parser.add_argument("--runs-per-gpu", type=int, default=1, help="number of runs that share a GPU")
    arguments = parser.parse_args()
    stop_at_once()
    set_up_console()
    pool = LocalPool(arguments.workers or useful_workers(arguments.runs_per_gpu))
    return guarded(lambda: reproduce(Reproduction(resource_root(), arguments.scale), pool))


if __name__ == "__main__":
    sys.exit(main())
