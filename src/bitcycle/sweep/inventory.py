"""The runs of a sweep and their states: done, missing, running, queued or wrong; each run once, whatever it is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from bitcycle.configuration import RunConfig
from bitcycle.settings import SettingError
from bitcycle.sweep.grid import Overrides, command_line
from bitcycle.training.plan import locate, make_plan
from bitcycle.training.run_folder import RunFolder

STATES = ("done", "running", "queued", "resumable", "failed", "missing", "wrong")


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        overrides: its settings, as on the command line.
        config: the validated configuration; None if it is wrong.
        problem: what is wrong with it, or why it failed last time.
        state: one of STATES; resumable: begun, and nobody goes on with it now.
    """

    overrides: Overrides
    config: RunConfig | None
    problem: str
    state: str

    @property
    def arguments(self) -> list[str]:
        """The run as arguments of train.py."""
        return command_line(self.overrides)

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        assert self.config is not None, "a wrong configuration has no folder"
        return locate(self.config)


def take_stock(runs: Iterable[Overrides], compose: Callable[[Overrides], RunConfig | str]) -> list[SweepRun]:
    """Every run of a sweep once, with its state.

    Runs that compute the same (static precision whatever q_min, say) are one; the first stands for all. Runs that differ
    by their seed alone are composed once.

    Args:
        runs: as expanded from grids.
        compose: the validated configuration of a run's settings, or what is wrong with them.
    """
    found: list[SweepRun] = []
    seen: set[Path] = set()
    composed: dict[str, RunConfig | str] = {}
    for run in runs:
        key = str(sorted((name, value) for name, value in run.items() if name != "seed"))
        if key not in composed:
            composed[key] = _checked(compose(run))
        config = composed[key]
        if isinstance(config, str):
            found.append(SweepRun(run, None, config, "wrong"))
            continue
        if run.get("seed", "").isdigit():
            config = replace(config, seed=int(run["seed"]))
        folder = locate(config)
        if folder.path not in seen:
            seen.add(folder.path)
            found.append(SweepRun(run, config, *state_of(folder)))
    return found


def _checked(config: RunConfig | str) -> RunConfig | str:
    """The configuration, or what keeps it from having a folder."""
    try:
        if not isinstance(config, str):
            locate(config)
    except SettingError as error:
        return str(error)
    return config


def state_of(folder: RunFolder) -> tuple[str, str]:
    """(why it failed last time, one of STATES) of a run folder."""
    status = folder.read_status()
    if folder.state() == "done":
        return "", "done"
    if folder.is_in_use():
        return "", "running"
    if status.get("state") == "failed":
        return str(status.get("reason") or ""), "failed"
    return "", "resumable" if folder.checkpoint.exists() else "missing"


def mark_queued(runs: Sequence[SweepRun], queued: Callable[[Sequence[Path]], set[Path]]) -> list[SweepRun]:
    """The runs, where those that wait or run in the queue of a cluster say so.

    Args:
        runs: as found on disk.
        queued: tells which of some run folders are in the queue.
    """
    folders = queued([run.folder.path for run in runs if run.config is not None and run.state != "done"])
    return [
        replace(run, state="queued") if run.state not in ("done", "wrong") and run.folder.path in folders else run
        for run in runs
    ]


def count_states(runs: Sequence[SweepRun]) -> str:
    """How many runs are in which state, in words.

    >>> count_states([])
    'no runs'
    """
    counts = Counter(run.state for run in runs)
    parts = [f"{counts[state]} {state}" for state in STATES if counts[state]]
    return f"{len(runs)} runs: {', '.join(parts)}" if runs else "no runs"


def sweep_table(runs: Sequence[SweepRun], title: str) -> Table:
    """One row for each run: what sets it apart, its state, its length and cost."""
    keys = [key for key in dict.fromkeys(k for run in runs for k in run.overrides) if _differs(runs, key)]
    table = Table("#", *keys, "state", "steps", "GBitOps", "of static", title=title)
    plans: dict[str, tuple[str, str, str]] = {}
    for number, run in enumerate(runs, 1):
        key = str({name: value for name, value in run.overrides.items() if name != "seed"})
        if key not in plans:
            plans[key] = _planned(run)
        table.add_row(str(number), *(run.overrides.get(name, "") for name in keys), run.state, *plans[key])
    return table


def described(run: SweepRun) -> dict[str, Any]:
    """A run as plain values: its settings, state and folder, and what is wrong with it."""
    folder = str(run.folder.path) if run.config is not None else None
    return {"overrides": run.overrides, "state": run.state, "run_dir": folder, "problem": run.problem or None}


def _differs(runs: Sequence[SweepRun], key: str) -> bool:
    return len({run.overrides.get(key) for run in runs}) > 1


def _planned(run: SweepRun) -> tuple[str, str, str]:
    """Steps, cost, and cost relative to static, in words."""
    if run.config is None:
        return "", run.problem, ""
    try:
        plan = make_plan(run.config)
    except SettingError as error:
        return "", str(error), ""
    cost = plan.cost()
    if cost is None:
        least, most = plan.cost_bounds()
        return str(plan.total_steps), f"{least.gbitops:.3g} to {most.gbitops:.3g}", "reacts to training"
    return str(plan.total_steps), f"{cost.gbitops:.4g}", f"{cost.relative_to_static:.3f}"
