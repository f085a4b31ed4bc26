"""Compute pending analyses of sweeps: `bitcycle analyse [PAPER/ITEM ...] [scale=smoke]`.

A sweep file lists its analyses under `analyses`:

    analyses:
      - kind: surface                     # one of `KINDS`; one analysis for each run of the sweep
        split: test                       # options of the kind, see `bitcycle KIND --help`
        seeds: 3                          # repeats the analysis with seed=0, 1, 2
        at_scale: {smoke: {points: 5}}    # options that differ at a smaller scale
      - kind: plane
        networks: [{schedule: fine_tuning, phase: 1}, {schedule: fine_tuning}, {schedule: hlhlp}]

`networks` selects runs by their settings in the sweep; `phase` selects the network at the end of that phase. The
selection is repeated for each training seed. If the kind analyses a single network, it is applied to each of them.
Without sweeps on the command line, all files of `sweeps/` are used. The command accepts the settings of train.py, such
as `scale`, `results_root`, `data_root` and `dry_run=true`. Figures and claims of a sweep use only the analyses that it lists.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bitcycle.configuration import SCALES
from bitcycle.door import parser_of
from bitcycle.errors import EXIT_DONE, EXIT_WRONG_CONFIGURATION, DataError, RunError
from bitcycle.files import resource_root
from bitcycle.guard import guarded
from bitcycle.reproduction.measurement.artifacts import read_result
from bitcycle.reproduction.measurement.corruption import Corruption
from bitcycle.reproduction.measurement.job import Analysis, Job, TrainedNetwork
from bitcycle.reproduction.measurement.noise import NoiseTest
from bitcycle.reproduction.measurement.plane import Plane
from bitcycle.reproduction.measurement.sharpness import Sharpness
from bitcycle.reproduction.measurement.surface import Surface
from bitcycle.settings import SettingError, nearest, read_words
from bitcycle.sweep.composition import composing
from bitcycle.sweep.execution import worst
from bitcycle.sweep.grid import as_text
from bitcycle.sweep.registry import Sweep, SweepRun, index_runs, read_sweep, sweep_files

KINDS: dict[str, type[Analysis]] = {kind.kind: kind for kind in (Surface, Plane, Sharpness, NoiseTest, Corruption)}


def read_entry(entry: Mapping[str, Any], scale: str) -> tuple[list[Analysis], list[dict[str, Any]]]:
    """Read an entry of `analyses` at a scale: the options for each seed, and the selected networks."""
    for word in entry.get("at_scale", {}):
        if word not in SCALES:
            raise SettingError("analyses.at_scale", word, "is not one of the scales", nearest(str(word), SCALES))
    given = {key: value for key, value in entry.items() if key != "at_scale"} | entry.get("at_scale", {}).get(scale, {})
    name, networks, seeds = str(given.pop("kind", "")), given.pop("networks", []), given.pop("seeds", None)
    if name not in KINDS:
        raise SettingError("analyses.kind", name, "is not a kind of analysis", nearest(name, KINDS))
    kind = KINDS[name]
    if seeds is not None and (type(seeds) is not int or seeds < 1):
        raise SettingError(
            "analyses.seeds", seeds, "is not a number of seeds", "write a whole number from 1, or omit it"
        )
    if kind.networks > 1 and len(networks) != kind.networks:
        problem = f"an analysis of kind {name} needs {kind.networks} networks"
        raise SettingError("analyses.networks", networks, problem, f"list {kind.networks}")
    several = [given] if seeds is None else [{**given, "seed": seed} for seed in range(seeds)]
    return [read_words(kind, values) for values in several], networks


def groups_of(runs: Sequence[SweepRun], networks: Sequence[Mapping[str, Any]], count: int) -> Iterator[list[Any]]:
    """The networks of each analysis as (run, phase): every run, or for each seed the selected ones. Raises SettingError if no
    run of the sweep has the settings of a selected network."""
    if not networks:
        yield from ([(run, None)] for run in runs)
        return
    for seed in dict.fromkeys(run.overrides["seed"] for run in runs):
        of_seed = [run for run in runs if run.overrides["seed"] == seed]
        named = [(_run_with(of_seed, network), network.get("phase")) for network in networks]
        yield from ([named] if count > 1 else [[one] for one in named])


def _run_with(runs: Sequence[SweepRun], network: Mapping[str, Any]) -> SweepRun:
    wanted = {key: as_text(value) for key, value in network.items() if key != "phase"}
    for run in runs:
        if wanted.items() <= run.overrides.items():
            return run
    raise SettingError("analyses.networks", dict(network), "no run of the sweep has these settings", "see its grids")


def jobs_of(sweep: Sweep, scale: str, runs: Sequence[SweepRun]) -> list[Job | None]:
    """Every analysis of a sweep at a scale; None if one of its runs is not finished."""
    found: list[Job | None] = []
    for entry in sweep.analyses:
        several, networks = read_entry(entry, scale)
        for group in groups_of(runs, networks, several[0].networks):
            if any(run.state != "done" for run, _ in group):
                found += [None] * len(several)
                continue
            parts = tuple(TrainedNetwork(run.folder, phase) for run, phase in group)
            found += [Job(options, parts, group[-1][0].config.data_root) for options in several]
    return found


def run_jobs(name: str, jobs: Sequence[Job | None], dry_run: bool = False) -> int:
    """Run the missing analyses sequentially; a failure does not stop the others. Returns the worst exit code."""
    counts, codes = Counter(dict.fromkeys(("already done", "computed", "failed", "pending"), 0)), [EXIT_DONE]
    for job in jobs:
        if job is None:
            counts["waiting for runs"] += 1
        elif read_result(job.path).complete:
            counts["already done"] += 1
        elif dry_run:
            counts["pending"] += 1
        else:
            try:
                job.run()
                counts["computed"] += 1
            except (RunError, DataError, SettingError) as error:
                print(f"{name}: {job.analysis.kind} failed: {error}", file=sys.stderr)
                codes.append(error.exit_code)
                counts["failed"] += 1
    print(
        f"{name}: {', '.join(f'{count} {what}' for what, count in counts.items() if count) or 'no analyses'}",
        flush=True,
    )
    return worst(codes)


def analyse(sweeps: Mapping[str, Sweep], fixed: Mapping[str, str], conf: Path) -> int:
    """Run every analysis of some sweeps whose runs are finished and that has no result yet; `fixed` are settings of the command
    line. Returns the worst exit code; an analysis whose runs are missing counts as 0, unless their configuration is wrong."""
    settings = {key: value for key, value in fixed.items() if key != "dry_run"}
    scale, dry_run = settings.get("scale", "paper"), fixed.get("dry_run", "false").lower()
    if dry_run not in ("true", "false"):
        raise SettingError("dry_run", dry_run, "is not a choice of this command", "use dry_run=true")
    codes = [EXIT_DONE]
    with composing(conf) as compose:
        for name, sweep in sweeps.items():
            runs = index_runs(sweep.expand(scale, settings), compose)
            if wrong := [run for run in runs if run.state == "wrong"]:
                print(
                    f"{name}: {len(wrong)} of {len(runs)} runs, wrong configuration: {wrong[0].problem}",
                    file=sys.stderr,
                )
                codes.append(EXIT_WRONG_CONFIGURATION)
            codes.append(run_jobs(name, jobs_of(sweep, scale, runs), dry_run == "true"))
    return worst(codes)


def sweeps_with_analyses(root: Path, names: Sequence[str] = ()) -> dict[str, Sweep]:
    """The named sweeps of a repository, by default all that have analyses. Raises SettingError for an unknown sweep."""
    every = sweep_files(root)
    if strangers := [name for name in names if name not in every]:
        raise SettingError("sweeps", strangers[0], "no such sweep", nearest(strangers[0], every))
    found = {name: read_sweep(every[name]) for name in names or every}
    return {name: sweep for name, sweep in found.items() if sweep.analyses or names}


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> int:
    """Run the command in a repository and return its exit code."""
    parser = parser_of("analyse", __doc__)
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="PAPER/ITEM, a sweep; or SETTING=VALUE, as for train.py"
    )
    given = parser.parse_args(arguments).words
    root, fixed = root or resource_root(), dict(argument.split("=", 1) for argument in given if "=" in argument)
    names = [argument for argument in given if "=" not in argument]
    return guarded(lambda: analyse(sweeps_with_analyses(root, names), fixed, root / "conf"))


if __name__ == "__main__":
    sys.exit(main())
