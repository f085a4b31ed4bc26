"""`bitcycle advise`: the schedules within a cost budget, cheapest first, with the accuracy of recorded runs.

    bitcycle advise budget=60 model=resnet74                                    # at most 60 % of the cost of static 8 bits
    bitcycle advise budget=70 model=resnet74 quantizer=mx hardware=tensorcore   # of its time at the peak rates of a B200
    bitcycle advise budget=60 json=true ...                                     # the same as JSON

All other settings are those of a run. Costs are computed for the given network; nothing is trained. Each schedule is listed with
its accuracy difference to the static baseline in recorded runs of the same quantizer, paired by seed, with a 95 % interval
(Student's t). These runs come from a single group (network, data, length): that of the board if it has any, otherwise the one
that covers most of the list. Superseded runs are ignored. The evidence holds for that group, whose name is printed; it need not
transfer to other networks.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from bitcycle.analysis.collect import SUMMARY, read_summary
from bitcycle.configuration import GROUPS, RunConfig
from bitcycle.errors import EXIT_DONE
from bitcycle.hardware import Cost
from bitcycle.recipe.options import TrainingOptions
from bitcycle.resources import resource_root
from bitcycle.schedule import SCHEDULES, SUITE, Precision, ScheduleOptions
from bitcycle.settings import SettingError, Settings, default_of
from bitcycle.sweep.manifest import MANIFEST, read_manifest
from bitcycle.training.plan import Plan, make_plan

COST_STEPS = 2000
"""Steps over which a candidate's cost is summed; arbitrary, as schedules scale with the run's length."""
LOWEST = 3
"""Lowest precision of a candidate in bits, as in the papers."""
SHORTER = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Lengths of shortened baseline runs as fractions of the full run: the alternative to a schedule at equal cost."""
ENOUGH_SEEDS = 5
COLUMNS = ("cost, %", "points", "95 % interval", "seeds", "confidence", "settings (schedule.*)")
WIDTH = 118
"""Width of the table in characters if the output is not a terminal."""
MEASURES = ("latency", "energy", "bitops")
IGNORED = ("schedule", "seed", "hardware", "logging", "dry_run", "scale")
"""Groups of settings that may differ between runs of one group."""
IGNORED_TRAINING = (
    "steps",
    "evaluation_steps",
    "checkpoint_seconds",
    "log_steps",
    "threads",
    "compile",
    "compute",
    "recompute",
)

Group = tuple[str, ...]
"""The settings that comparable runs share, as JSON."""
Key = tuple[str, int, int, int, float]
"""Schedule, q_min (0: static), q_max, (lowest) bits of gradients, and length as a fraction."""


@dataclass(frozen=True)
class Evidence:
    """A difference in accuracy to the static baseline, in points: mean over n seeds and the ends of its 95 % interval."""

    difference: float
    low: float | None
    high: float | None
    n: int

    @property
    def sureness(self) -> str:
        """The confidence in the difference, in words."""
        if self.low is None or self.high is None:
            return "one seed: no interval"
        if self.low <= 0 <= self.high:
            return "undecided"
        return ("better" if self.low > 0 else "worse") + (
            "" if self.n >= ENOUGH_SEEDS else f", but {self.n} seeds only"
        )


@dataclass(frozen=True)
class Candidate:
    """A candidate setting with its cost as a fraction of the static baseline's. `settings` are written as on the command line."""

    settings: str
    key: Key
    cost: float


def baseline_of(config: RunConfig) -> Precision:
    """8 bits everywhere, or the quantizer's highest precision below that."""
    precision: Precision = config.quantizer.initial_precision
    return precision


