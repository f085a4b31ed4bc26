"""`make gpu-day HOURS=8`: what a machine can do for the claims within some hours. Untested on hardware other than CPUs.

First come the doctor, in a checkout the golden tests on the device of runs, and a quick benchmark. Then runs of each kind are
timed, and sweeps are trained in the order of claims per hour until the hours are over. At the end analyses, figures and tables
are made from what is finished, with the published numbers beside ours. The same command again resumes: what was measured is kept
in results/gpu-day/SCALE, and finished runs are not trained again.
"""

import logging
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.table import Table

from bitcycle.configuration import SCALES
from bitcycle.device import choose_device, widest_float
from bitcycle.doctor.__main__ import DEMO, examine
from bitcycle.doctor.duration import RunTime, measure_kinds
from bitcycle.door import parser_of
from bitcycle.errors import EXIT_DONE, EXIT_INTERRUPTED, RunError
from bitcycle.files import RUNS, read_object, resource_root, write_bytes, write_json
from bitcycle.guard import check_counts, guarded
from bitcycle.reproduction.analysis.claims import UNTRAINED, Claim, read_claims
from bitcycle.reproduction.analysis.items import PUBLISHED, Item, read_items
from bitcycle.reproduction.figure.page import Entry
from bitcycle.reproduction.figure.table import as_markdown, published_table
from bitcycle.reproduction.reproduce import draw_all, train_all
from bitcycle.settings import SettingError
from bitcycle.sweep.execution import worst
from bitcycle.sweep.local import LocalPool, useful_workers
from bitcycle.sweep.registry import FINISHED, SweepRun, distinct, sweep_index
from bitcycle.sweep.status import Seconds, Speeds, measured_seconds
from bitcycle.training.display import console

logger = logging.getLogger("bitcycle.reproduction.gpu_day")  # as a command this module is called __main__

OUTPUT = Path("results/gpu-day")
GOLDEN, GOLDEN_DEVICE = "tests/quantizer", "BITCYCLE_GOLDEN_DEVICE"
"""The golden tests in a checkout, and the environment variable that says where they compute."""
BENCHMARK = ("--quick",)
SHARE_OF_TIMING = 0.05
"""Share of the hours in which runs of each kind are timed, at most."""


class Entered(NamedTuple):
    """A sweep in the plan of a day: its claims that runs decide, and the hours of its unfinished runs, one after the other."""

    sweep: str
    runs: Sequence[SweepRun]
    claims: int
    hours: float
    unknown: int
    """Runs that could not be timed, as a rule because their data are missing."""

    @property
    def worth(self) -> float:
        """Claims per hour."""
        return self.claims / self.hours if self.hours else 0.0


def claims_of_sweeps(claims: Sequence[Claim], items: Sequence[Item]) -> Counter[str]:
    """Sweep -> number of claims that its runs decide alone or with those of other sweeps."""
    sweeps = {item.id: item.sweep for item in items if item.sweep}
    found: Counter[str] = Counter()
    for claim in claims:
        if claim.predicate not in UNTRAINED:
            names = [claim.item, *(f"{claim.paper}/{name}" for name in claim.items)]
            found.update({sweeps[name] for name in names if name in sweeps})
    return found


def planned(index: Mapping[str, Sequence[SweepRun]], claims: Mapping[str, int], seconds: Seconds) -> list[Entered]:
    """The sweeps with claims and with unfinished runs that were all timed, most claims per hour first, then by name; behind them
    those with runs that were not, which are not trained."""
    speeds = Speeds((run for runs in index.values() for run in runs), seconds)
    found = []
    for name, runs in index.items():
        left = [run for run in runs if run.path and run.state not in FINISHED]
        times = [speeds.of(run) for run in left]
        if left and claims.get(name):
            found.append(Entered(name, left, claims[name], sum(filter(None, times)) / 3600, times.count(None)))
    return sorted(found, key=lambda entered: (entered.unknown > 0, -entered.worth, entered.sweep))


def plan_table(plan: Sequence[Entered], hours: float, workers: int) -> Table:
    """The order of the day: claims, hours on this machine, and whether a sweep ends within the hours."""
    table = Table("sweep", "runs left", "claims", "hours", "claims per hour", "ends after", title=f"{hours:g} hours")
    passed = 0.0
    for entered in plan:
        passed += entered.hours / workers
        ends = f"{passed:.2f} h" if passed <= hours else "later: continued by the next day"
        if entered.unknown:
            ends = f"left out: {entered.unknown} runs not timed; `bitcycle doctor +sweeps={entered.sweep}` says why"
        numbers = (str(len(entered.runs)), str(entered.claims), f"{entered.hours:.2f}", f"{entered.worth:.2f}")
        table.add_row(entered.sweep, *numbers, ends)
    table.caption = (
        f"hours of unfinished runs one after the other, {workers} at a time; runs that sweeps share count in each"
    )
    return table


