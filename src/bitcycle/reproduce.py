"""`make reproduce SCALE=smoke`: trains every run of every sweep at a scale, then makes all analyses, figures and tables.

After an interruption the same command resumes. The output is in results/reproduce/SCALE, apart from the committed results:
`index.html`, `figures/` and `summary/`. The run folders are those of the sweeps.
"""

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from bitcycle.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_WRONG_CONFIGURATION
from bitcycle.resources import resource_root
from bitcycle.signals import stop_at_once
from bitcycle.sweep.execution import worst
from bitcycle.sweep.local import LocalPool, Start, starter, train_command, useful_workers
from bitcycle.sweep.registry import SCALES, SweepIndex, SweepRun, distinct, sweep_index
from bitcycle.sweep.status import show_progress

logger = logging.getLogger("bitcycle.reproduce")  # as a command this module is called __main__

POLL_SECONDS = 1.0
BEGUN = ("missing", "resumable", "failed")
"""States of runs that this command trains."""


@dataclass(frozen=True)
class Reproduction:
    """Options of the command.

    Attributes:
        root: folder of `train.py`, `conf`, `sweeps` and `results/published`.
        scale: paper, mini or smoke.
        workers: number of parallel runs.
        gpus: number of GPUs that they share.
        results_root: folder of the run folders.
    """

    root: Path
    scale: str
    workers: int
    gpus: int = 0
    results_root: str = "results/runs"

    @property
    def target(self) -> Path:
        """Output folder."""
        return Path("results") / "reproduce" / self.scale

    def index(self) -> SweepIndex:
        """All runs; runs whose initial weights have been trained since the last call become valid."""
        return sweep_index(self.root, self.scale, self.results_root, show_progress)


class Trained(NamedTuple):
    """The worst exit code of the runs, and whether a signal stopped them."""

    code: int
    stopped: bool


def train_all(what: Reproduction, start: Start) -> Trained:
    """Train every unfinished run.

    Runs are trained in rounds, as a run that starts from the weights of another sweep can only be composed once these exist.
    If only runs in progress in other processes are left, they are waited for. No run is tried twice.
    """
    tried: set[str] = set()
    codes: list[int] = []
    while True:
        states = [(run, run.state) for run in distinct(what.index().values())]
        counts = Counter(state for _, state in states)
        logger.info("%d runs: %s", len(states), ", ".join(f"{count} {state}" for state, count in counts.items()))
        chosen = [run for run, state in states if state in BEGUN and run.path not in tried]
        elsewhere = [run for run, state in states if state == "running"]
        if chosen:
            tried |= {str(run.path) for run in chosen}
            pool = LocalPool(min(what.workers, len(chosen)), what.gpus, start)
            codes += pool.run([train_command(what.root, run.arguments) for run in chosen])
            if pool.stopped_by is not None:
                return Trained(EXIT_INTERRUPTED, True)
        elif elsewhere:
            logger.info("waiting for %d runs that another process is training", len(elsewhere))
            while any(run.folder.is_in_use() for run in elsewhere):
                time.sleep(POLL_SECONDS)
        else:
            return Trained(worst([*codes, *_complain([run for run, state in states if state == "wrong"])]), False)


def _complain(wrong: Sequence[SweepRun]) -> list[int]:
    for problem, count in Counter(run.problem for run in wrong).items():
        logger.error("wrong configuration of %d runs: %s", count, problem)
    return [EXIT_WRONG_CONFIGURATION] * len(wrong)


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


def reproduce(what: Reproduction) -> int:
    """Train, analyse and draw; the exit code is 0 if every item is complete."""
    trained = train_all(what, starter(what.gpus))
    if trained.stopped:
        print("interrupted: run the same command again to resume", file=sys.stderr)
        return EXIT_INTERRUPTED
    analysed = analyse(what)
    states = draw(what)
    Console(width=None if Console().is_terminal else 120).print(items_table(states, what))
    complete = EXIT_FAILED if any(state.problem for state in states) else EXIT_DONE
    return worst([trained.code, analysed, complete])


def main() -> int:
    """Run the command; returns the exit code."""
    import torch

    from bitcycle.command import guarded
    from bitcycle.training.display import set_up_console

    parser = argparse.ArgumentParser(prog="bitcycle reproduce", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("scale", choices=SCALES)
    parser.add_argument("--workers", type=int, help="number of parallel runs; default: one per core or GPU")
    parser.add_argument("--runs-per-gpu", type=int, default=1, help="number of runs that share a GPU")
    arguments = parser.parse_args()
    stop_at_once()
    set_up_console()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    workers = arguments.workers or useful_workers(arguments.runs_per_gpu)
    return guarded(lambda: reproduce(Reproduction(resource_root(), arguments.scale, workers, gpus)))


if __name__ == "__main__":
    sys.exit(main())
