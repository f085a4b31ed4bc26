"""What a sweep says before it begins, what it launches, and the exit code that it ends with."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.console import Console

from bitcycle.errors import (
    EXIT_DATA_MISSING,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_WRONG_CONFIGURATION,
)
from bitcycle.sweep.inventory import SweepRun, count_states, described, sweep_table
from bitcycle.sweep.item import Sweep

SEVERITY = (EXIT_DONE, EXIT_FAILED, EXIT_DATA_MISSING, EXIT_WRONG_CONFIGURATION, EXIT_INTERRUPTED)
"""Exit codes from the best to the worst. Interrupted comes last: whoever runs the same command again learns of the others."""


class SweepEnded(BaseException):
    """A sweep is over, with the worst exit code of its runs; Hydra lets only this kind through, and drops results."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def worst(codes: Sequence[int]) -> int:
    """The worst of several exit codes; an unknown one (a killed process) counts as failed.

    >>> worst([0, 2, 1]), worst([0, -9]), worst([])
    (2, 1, 0)
    """
    known = [code if code in SEVERITY else EXIT_FAILED for code in codes]
    return max(known, key=SEVERITY.index, default=EXIT_DONE)


def runs_to_launch(runs: Sequence[SweepRun]) -> list[SweepRun]:
    """Those that somebody has to run, or to wait for: not those that are done, wrong, or running outside of any queue."""
    return [run for run in runs if run.state in ("missing", "resumable", "failed", "queued")]


def report(runs: Sequence[SweepRun], sweep: Sweep, dry_run: str) -> list[int]:
    """Say what the sweep consists of; returns exit codes of the runs that will not be launched.

    Args:
        runs: all of them, with their states.
        sweep: what the sweep file says.
        dry_run: true or json print the table of runs with state and cost on standard output.
    """
    title = f"{sweep.title}: {count_states(runs)}" if sweep.title else count_states(runs)
    if dry_run == "json":
        print(json.dumps([described(run) for run in runs]))
    elif dry_run == "true":
        Console(width=None if Console().is_terminal else 200).print(sweep_table(runs, title))
    print(title, file=sys.stderr)
    wrong = [run for run in runs if run.state == "wrong"]
    for run in wrong:
        print(f"wrong configuration: {run.problem} [{' '.join(run.arguments)}]", file=sys.stderr)
    for run in (run for run in runs if run.state == "running"):
        print(f"left to the process that trains it now: {run.folder.path}", file=sys.stderr)
    return [EXIT_WRONG_CONFIGURATION] * len(wrong)
