"""`make campaign`: trains the missing runs of a plan, a list of sweeps, in order and at low priority.

The plan is a YAML file, by default `sweeps/campaign.yaml`; the entries of its list `parts` are `Part`s:

    parts:
      - sweep: cpt/table2
        claim: what these runs test
        scale: mini
        only: {schedule: [static, CR]}

After an interruption the same command resumes the campaign; runs in the summary are not trained again. A failed run does not
stop the others; runs that failed before come last, and runs in progress in other processes are waited for. Results are added to
results/summary as runs end. `make reproduce` trains every sweep as one campaign.
"""

import logging
import math
import os
import re
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.table import Table
from yaml import YAMLError

from bitcycle.configuration import SCALES
from bitcycle.door import parser_of
from bitcycle.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_WRONG_CONFIGURATION, RunError
from bitcycle.files import RUNS, read_csv, resource_root, try_lock
from bitcycle.guard import check_counts, guarded
from bitcycle.reproduction.analysis.claims import read_claims
from bitcycle.reproduction.analysis.collect import SUMMARY, collect_folders, identity
from bitcycle.reproduction.analysis.frozen import check_frozen, read_families
from bitcycle.reproduction.analysis.items import BOARDS, PUBLISHED
from bitcycle.reproduction.manifest import record_launch
from bitcycle.settings import SettingError, nearest
from bitcycle.sweep.composition import composing
from bitcycle.sweep.execution import worst
from bitcycle.sweep.forkserver import NICENESS, PRIORITY_VARIABLE
from bitcycle.sweep.grid import Overrides, as_text, expand
from bitcycle.sweep.local import POLL_SECONDS, LocalPool, train_command
from bitcycle.sweep.progress import TELL_SECONDS
from bitcycle.sweep.registry import FINISHED, UNFINISHED, Compose, SweepRun, distinct, index_runs, mark, read_sweep
from bitcycle.sweep.status import Speeds, recorded_seconds, sweeps_table
from bitcycle.threads import THREADS, users_threads
from bitcycle.training.display import console
from bitcycle.training.run_folder import RunFolder

logger = logging.getLogger("bitcycle.reproduction.campaign")  # as a command this module is called __main__

PLAN = "sweeps/campaign.yaml"
REFRESH_SECONDS = 180.0
"""Minimum interval between updates of the summary while runs are in progress."""


