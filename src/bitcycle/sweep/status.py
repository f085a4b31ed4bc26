"""`make status`: the runs below a folder, and every sweep with the states of its runs and the time that is left."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bitcycle.errors import EXIT_DONE, EXIT_WRONG_CONFIGURATION
from bitcycle.resources import resource_root
from bitcycle.settings import SettingError
from bitcycle.sweep.item import SCALES
from bitcycle.sweep.local import useful_workers
from bitcycle.sweep.sweep_index import STATES, SweepIndex, SweepRun, distinct, sweep_index
from bitcycle.training.run_folder import RunFolder
from bitcycle.training.status import DEFAULT_ROOT, status_table

SHOWN = ("done", "running", "failed", "resumable", "missing", "wrong")
NOTE_LETTERS = 70


class Speeds:
    """How long runs take, from finished ones of the same kind: network, data, quantizer and schedule, or else network and data.

    Args:
        runs: finished or not; those of a known length tell the seconds of a sample, the others only those of a run.
    """

    def __init__(self, runs: Iterable[SweepRun]) -> None:
        self.seconds: dict[tuple[object, ...], list[float]] = {}
        for run in runs:
            summary = run.folder.read_summary()
            if "seconds" in summary:
                for key in _keys(run):
                    self.seconds.setdefault(key, []).append(float(summary["seconds"]) / (run.samples or 1))

    def of(self, run: SweepRun) -> float | None:
        """Seconds of training that are left of a run; None where no run of its kind is finished."""
        known = next((self.seconds[key] for key in _keys(run) if key in self.seconds), None)
        if known is None:
            return None
        status = run.folder.read_status()
        done: float = status.get("step", 0) / max(status.get("total_steps", 0), 1)
        return statistics.fmean(known) * (run.samples or 1) * (1 - min(done, 1.0))


def _keys(run: SweepRun) -> list[tuple[object, ...]]:
    kind = _kind(run.folder)
    return [(*kind, run.samples), (*kind, run.samples is None), (*kind[:2], run.samples is None)]


def _kind(folder: RunFolder) -> tuple[str, ...]:
    """What the folder's name says of a run, without its hash."""
    return tuple(folder.path.parent.name.split("-")[:-1])


@dataclass(frozen=True)
class SweepStatus:
    """How far a sweep is.

    Attributes:
        counts: state -> number of runs.
        seconds: that are left of runs whose speed is known, one after the other.
        unknown: number of unfinished runs of a kind that was never measured.
        notes: last sign of life, reasons of failures, what is wrong.
    """

    counts: Counter[str]
    seconds: float
    unknown: int
    notes: tuple[str, ...]


def status_of(runs: Sequence[SweepRun], speeds: Speeds) -> SweepStatus:
    """How far some runs are."""
    states = [(run, run.state) for run in runs]
    left = [speeds.of(run) for run, state in states if state not in ("done", "wrong")]
    running = [str(run.folder.read_status().get("updated", "")) for run, state in states if state == "running"]
    failed = Counter(str(run.folder.read_status().get("reason")) for run, state in states if state == "failed")
    wrong = Counter(run.problem for run, state in states if state == "wrong")
    return SweepStatus(
        Counter(state for _, state in states),
        sum(seconds for seconds in left if seconds is not None),
        sum(seconds is None for seconds in left),
        (
            *([f"last sign of life {_ago(max(running))}"] if running else []),
            *(f"{count} failed: {reason}" for reason, count in failed.most_common(1)),
            *(f"{count} wrong: {problem}" for problem, count in wrong.most_common(1)),
        ),
    )


def sweeps_table(index: SweepIndex, speeds: Speeds, scale: str, workers: int) -> Table:
    """One row for each sweep that has runs at a scale, and one for all of them, each run counted once."""
    table = Table("sweep", "runs", *SHOWN, "time left", "note", title=f"sweeps at scale {scale}")
    for name, runs in index.items():
        table.add_row(name, *_cells(status_of(runs, speeds), workers))
    everything = status_of(distinct(index), speeds)
    table.add_section()
    table.add_row("all, each run once", *_cells(everything, workers))
    table.caption = (
        f"time left: training of runs of the same kind that are finished, {workers} at a time; ? where there is none"
    )
    return table


def _cells(status: SweepStatus, workers: int) -> list[str]:
    counts = [str(status.counts[state] or "") for state in SHOWN]
    assert set(status.counts) <= set(STATES)
    note = "; ".join(status.notes).replace("\n", " ")
    return [str(status.counts.total()), *counts, _left(status, workers), note[:NOTE_LETTERS]]


def _left(status: SweepStatus, workers: int) -> str:
    """The time that is left, in words."""
    if not status.seconds and not status.unknown:
        return ""
    known = str(timedelta(seconds=round(status.seconds / workers))) if status.seconds else ""
    unknown = f"{status.unknown} runs: ?" if status.unknown else ""
    return " + ".join(part for part in (known, unknown) if part)


def _ago(moment: str) -> str:
    """How long ago a moment was, in words; the moment itself if it cannot be read."""
    try:
        return f"{(datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds():.0f} s ago"
    except ValueError:
        return moment or "unknown"


def main() -> int:
    """Print the tables of the scales on the command line, or of those that have runs; returns the exit code."""
    console = Console(width=None if Console().is_terminal else 180)
    scales = sys.argv[1:] or [scale for scale in SCALES if (DEFAULT_ROOT / scale).is_dir()]
    if not scales:
        console.print(status_table(DEFAULT_ROOT))
    for scale in scales:
        try:
            index = sweep_index(resource_root(), scale, str(DEFAULT_ROOT), _show_progress)
        except SettingError as error:
            print(f"wrong configuration: {error}", file=sys.stderr)
            return EXIT_WRONG_CONFIGURATION
        console.print(status_table(DEFAULT_ROOT / scale))
        console.print(sweeps_table(index, Speeds(run for run in distinct(index) if run.path), scale, useful_workers()))
    return EXIT_DONE


def _show_progress(files: Sequence[Path]) -> Iterable[Path]:
    return track(files, "looking at sweeps", console=Console(stderr=True), transient=True)


if __name__ == "__main__":
    sys.exit(main())
