"""Report of a sweep before its launch, selection of the runs to launch, and exit code of the sweep."""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bitcycle.errors import (
    EXIT_DATA_MISSING,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_WRONG_CONFIGURATION,
    DataError,
)
from bitcycle.hardware.base import Cost
from bitcycle.settings import SettingError
from bitcycle.sweep.registry import STATES, SweepRun
from bitcycle.training.display import console
from bitcycle.training.plan import make_plan

SEVERITY = (EXIT_DONE, EXIT_FAILED, EXIT_DATA_MISSING, EXIT_WRONG_CONFIGURATION, EXIT_INTERRUPTED)
"""Exit codes from best to worst. Interrupted is the worst: running the command again reveals the other errors."""


class SweepEnded(BaseException):
    """End of a sweep, with the worst exit code of its runs.

    A BaseException, as Hydra discards the sweeper's return value and handles every Exception itself.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def worst(codes: Sequence[int]) -> int:
    """The worst of several exit codes; an unknown code, such as that of a killed process, counts as failed.

    >>> worst([0, 2, 1]), worst([0, -9]), worst([])
    (2, 1, 0)
    """
    known = [code if code in SEVERITY else EXIT_FAILED for code in codes]
    return max(known, key=SEVERITY.index, default=EXIT_DONE)


class Planned(NamedTuple):
    """What a dry run tells of a run: number of steps, and the least and most cost, which only differ if the precision depends on
    the training; or why it cannot be planned, with the exit code of this failure."""

    steps: int | None = None
    least: Cost | None = None
    most: Cost | None = None
    problem: str = ""
    code: int = EXIT_DONE

    def cells(self) -> tuple[str, str, str]:
        """Steps, GBitOps and their ratio to static precision, as text; the problem in place of the cost."""
        if self.least is None or self.most is None:
            return "", self.problem, ""
        least, most = self.least, self.most
        if least is not most:
            return str(self.steps), f"{least.gbitops:.3g} to {most.gbitops:.3g}", "adaptive"
        return str(self.steps), f"{least.gbitops:.4g}", f"{least.relative_to_static:.3f}"

    def facts(self) -> dict[str, Any]:
        """The same as plain values, as in `dry_run=json` of a single run."""
        bounds = {"least": self.least and self.least.summary(), "most": self.most and self.most.summary()}
        cost = bounds["least"] if self.least is self.most else None
        return {"total_steps": self.steps, "cost": cost, "cost_bounds": bounds}


def report(
    runs: Sequence[SweepRun], title: str, dry_run: str, waits: bool = False, plans: Mapping[str, Planned] | None = None
) -> list[SweepRun]:
    """Print the states of a sweep's runs and return the runs to launch or to wait for.

    Runs that are done, invalid or waiting for another run's weights are omitted, as are those in progress outside a job queue,
    unless the launcher `waits` for them. If `dry_run` is true or json, all runs are also printed to standard output, as a table
    with state and cost (`plans`, from `plans_of`, if they are made already) or as JSON, which has the same.
    """
    states = [(run, run.state) for run in runs]
    title = (f"{title}: " if title else "") + count_states([state for _, state in states])
    if dry_run == "json":
        plans = plans_of(runs) if plans is None else plans
        print(json.dumps([_facts(run, state, plans[_plan_key(run)]) for run, state in states]))
    elif dry_run == "true":
        console(200).print(sweep_table(runs, title, plans))
    print(title, file=sys.stderr)
    words = {"wrong": "wrong configuration", "waiting": "waiting for another run"}
    for run, state in states:
        if state in words:
            print(f"{words[state]}: {run.problem} [{' '.join(run.arguments)}]", file=sys.stderr)
        elif state == "running":
            print(
                f"{'comes last' if waits else 'skipped'}, as another process is training it: {run.path}",
                file=sys.stderr,
            )
    omitted = ("done",) if waits else ("done", "running")
    return [run for run, state in states if run.path and state not in omitted]


def count_states(states: Sequence[str]) -> str:
    """The number of runs in each state, as text.

    >>> count_states(["done", "missing", "done"]), count_states([])
    ('3 runs: 2 done, 1 missing', 'no runs')
    >>> count_states(["done"])
    '1 run: 1 done'
    """
    counts = Counter(states)
    number = "1 run" if len(states) == 1 else f"{len(states)} runs"
    return f"{number}: " + ", ".join(f"{counts[s]} {s}" for s in STATES if counts[s]) if states else "no runs"


def plans_of(runs: Sequence[SweepRun]) -> dict[str, Planned]:
    """The plan of each distinct run, without its seed: by its hash, as settings may depend on the seed."""
    plans: dict[str, Planned] = {}
    for run in track(runs, "planning", console=Console(stderr=True), transient=True):
        key = _plan_key(run)
        plans[key] = plans.get(key) or _planned(run)
    return plans


def sweep_table(runs: Sequence[SweepRun], title: str, plans: Mapping[str, Planned] | None = None) -> Table:
    """One row for each run: the settings that vary within the sweep, state, number of steps, and cost, or why it has none."""
    plans = plans_of(runs) if plans is None else plans
    keys = dict.fromkeys(key for run in runs for key in run.overrides)
    shown = [key for key in keys if len({run.overrides.get(key) for run in runs}) > 1]
    table = Table("#", *shown, "state", "steps", "GBitOps", "of static", title=title)
    for number, run in enumerate(runs, 1):
        plan = plans[_plan_key(run)]
        settings = (run.overrides.get(name, "") for name in shown)
        steps, *cost = plan.cells()
        table.add_row(str(number), *settings, run.state, steps, *cost)
    return table


def _facts(run: SweepRun, state: str, plan: Planned) -> dict[str, Any]:
    problem = run.reason or plan.problem or None
    return {"overrides": run.overrides, "state": state, "run_dir": run.path, "problem": problem, **plan.facts()}


def _plan_key(run: SweepRun) -> str:
    return run.key[1] if run.path else str(run.overrides)


def _planned(run: SweepRun) -> Planned:
    if run.config is None:
        return Planned(problem=run.problem)
    try:
        plan = make_plan(run.config)
    except (SettingError, DataError) as error:
        return Planned(problem=str(error), code=error.exit_code)
    cost = plan.cost()
    return Planned(plan.total_steps, *(plan.cost_bounds() if cost is None else (cost, cost)))