@dataclass(frozen=True)
class Part:
    """Runs of one sweep."""

    sweep: str  # PAPER/ITEM, a file of `sweeps/`
    claim: str = ""  # what the runs test
    scale: str = "mini"
    overrides: dict[str, Any] = field(default_factory=dict)  # replace the sweep's settings; one run per value of a list
    only: dict[str, Any] = field(default_factory=dict)  # setting -> value or values; other runs are omitted
    seeds: int | None = None  # number of seeds, replacing the sweep's

    def expand(self, root: Path, results_root: str) -> list[Overrides]:
        """The settings of every run. Raises SettingError for a sweep or a scale that does not exist, for settings and values
        of `only` that no chosen run has, and for what would have no effect."""
        self._check()
        sweep = read_sweep(root / "sweeps" / f"{self.sweep}.yaml")
        if self.seeds is not None:
            sweep = replace(sweep, trials={**sweep.trials, self.scale: self.seeds})
        listed = {key: value if isinstance(value, list) else [value] for key, value in self.only.items()}
        wanted = {key: set(map(as_text, values)) for key, values in listed.items()}
        fixed = {"scale": self.scale, "results_root": results_root}
        runs = [run for given in expand([self.overrides], fixed) for run in sweep.expand(self.scale, given)]
        chosen = [run for run in runs if all(run.get(key) in values for key, values in wanted.items())]
        self._check_choice(runs, wanted)
        others = {key: values for key, values in wanted.items() if key != "seed"}
        seeds = {run["seed"] for run in runs if all(run.get(key) in values for key, values in others.items())}
        if self.seeds is not None and seeds != set(map(str, range(self.seeds))):
            problem = f"has no effect: {self.sweep} or `overrides` set the seeds to {', '.join(sorted(seeds))}"
            raise SettingError("seeds", self.seeds, problem, "omit it, and choose seeds as in only: {seed: [0, 1]}")
        return chosen

    def _check_choice(self, runs: list[Overrides], wanted: dict[str, set[str]]) -> None:
        """Raises SettingError for settings and values of `only` that no run has, or none together with the others."""
        for key, values in wanted.items():
            known = {run[key] for run in runs if key in run}
            if not known:
                settings = {name for run in runs for name in run}
                raise SettingError("only", key, f"is no setting of the runs of {self.sweep}", nearest(key, settings))
            for value in sorted(values - known):
                problem = f"is a value of no run of {self.sweep} at {self.scale} scale"
                raise SettingError(f"only.{key}", value, problem, nearest(value, known))
        for key, values in wanted.items():
            others = {name: chosen for name, chosen in wanted.items() if name != key}
            partners = [run for run in runs if all(run.get(name) in chosen for name, chosen in others.items())]
            for value in sorted(values - {run.get(key) for run in partners}):
                problem = f"is a value of no run of {self.sweep} at {self.scale} scale with the rest of `only`"
                possible = {f"{name}={run.get(name)}" for run in runs if run.get(key) == value for name in others}
                raise SettingError(f"only.{key}", value, problem, f"combine it with {', '.join(sorted(possible))}")

    def _check(self) -> None:
        """Raises SettingError for values that are not of the form of a plan, and for settings that are fields of the part."""
        for name, value in {"overrides": self.overrides, "only": self.only}.items():
            if not isinstance(value, dict):
                raise SettingError(
                    name, value, f"is not a mapping, in the entry of {self.sweep}", "write {SETTING: VALUE}"
                )
        if self.seeds is not None and (type(self.seeds) is not int or self.seeds < 1):
            problem = f"is not a number of seeds, in the entry of {self.sweep}"
            raise SettingError("seeds", self.seeds, problem, "write a whole number from 1, or omit it")
        for key, remedy in {"scale": "write `scale` beside `overrides`", "results_root": "use --results-root"}.items():
            if key in self.overrides:
                problem = f"is not replaced here, in the entry of {self.sweep}"
                raise SettingError(f"overrides.{key}", self.overrides[key], problem, remedy)


