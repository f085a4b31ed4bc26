"""`make status`: the runs in a folder, and the run states and remaining time of every sweep."""

import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.table import Table

from bitcycle.configuration import SCALES
from bitcycle.door import parser_of
from bitcycle.errors import EXIT_DONE
from bitcycle.files import RUNS, resource_root
from bitcycle.sweep.local import useful_workers
from bitcycle.sweep.registry import FINISHED, STATES, SweepRun, distinct, sweep_index
from bitcycle.sweep.slurm import states_in_queue
from bitcycle.training.display import console
from bitcycle.training.report import status_table

NOTE_LETTERS = 70

Seconds = dict[tuple[object, ...], list[float]]
"""Kind of run -> training time of each finished run: seconds per sample, or per run if the length is given in epochs."""


class Speeds:
    """Estimates the duration of a run from finished runs of the same kind.

    The kind is network, dataset, quantizer and schedule or, if no such run is finished, network and dataset. `recorded`, from
    any machine, serves for kinds of which none of `runs` is finished.
    """

    def __init__(self, runs: Iterable[SweepRun], recorded: Seconds | None = None) -> None:
        finished = [(names_of(run), run.samples, run.folder.read_summary().get("seconds")) for run in runs if run.path]
        self.seconds = (recorded or {}) | _by_kind(finished)

    def of(self, run: SweepRun) -> float | None:
        """Remaining training time of a run in seconds; None if no run of its kind is finished."""
        known = next((self.seconds[key] for key in _kinds(names_of(run), run.samples) if key in self.seconds), None)
        if known is None:
            return None
        status = run.folder.read_status()
        done: float = status.get("step", 0) / max(status.get("total_steps", 0), 1)
        return statistics.fmean(known) * (run.samples or 1) * (1 - min(done, 1.0))

    def left(self, runs: Iterable[SweepRun], workers: int) -> str:
        """Remaining time of unfinished runs, `workers` in parallel, as text; empty if there are none."""
        seconds = [self.of(run) for run in runs if run.path]
        known, unknown = [each for each in seconds if each is not None], seconds.count(None)
        time = [str(timedelta(seconds=round(sum(known) / workers)))] if known else []
        return " + ".join(time + [f"{unknown} runs of a kind never measured"] * bool(unknown))


def recorded_seconds(rows: Iterable[Mapping[str, str]]) -> Seconds:
    """The training time of the runs in a summary file."""
    timed = [(row, json.loads(row["settings"])["training"]) for row in rows if row.get("seconds")]
    samples = [length["steps"] and length["steps"] * length["batch_size"] for _, length in timed]
    kinds = (tuple(row[name] for name in ("model", "dataset", "quantizer", "schedule")) for row, _ in timed)
    return _by_kind(zip(kinds, samples, (row["seconds"] for row, _ in timed)))


def measured_seconds(runs: Iterable[tuple[SweepRun, float]]) -> Seconds:
    """The training time of runs that were timed without being trained."""
    return _by_kind((names_of(run), run.samples, seconds) for run, seconds in runs)


def _by_kind(runs: Iterable[tuple[tuple[str, ...], int | None, Any]]) -> Seconds:
    found: Seconds = {}
    for names, samples, seconds in runs:
        for kind in _kinds(names, samples) if seconds is not None else ():
            found.setdefault(kind, []).append(float(seconds) / (samples or 1))
    return found


def names_of(run: SweepRun) -> tuple[str, ...]:
    """Network, dataset, quantizer and schedule, from the folder's name without its hash."""
    return tuple(run.folder.path.parent.name.split("-")[:-1])


def _kinds(names: tuple[str, ...], samples: int | None) -> list[tuple[object, ...]]:
    """Kinds of runs with the same duration, from specific to general."""
    return [(*names, samples), (*names, samples is None), (*names[:2], samples is None)]


def sweeps_table(
    sweeps: Sequence[tuple[str, Sequence[SweepRun]]], title: str, workers: int, recorded: Seconds | None = None
) -> Table:
    """One row per sweep: number of runs in each state, time left, and a note; the last row counts all distinct runs."""
    everything = distinct(runs for _, runs in sweeps)
    speeds = Speeds(everything, recorded)
    ready = [(name, runs) for name, runs in reversed(sweeps) if not any(run.waits_for for run in runs)]
    sweep_of = {run.path: name for name, runs in ready for run in runs}
    rows = [(name, [(run, run.state) for run in runs]) for name, runs in [*sweeps, ("all, each run once", everything)]]
    shown = [state for state in STATES if any(state == its for _, states in rows for _, its in states)]
    table = Table("sweep", "runs", *shown, "time left", "note", title=title)
    for name, states in rows:
        counts = Counter(state for _, state in states)
        left = speeds.left((run for run, state in states if state not in FINISHED), workers)
        if name == rows[-1][0]:
            table.add_section()
        table.add_row(
            name, str(len(states)), *(str(counts[state] or "") for state in shown), left, _note(states, sweep_of)
        )
    table.caption = f"time left: estimated from finished runs of the same kind, {workers} in parallel"
    return table


def mark_queue(runs: Sequence[SweepRun], queue: Mapping[Path, str]) -> list[SweepRun]:
    """The runs, with the states of those that are in the queue of a cluster."""
    return [replace(run, elsewhere=queue.get(Path(run.path), "")) if run.path else run for run in runs]


def _note(states: Sequence[tuple[SweepRun, str]], sweep_of: Mapping[str | None, str]) -> str:
    """The last update of a run in progress, the most frequent reasons of failed and invalid runs, and the sweep (else the run)
    that most of the waiting runs wait for."""
    running = [str(run.folder.read_status().get("updated", "")) for run, state in states if state == "running"]
    notes = [f"last update {max(running)}"] if any(running) else []  # a job may just begin
    for unhappy in ("failed", "wrong"):
        reasons = Counter(run.reason for run, state in states if state == unhappy)
        notes += [f"{count} {unhappy}: {reason}" for reason, count in reasons.most_common(1)]
    awaited = Counter(sweep_of.get(run.waits_for, run.waits_for) for run, _ in states if run.waits_for)
    notes += [f"{count} waiting for {name}" for name, count in awaited.most_common(1)]
    return "; ".join(notes).replace("\n", " ")[:NOTE_LETTERS]


def main() -> int:
    """Print the tables of the scales on the command line, by default of all with runs; returns the exit code."""
    screen = console(180)
    parser = parser_of("status")
    words = f"paper, mini or smoke; default: every scale with runs in {RUNS}"
    parser.add_argument("scales", nargs="*", metavar="SCALE", help=words)
    scales = parser.parse_args().scales or [scale for scale in SCALES if (RUNS / scale).is_dir()]
    if not scales:
        screen.print(status_table(RUNS))
    sweeps = {scale: list(sweep_index(resource_root(), scale, str(RUNS)).items()) for scale in scales}
    paths = {Path(run.path) for its in sweeps.values() for _, runs in its for run in runs if run.path}
    queue = states_in_queue(RUNS, sorted(paths))  # once for all scales, as it may take seconds
    for scale, its in sweeps.items():
        screen.print(status_table(RUNS / scale))
        marked = [(name, mark_queue(runs, queue)) for name, runs in its]
        screen.print(sweeps_table(marked, f"sweeps at scale {scale}", useful_workers()))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