def candidates(plan: Plan, measure: str) -> Iterator[Candidate]:
    """Static precisions, the ten cyclic schedules for each q_min, and the baseline trained for fewer steps.

    Gradients have the baseline's bits, as in the papers, or the forward bits.
    """
    top = baseline_of(plan.config).weight
    for bits in range(LOWEST, top + 1):
        for gradient in dict.fromkeys((bits, top)):
            settings = f"schedule=static schedule.q_max={bits}"
            settings += f" schedule.gradient={gradient}" if gradient != bits else ""
            options = SCHEDULES["static"](q_max=bits, gradient=gradient)
            yield from _candidate(plan, measure, options, settings, ("static", 0, bits, gradient, 1.0))
    for name in SUITE:
        for low in range(LOWEST, top):
            for gradient in (low, top):
                settings = f"schedule={name} schedule.q_min={low} schedule.q_max={top}"
                settings += f" schedule.gradient_min={gradient}" if gradient != top else ""
                options = SCHEDULES[name](q_min=low, q_max=top, gradient_min=gradient)
                yield from _candidate(plan, measure, options, settings, (name, low, top, gradient, 1.0))
    for part in SHORTER:
        steps = round(part * plan.total_steps)
        settings = f"schedule=static schedule.q_max={top} training.steps={steps}"
        yield Candidate(settings, ("static", 0, top, top, part), part)


def _candidate(plan: Plan, measure: str, options: ScheduleOptions, settings: str, key: Key) -> Iterator[Candidate]:
    """A candidate with its cost, or nothing if the quantizer does not support its bits."""
    schedule, quantizer = options.bind(COST_STEPS), plan.config.quantizer
    try:
        quantizer.check(schedule.precisions)
        quantizer.check_ends(schedule.lowest, schedule.reference)
    except SettingError:
        return
    histogram: dict[Precision, int] = defaultdict(int)
    for precision, steps in schedule.run_lengths:
        histogram[precision] += steps
    cost = plan.config.hardware.cost(plan.workload, histogram, baseline_of(plan.config))
    yield Candidate(settings, key, relative(cost, measure))


def relative(cost: Cost, measure: str) -> float:
    """A cost as a fraction of the reference cost. Raises SettingError if the cost model does not compute this measure."""
    found = {
        "latency": cost.latency_relative_to_static,
        "energy": cost.energy_relative_to_static,
        "bitops": cost.relative_to_static,
    }[measure]
    if found is None:
        remedy = "use measure=bitops, or hardware=tensorcore, zc706 or bitfusion, which has both"
        raise SettingError("measure", measure, "is not computed by this cost model", remedy)
    return found


def group_of(row: Mapping[str, Any]) -> Group:
    """The group of comparable runs that a recorded run belongs to."""
    settings = json.loads(row["settings"])
    shared = {key: value for key, value in settings.items() if key not in IGNORED}
    for group, options in GROUPS.items():
        if group in shared and shared[group]["name"] in options:
            shared[group] = _changed(shared[group], options[shared[group]["name"]])
    training = {key: value for key, value in shared["training"].items() if key not in IGNORED_TRAINING}
    shared["training"] = _changed(training, TrainingOptions)
    return tuple(json.dumps(shared[key], sort_keys=True) for key in sorted(shared))


def _changed(values: Mapping[str, Any], kind: type[Settings]) -> dict[str, Any]:
    """The non-default values; settings added after a run are missing from its record and count as default."""
    defaults = {field.name: default_of(field) for field in fields(kind)}
    found: dict[str, Any] = {}
    for name, value in values.items():
        default = defaults.get(name)
        if isinstance(default, Settings) and isinstance(value, Mapping):
            value, default = _changed(value, type(default)), {}
        if name == "name" or value != default:
            found[name] = value
    return found


def evidence_of(rows: Iterable[Mapping[str, Any]], baseline: int) -> dict[Key, Evidence]:
    """The evidence of one group of runs on each setting, against static `baseline` bits at full length."""
    finals: dict[Key, dict[str, float]] = defaultdict(dict)
    rows = list(rows)
    longest = max(int(row["total_steps"]) for row in rows)
    for row in rows:
        if (key := _key(row, longest)) is not None:
            finals[key][row["seed"]] = float(row["final"])
    static = finals.get(("static", 0, baseline, baseline, 1.0), {})
    found = {}
    for key, values in finals.items():
        differences = [value - static[seed] for seed, value in values.items() if seed in static]
        if differences and values is not static:
            found[key] = _interval(differences)
    return found


