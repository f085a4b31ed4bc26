"""`make reproduce SCALE=smoke`: train every run of every sweep at a scale, then make all analyses, figures and tables.

After an interruption, the same command resumes. The output is in results/reproduce/SCALE, separate from the committed results:
`index.html`, `figures/` and `summary/`. The run folders are those of the sweeps.
"""

import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from bitcycle.configuration import SCALES
from bitcycle.door import parser_of
from bitcycle.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from bitcycle.files import RUNS, resource_root
from bitcycle.guard import check_counts, guarded
from bitcycle.reproduction.analysis.collect import collect
from bitcycle.reproduction.campaign import Campaign, Part, only_campaign, train
from bitcycle.reproduction.figure.make import make_all
from bitcycle.reproduction.figure.page import Entry
from bitcycle.reproduction.manifest import record_all
from bitcycle.reproduction.measurement.after_sweep import analyse, sweeps_with_analyses
from bitcycle.sweep.composition import composing
from bitcycle.sweep.execution import worst
from bitcycle.sweep.local import LocalPool, useful_workers
from bitcycle.sweep.registry import sweep_files
from bitcycle.training.display import console

OUTPUT = Path("results/reproduce")


def reproduce(root: Path, scale: str, pool: LocalPool) -> int:
    """Train, analyse and draw what is in a repository; the exit code is 0 if every item is complete."""
    trained = train_all(root, scale, pool)
    if trained == EXIT_INTERRUPTED:
        return trained
    analysed, entries = draw_all(root, scale, OUTPUT / scale)
    console(120).print(items_table(entries, scale))
    complete = EXIT_FAILED if any(problem_of(entry, scale) for entry in entries) else EXIT_DONE
    return worst([trained, analysed, complete])


def draw_all(root: Path, scale: str, target: Path) -> tuple[int, list[Entry]]:
    """Make the analyses, figures and tables of all finished runs of a scale in the folder `target`; returns the exit code of
    analyses and collection, and the items."""
    settings = {"scale": scale, "results_root": str(RUNS)}
    analysed = analyse(sweeps_with_analyses(root), settings, root / "conf")
    record_all(root, (scale,))
    summary = target / "summary" / "runs.csv"
    collected = guarded(lambda: collect(RUNS / scale, summary))  # a damaged run keeps no figure from being drawn
    return worst([analysed, collected]), make_all(root, target, summary)


def train_all(root: Path, scale: str, pool: LocalPool, sweeps: Iterable[str] | None = None) -> int:
    """Train every unfinished run of the sweeps in their order, by default of all; returns the worst exit code. Raises RunError if
    another process trains in the same folder in this way."""
    parts = [Part(name, scale=scale) for name in (sweep_files(root) if sweeps is None else sweeps)]
    with composing(root / "conf") as compose, only_campaign(RUNS):
        return train(Campaign(root, parts, str(RUNS), compose), pool)


def problem_of(entry: Entry, scale: str) -> str:
    """What an item lacks after everything was drawn; empty if it is complete."""
    item, results = entry.data.item, entry.data.results
    if item.sweep and results.scale != scale:
        return "no runs"
    missing = len(results.cells) - len(results.done)
    return f"{missing} cells without runs" if missing else ""


def items_table(entries: Sequence[Entry], scale: str) -> Table:
    """One row for each item."""
    table = Table("item", "cells with runs", "files", "state", title=f"{len(entries)} items at scale {scale}")
    for entry in entries:
        results = entry.data.results
        cells = f"{len(results.done)} of {len(results.cells)}" if results.cells else "needs no runs"
        table.add_row(entry.data.item.id, cells, str(len(entry.files)), problem_of(entry, scale) or "complete")
    complete = sum(not problem_of(entry, scale) for entry in entries)
    table.caption = f"{complete} of {len(entries)} complete; {OUTPUT / scale / 'index.html'}"
    return table


def main() -> int:
    """Run the command; returns the exit code."""
    parser = parser_of("reproduce", __doc__)
    parser.add_argument("scale", choices=SCALES, help="size of every run")
    parser.add_argument("--workers", type=int, help="number of parallel runs; default: one per core or GPU")
    parser.add_argument("--runs-per-gpu", type=int, default=1, help="number of runs that share a GPU")
    given = parser.parse_args()
    return guarded(lambda: run(given, resource_root()))


def run(given: Namespace, root: Path) -> int:
    """Reproduce at the scale and with the number of parallel runs that are given."""
    check_counts(given, "workers", "runs_per_gpu")
    return reproduce(root, given.scale, LocalPool(given.workers or useful_workers(given.runs_per_gpu)))


if __name__ == "__main__":
    sys.exit(main())