def read_plan(path: Path) -> list[Part]:
    """The parts of a plan, in order. Raises SettingError if the file is missing or not a plan."""
    remedy = "see the beginning of sweeps/campaign.yaml for the form of a plan"
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
        parts = [Part(**entry) for entry in content["parts"]]
    except (OSError, TypeError, KeyError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise SettingError("plan", path, str(error), remedy) from error
    for part in parts:
        if part.scale not in SCALES:
            raise SettingError(
                "plan.scale",
                part.scale,
                f"is not a scale, in the entry of {part.sweep}",
                nearest(str(part.scale), SCALES),
            )
    return parts


class Campaign:
    """The runs of a plan: selects the next one and estimates the time left.

    `recorded` are rows of the summary file, of runs on any machine; they are not trained again unless other runs of the plan
    need their run folders, and tell how long runs of their kind take.
    """

    def __init__(
        self,
        root: Path,
        parts: Sequence[Part],
        results_root: str,
        compose: Compose,
        recorded: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.root, self.parts, self.compose = root, parts, compose
        self.recorded, self.seconds = set(map(identity, recorded)), recorded_seconds(recorded)
        planned = [index_runs(part.expand(root, results_root), compose) for part in parts]
        self.awaited = {run.waits_for for runs in planned for run in runs}
        self.runs = [self._mark(runs) for runs in planned]
        self.failed_before = {
            str(run.path): run.folder.read_status() for run in self.distinct() if run.state == "failed"
        }
        self.done = {run.path for runs in self.runs for run in runs if run.state in FINISHED}
        self.codes: dict[str, int] = {}

    def _mark(self, runs: list[SweepRun]) -> list[SweepRun]:
        """The runs of a part, recorded ones marked unless a run of any part needs their folders."""
        ready = [run for run in runs if run.path is not None and run.path not in self.awaited]
        return mark(runs, {run.path for run in ready if run.key in self.recorded}, "recorded")

    def distinct(self) -> list[SweepRun]:
        """All runs without duplicates, in the plan's order."""
        return distinct(self.runs)

    def plan_again(self) -> None:
        """Recompose invalid runs, whose initial weights may exist by now."""
        for runs in self.runs:
            if any(run.path is None for run in runs):
                planned = [[run] if run.path else index_runs([run.overrides], self.compose) for run in runs]
                runs[:] = self._mark([run for each in planned for run in each])
                self.done |= {run.path for run in runs if run.elsewhere}

    def next(self) -> SweepRun | None:
        """The first run to be trained that this command has not started; None if there is none now."""
        begun = self.done | self.codes.keys()
        left = [run for run in self.distinct() if run.path and run.path not in begun]
        in_order = sorted(left, key=lambda run: str(run.path) in self.failed_before)
        return next((run for run in in_order if run.state in UNFINISHED), None)

    def ended(self, run: SweepRun, code: int) -> None:
        """Record the exit code of a run."""
        self.codes[str(run.path)] = code
        if code == EXIT_DONE:
            self.done.add(run.path)
        self.plan_again()

    def wait_for_others(self, until: float = math.inf) -> bool:
        """Wait until no other process trains one of the runs, at most until a time (`time.monotonic`); returns False if none did,
        and no run may begin from weights that another process has just finished."""
        elsewhere = [run for run in self.distinct() if run.state == "running"]
        if elsewhere:
            logger.info("waiting for %d runs that another process is training", len(elsewhere))
        while time.monotonic() < until and any(run.folder.is_in_use() for run in elsewhere):
            time.sleep(POLL_SECONDS)
        self.done |= {run.path for run in self.distinct() if run.state == "done"}
        self.plan_again()
        return bool(elsewhere) or self.next() is not None

    def progress(self, workers: int) -> str:
        """Progress and time left, as text."""
        runs = self.distinct()
        failed = sum(code not in (EXIT_DONE, EXIT_INTERRUPTED) for code in self.codes.values())
        speeds = Speeds((run for run in runs if run.path in self.done), self.seconds)
        left = speeds.left([run for run in runs if run.path not in self.done], workers)
        known = f"{len(self.done)} of {len(runs)} runs done" + (f", {failed} failed" if failed else "")
        return known + (f"; time left: {left}" if left else "")

    def table(self, workers: int) -> Table:
        """One row for each part of the plan."""
        names = [f"{part.sweep} at {part.scale} scale\n{part.claim}" for part in self.parts]
        return sweeps_table(list(zip(names, self.runs, strict=True)), self.progress(workers), workers, self.seconds)

    def failures(self) -> Iterator[str]:
        """One line for each failed run, and for each reason why configurations are invalid."""
        wrong = {run.problem: run for run in self.distinct() if run.path is None}
        counts = Counter(run.problem for run in self.distinct())
        for problem, run in wrong.items():
            yield f"wrong configuration: {problem} [{' '.join(run.arguments)}; {counts[problem]} runs]"
        for path, code in self.codes.items():
            if code not in (EXIT_DONE, EXIT_INTERRUPTED):
                status = RunFolder(Path(path)).read_status()
                is_old = status == self.failed_before.get(path)  # the run died before it wrote its own
                yield f"failed: {(not is_old and status.get('reason')) or f'exit code {code}'} [{path}]"


class Summaries:
    """Adds finished runs to a summary file."""

    def __init__(self, summary: Path) -> None:
        self.summary, self.refreshed = summary, -math.inf

    def refresh(self, campaign: Campaign, at_once: bool = False) -> None:
        """Add finished runs missing from the file, unless just attempted. Errors are logged and stop no run."""
        if not at_once and time.monotonic() - self.refreshed < REFRESH_SECONDS:
            return
        try:
            recorded = set(map(identity, read_csv(self.summary, missing_ok=True)))
            done = [run for run in campaign.distinct() if run.path in campaign.done]
            new = [run.folder.path for run in done if run.key not in recorded]
            # each with its preliminary runs, such as range tests
            folders = [RunFolder(file.parent) for path in new for file in sorted(path.rglob("summary.json"))]
            if new:
                known = len(collect_folders(folders, self.summary))
                logger.info("%s: %d runs, %d of them new", self.summary, known, len(new))
        except Exception:
            logger.exception("cannot collect results in %s; the campaign continues", self.summary)
        self.refreshed = time.monotonic()


def train(campaign: Campaign, pool: LocalPool, after_run: Callable[[], None] = lambda: None) -> int:
    """Train every missing run, none twice; returns the worst exit code. `after_run` is called when a run has ended."""
    reported = -math.inf

    def take() -> tuple[SweepRun, list[str]] | None:
        run = campaign.next()
        if run is None:
            return None
        campaign.codes[str(run.path)] = EXIT_INTERRUPTED  # in progress
        return run, train_command(campaign.root, run.arguments)

    def put_back(run: SweepRun) -> bool:
        """Whether another process had begun the run, and trains it or has finished it."""
        if run.state in ("running", "done"):
            del campaign.codes[str(run.path)]
            return True
        return False

    def ended(run: SweepRun, code: int) -> None:
        nonlocal reported
        campaign.ended(run, code)
        if time.monotonic() - reported >= TELL_SECONDS:
            logger.info(campaign.progress(pool.workers))
            reported = time.monotonic()
        after_run()

    pool.serve(take, ended, put_back)
    while pool.stopped_by is None and campaign.wait_for_others(pool.until):
        pool.serve(take, ended, put_back)
    for line in campaign.failures():
        logger.error(line)
    logger.info(campaign.progress(pool.workers))
    if pool.stopped_by is not None:
        print("interrupted: run the same command again to resume", file=sys.stderr)
        return EXIT_INTERRUPTED
    wrong = [EXIT_WRONG_CONFIGURATION for run in campaign.distinct() if run.path is None]
    return worst([*campaign.codes.values(), *wrong])


@contextmanager
def only_campaign(results_root: Path) -> Iterator[None]:
    """Reject a second campaign in the same folder, which would take over this one's results. Raises RunError if another
    campaign is running."""
    try:
        results_root.mkdir(parents=True, exist_ok=True)
        lock = open(results_root / ".campaign.lock", "a")
    except OSError as error:
        raise RunError(f"cannot write to {results_root}: {error}. Give a writable folder as --results-root.") from error
    with lock as stream:
        if not try_lock(stream):
            raise RunError(f"a campaign is already running in {results_root}: wait for it, or stop it")
        yield


def main() -> int:
    """Run the command; returns the exit code."""
    parser = parser_of("campaign", __doc__)
    parser.add_argument("--plan", type=Path, help=f"default: {PLAN} of the repository")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; default: 1")
    parser.add_argument("--threads", type=int, help="CPU threads of a run; default: OMP_NUM_THREADS, or 1")
    words = "scheduling priority of runs; default: idle, only otherwise unused CPU time"
    parser.add_argument("--priority", choices=NICENESS, default="idle", help=words)
    parser.add_argument("--results-root", default=str(RUNS), help="folder of the run folders")
    parser.add_argument("--summary", type=Path, default=SUMMARY, help="where results are added")
    parser.add_argument("--dry-run", action="store_true", help="show the parts, their states and the time left")
    given = parser.parse_args()
    return guarded(lambda: run(given, resource_root()))


def run(given: Namespace, root: Path) -> int:
    """Read the plan, then print its table or train its runs."""
    check_counts(given, "jobs", "threads")
    if given.summary.is_dir():
        raise SettingError("--summary", given.summary, "is a folder", f"name a file, such as {SUMMARY}")
    for folder in (root / PUBLISHED, *(root / BOARDS).glob("*")):
        check_frozen(read_claims(folder), read_families(folder))
    parts = read_plan(given.plan or root / PLAN)
    results_root = str(Path(given.results_root).expanduser())
    if found := re.search(r"[][(){},'\"]", results_root):
        problem = f"has a character of Hydra's syntax, {found[0]}, and is passed on to every run"
        raise SettingError("--results-root", results_root, problem, "choose or link a folder without it")
    with composing(root / "conf") as compose:
        campaign = Campaign(root, parts, results_root, compose, read_csv(given.summary, missing_ok=True))
        if given.dry_run:
            console(200).print(campaign.table(given.jobs))
            return EXIT_DONE
        os.environ |= {THREADS: str(given.threads or users_threads() or 1), PRIORITY_VARIABLE: given.priority}
        summaries = Summaries(given.summary)
        with only_campaign(Path(results_root)):
            for part, runs in zip(parts, campaign.runs, strict=True):
                record_launch(part.sweep, part.scale, [run.key[1] for run in runs if run.path], compose, Path.cwd())
            logger.info(campaign.progress(given.jobs))
            summaries.refresh(campaign)
            code = train(campaign, LocalPool(given.jobs), lambda: summaries.refresh(campaign))
            summaries.refresh(campaign, at_once=True)
            return code


if __name__ == "__main__":
    sys.exit(main())