def _key(row: Mapping[str, Any], longest: int) -> Key | None:
    """The setting of a recorded run; None if it is not a candidate."""
    schedule = json.loads(row["settings"])["schedule"]
    part = round(int(row["total_steps"]) / longest, 2)
    if row["schedule"] == "static":
        bits = int(row["q_max"])
        return ("static", 0, bits, schedule.get("gradient") or bits, part)
    if row["schedule"] not in SUITE or part != 1 or not str(row["q_min"]).isdigit():
        return None
    low, top = int(row["q_min"]), int(row["q_max"])
    usual = asdict(SCHEDULES[row["schedule"]](q_min=low, q_max=top, gradient_min=schedule.get("gradient_min")))
    same = all(schedule[name] == value for name, value in usual.items() if name in schedule and name != "range_test")
    return (row["schedule"], low, top, schedule.get("gradient_min") or top, 1.0) if same else None


def _interval(differences: Sequence[float]) -> Evidence:
    """Mean and 95 % interval by Student's t over independent seeds."""
    mean, n = fmean(differences), len(differences)
    if n < 2:
        return Evidence(mean, None, None, n)
    from scipy.stats import t

    half = float(t.ppf(0.975, n - 1)) * stdev(differences) / n**0.5
    return Evidence(mean, mean - half, mean + half, n)