def timed_kinds(runs: Sequence[SweepRun], file: Path, budget: float) -> Seconds:
    """The time of one run of each kind, from a file; those that it lacks are measured until the budget of seconds is used up."""
    known: dict[str, float] = read_object(file)
    by_path = {run.path: run for run in runs}
    found = {path: by_path[path] for path in known if path in by_path}
    for run, time_or_error in measure_kinds(runs, budget, known=found.values()):
        if isinstance(time_or_error, RunTime):
            known[str(run.path)] = time_or_error.total
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, known)
        else:
            logger.warning("%s is not timed: %s", " ".join(run.arguments), str(time_or_error).split("\n")[0])
    return measured_seconds((by_path[path], seconds) for path, seconds in known.items() if path in by_path)


def examine_once(root: Path, target: Path) -> None:
    """The doctor, the golden tests on the device of runs, and a quick benchmark. Raises RunError if the machine or the tests are
    not sound. What is recorded in the folder `target` is not done again."""
    if examine(DEMO, as_json=False) != EXIT_DONE:
        raise RunError("not every finding above is fine: do what it says, and run the same command again")
    target.mkdir(parents=True, exist_ok=True)
    chosen, passed = choose_device("auto"), target / "golden"
    device = str(chosen) if widest_float(chosen) == torch.float64 else "cpu"  # they need float64, which Metal lacks
    if (root / GOLDEN).exists() and (not passed.exists() or passed.read_text() != device):
        command = [sys.executable, "-m", "pytest", "-q", "-m", "golden", "-p", "no:cacheprovider", GOLDEN]
        if subprocess.run(command, cwd=root, env={**os.environ, GOLDEN_DEVICE: device}, check=False).returncode:
            raise RunError("the golden tests fail here: results would not be those of the published formulas")
        write_bytes(passed, device.encode())
    if not (target / "benchmark.json").exists():
        output = ["--output", str(target / "benchmark.json")]
        subprocess.run([sys.executable, "-m", "bitcycle", "bench", *BENCHMARK, *output], check=False)


def paper_and_ours(entries: Sequence[Entry], scale: str) -> str:
    """The published numbers of each item that has runs of a scale, beside ours, as Markdown."""
    done = [entry.data for entry in entries if entry.data.published and entry.data.results.scale == scale]
    parts = [f"## {data.item.id}\n\n{as_markdown(published_table(data))}" for data in done if data.results.done]
    return "\n\n".join(parts) + "\n"


def gpu_day(root: Path, scale: str, hours: float, pool: LocalPool, dry: bool) -> int:
    """Examine, plan, train within the hours, draw; with `dry`, plan only. Returns the exit code: 75 if runs are left. Raises
    SettingError if there are no hours."""
    if hours <= 0:
        raise SettingError("--hours", hours, "is no time", "give hours above 0, such as 8")
    began, target, screen = time.monotonic(), OUTPUT / scale, console(140)
    if not dry:
        examine_once(root, target)
    index = sweep_index(root, scale, str(RUNS))
    claims = claims_of_sweeps(read_claims(root / PUBLISHED), read_items(root / PUBLISHED))
    runs = distinct(runs for name, runs in index.items() if claims[name])
    seconds = timed_kinds(runs, target / "seconds.json", 3600 * hours * SHARE_OF_TIMING)
    plan = planned(index, claims, seconds)
    screen.print(plan_table(plan, hours, pool.workers))
    if dry:
        return EXIT_DONE
    pool.until = began + 3600 * hours
    trained = train_all(root, scale, pool, [entered.sweep for entered in plan if not entered.unknown])
    analysed, entries = draw_all(root, scale, target)
    text = paper_and_ours(entries, scale)
    write_bytes(target / "paper-and-ours.md", text.encode())
    print(f"{text}\n{target / 'index.html'}")
    if trained == EXIT_INTERRUPTED:
        print("runs are left: the same command goes on with them", file=sys.stderr)
    return worst([trained, analysed])


def main() -> int:
    """Run the command; returns the exit code."""
    parser = parser_of("gpu-day", __doc__)
    parser.add_argument("--hours", type=float, default=8.0, help="time in hours; default: 8")
    parser.add_argument("--scale", choices=SCALES, default="paper", help="size of every run; default: paper")
    parser.add_argument("--workers", type=int, help="number of parallel runs; default: one per core or GPU")
    parser.add_argument("--dry-run", action="store_true", help="time runs of each kind and show the plan with hours")
    given = parser.parse_args()
    return guarded(lambda: run(given, resource_root()))


def run(given: Namespace, root: Path) -> int:
    """Spend the hours that are given with the number of parallel runs that is given."""
    check_counts(given, "workers")
    return gpu_day(root, given.scale, given.hours, LocalPool(given.workers or useful_workers()), given.dry_run)


if __name__ == "__main__":
    sys.exit(main())