def choose_group(
    rows: Iterable[Mapping[str, Any]], wanted: set[Key], baseline: int, board: Collection[str] = ()
) -> tuple[str, dict[Key, Evidence]]:
    """The group of recorded runs that covers most of the wanted settings: its name and its evidence. Groups with runs whose
    hashes are in `board` take precedence; `rows` are those of results/summary/runs.csv."""
    groups: dict[Group, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["metric"].endswith("accuracy"):
            groups[group_of(row)].append(row)
    best: tuple[tuple[int, ...], str, dict[Key, Evidence]] = ((), "", {})
    for members in groups.values():
        found = {key: value for key, value in evidence_of(members, baseline).items() if key in wanted}
        rank = sum(row["hash"] in board for row in members), sum(value.n for value in found.values())
        if found and rank > best[0]:
            first, steps = members[0], max(int(row["total_steps"]) for row in members)
            name = f"{first['model']}, {first['dataset']}, {first['train_samples']} training samples, {steps} steps"
            best = rank, f"{name}, quantizer {first['quantizer']}, scale {first['scale']}", found
    return best[1], best[2]


def recorded_runs(summary: Path, quantizer: str) -> tuple[list[dict[str, Any]], set[str]]:
    """Recorded runs of a quantizer, without superseded ones, and the hashes of the board's runs."""
    rows = [row for row in read_summary(summary) if row["quantizer"] == quantizer]
    files = sorted((summary.parents[1] / MANIFEST.name).glob("*/*.csv")) if len(summary.parents) > 1 else []
    places = [(file.parent.name, place) for file in files for place in read_manifest(file)]
    current = {place.hash for _, place in places if not place.superseded}
    old = {place.hash for _, place in places if place.superseded} - current
    board = {place.hash for paper, place in places if paper == "board"} & current
    return [row for row in rows if row["hash"] not in old], board


def advise(config: RunConfig, budget: float, measure: str | None, summary: Path) -> dict[str, Any]:
    """The candidates within `budget` (a fraction of the baseline's cost), cheapest first. Raises SettingError for
    incompatible settings, or a measure that the cost model does not compute."""
    plan = make_plan(config)
    baseline = baseline_of(plan.config)
    if measure is None:
        sample = plan.config.hardware.cost(plan.workload, {baseline: 1}, baseline)
        measure = "bitops" if sample.latency_s is None else "latency"
    listed = sorted(candidates(plan, measure), key=lambda each: each.cost)
    within = [each for each in listed if each.cost <= budget]
    rows, board = recorded_runs(summary, plan.config.quantizer.name)
    name, evidence = choose_group(rows, {each.key for each in listed}, baseline.weight, board)
    return {
        "budget": budget,
        "measure": measure,
        "hardware": plan.config.hardware.name,
        "device": getattr(plan.config.hardware, "device", None),
        "model": plan.config.model.name,
        "quantizer": plan.config.quantizer.name,
        "baseline": f"static {baseline.weight} bits",
        "cheapest": listed[0].settings if listed else None,
        "cheapest_cost": listed[0].cost if listed else None,
        "evidence_from": name,
        "candidates": [_described(each, evidence.get(each.key)) for each in within],
    }


def _described(candidate: Candidate, evidence: Evidence | None) -> dict[str, Any]:
    found = None if evidence is None else {**asdict(evidence), "sureness": evidence.sureness}
    return {"settings": candidate.settings, "cost": candidate.cost, "measured": found}


def main() -> int:
    """Run the command; returns the exit code."""
    from bitcycle.command import guarded

    return guarded(lambda: _advise(sys.argv[1:]))


OWN = {"budget": "60", "measure": "", "json": "false", "top": "20", "summary": ""}
"""Arguments of this command and their defaults; all others are settings of a run."""


def _advise(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return EXIT_DONE
    given = dict(argument.partition("=")[::2] for argument in arguments if argument.partition("=")[0] in OWN)
    words = {**OWN, **given}
    overrides = [argument for argument in arguments if argument.partition("=")[0] not in OWN]
    if any(override.startswith("schedule") for override in overrides):
        raise SettingError("schedule", "...", "is chosen by this command", "omit it")
    if words["measure"] not in ("", *MEASURES):
        raise SettingError("measure", words["measure"], "is not a cost", f"use {', '.join(MEASURES)}, or omit it")
    summary = Path(words["summary"]) if words["summary"] else resource_root() / SUMMARY
    found = advise(_configured(overrides), _percent(words["budget"]), words["measure"] or None, summary)
    if words["json"] == "true":
        print(json.dumps(found))
    else:
        _print(found, int(words["top"]))
    return EXIT_DONE


def _percent(text: str) -> float:
    """A budget in percent as a fraction. Raises SettingError if it is not a percentage."""
    try:
        number = float(text.rstrip("%"))
    except ValueError:
        number = 0.0
    if not 1 < number <= 1000:
        raise SettingError("budget", text, "is not a percentage of the baseline's cost", "write budget=60 for 60 %")
    return number / 100


def _configured(overrides: Sequence[str]) -> RunConfig:
    """The configuration of a baseline run with these settings."""
    from hydra import compose, initialize_config_dir

    from bitcycle.configuration import read_config, register_schemas

    register_schemas()
    with initialize_config_dir(str(resource_root() / "conf"), version_base="1.3"):
        config = read_config(compose("config", overrides=[*overrides, "schedule=static"]))
        bits = baseline_of(config).weight
        return read_config(compose("config", overrides=[*overrides, "schedule=static", f"schedule.q_max={bits}"]))


def _print(found: Mapping[str, Any], top: int) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    console, rows = Console(width=max(Console().width, WIDTH), soft_wrap=True), found["candidates"]
    what = {"latency": "time", "energy": "energy", "bitops": "bit operations"}[found["measure"]]
    where = f"hardware={found['hardware']}" + (f", {found['device']} at peak rates" if found["device"] else "")
    title = f"{found['model']}, quantizer={found['quantizer']}: at most {100 * found['budget']:.3g} % of the {what} of"
    console.print(f"{title} {found['baseline']} ({where})")
    if not rows:
        console.print(f"nothing within the budget; cheapest: {found['cheapest']}, {100 * found['cheapest_cost']:.1f} %")
        return
    table = Table(*(Column(title, no_wrap=True) for title in COLUMNS))
    for row in rows[:top]:
        settings = row["settings"].replace("schedule.", "")
        table.add_row(f"{100 * row['cost']:.1f}", *_cells(row["measured"]), settings)
    console.print(table)
    if len(rows) > top:
        console.print(f"{len(rows) - top} more: top={len(rows)} shows them")
    source = found["evidence_from"]
    console.print(
        f"points: difference in final accuracy to {found['baseline']}, measured with {source}"
        if source
        else "no recorded runs of these settings with this quantizer"
    )


def _cells(measured: Mapping[str, Any] | None) -> list[str]:
    if measured is None:
        return ["", "", "", "not measured"]
    interval = "" if measured["low"] is None else f"{measured['low']:+.2f} to {measured['high']:+.2f}"
    return [f"{measured['difference']:+.2f}", interval, str(measured["n"]), measured["sureness"]]


if __name__ == "__main__":
    sys.exit(main())
