"""`bitcycle advise`: the schedules within a cost budget, cheapest first, with the accuracy of recorded runs.

    bitcycle advise budget=60 model=resnet74                                    # at most 60 % of the cost of static 8 bits
    bitcycle advise budget=70 model=resnet74 quantizer=mx hardware=tensorcore   # of its time at the peak rates of a B200
    bitcycle advise budget=60 json=true ...                                     # the same as JSON

`measure` selects the cost (latency, energy or bitops; default: latency if the cost model has it, else bitops), `top` the
length of the list (20), `summary` the file of recorded runs. All other settings are those of a run. Costs are computed for the
given network; nothing is trained. Each schedule is listed with its accuracy difference to the static baseline in recorded runs of
the same quantizer, paired by seed, with a 95 % interval (Student's t). These runs come from one group (network, data, length):
one of the given network if there is any, else that of the board, else the one that covers most of the list. Superseded runs are
ignored. The evidence holds for that group, whose name is printed; it need not transfer to other networks.

A second table tells when a schedule pays: what RTH and CR gain over static 8 bits of equal cost, that is with fewer steps, by how
well static 8 bits fits its training data. `fit=85` shows only the measurement nearest to a network that reaches 85 % on its own.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Column, Table

from bitcycle.configuration import GROUPS, RunConfig, read_config
from bitcycle.door import parser_of
from bitcycle.files import read_csv, resource_root
from bitcycle.guard import guarded
from bitcycle.recipe.options import TrainingOptions
from bitcycle.reproduction.analysis.aggregation import find_results, read_runs
from bitcycle.reproduction.analysis.collect import SUMMARY, is_accuracy
from bitcycle.reproduction.analysis.contrast import Pool
from bitcycle.reproduction.analysis.gain_table import Row, gain_rows
from bitcycle.reproduction.analysis.statistics import over_seeds
from bitcycle.reproduction.manifest import MANIFEST, read_manifest
from bitcycle.schedule import SCHEDULES, SUITE, ScheduleOptions
from bitcycle.settings import SettingError, Settings, default_of, read_words, setting
from bitcycle.training.plan import Plan, make_plan

COST_STEPS = 2000
"""Steps over which a candidate's cost is summed; arbitrary, as schedules scale with the run's length."""
LOWEST = 3
"""Lowest precision of a candidate in bits, as in the papers."""
SHORTER = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Lengths of shortened baseline runs as fractions of the full run: the alternative to a schedule at equal cost."""
ENOUGH_SEEDS = 5
COLUMNS = ("cost, %", "points", "95 % interval", "seeds", "confidence", "settings (schedule.*)")
GAIN_COLUMNS = (
    "training accuracy, %",
    "network",
    "steps",
    "schedule",
    "price, points",
    "gain, points",
    "95 % interval",
    "seeds",
)
WIDTH = 118
"""Width of the table in characters if the output is not a terminal."""
MEASURES = {"latency": "time", "energy": "energy", "bitops": "bit operations"}
"""Cost -> what it is called in the table."""
IGNORED = ("schedule", "seed", "hardware", "logging", "dry_run", "scale")
"""Groups of settings that may differ between runs of one group, besides those that do not affect results."""
IGNORED_TRAINING = ("steps", "evaluation_steps", "compute")


@dataclass
class Arguments(Settings):
    """Arguments of this command; all others are settings of a run."""

    budget: str = setting("60", "percentage of the baseline's cost")
    measure: Optional[str] = setting(None, "cost that counts", choices=MEASURES)
    json: bool = setting(False, "print JSON")
    top: int = setting(20, "length of the list", minimum=1)
    fit: Optional[float] = setting(
        None, "accuracy in percent that static precision reaches on your training data", minimum=0, maximum=100
    )
    summary: Optional[str] = setting(None, "file of recorded runs")

    def validate(self) -> None:
        if self.summary is not None and not Path(self.summary).is_file():
            remedy = "give one that `bitcycle collect` wrote, or omit it"
            raise SettingError("summary", self.summary, "no such file", remedy)

    @property
    def share(self) -> float:
        """The budget as a fraction. Raises SettingError if it is not a percentage."""
        try:
            number = float(self.budget.rstrip("%"))
        except ValueError:
            number = 0.0
        if not 1 < number <= 1000:
            problem = "is not a percentage of the baseline's cost"
            raise SettingError("budget", self.budget, problem, "write budget=60 for 60 %")
        return number / 100


class Candidate(NamedTuple):
    """A setting: schedule, q_min (0: static), q_max, (lowest) bits of gradients, and length as a fraction."""

    schedule: str
    low: int
    high: int
    gradient: int
    part: float = 1.0

    @property
    def options(self) -> ScheduleOptions:
        """Options of the candidate's schedule."""
        if self.low:
            return SCHEDULES[self.schedule](q_min=self.low, q_max=self.high, gradient_min=self.gradient)
        return SCHEDULES[self.schedule](q_max=self.high, gradient=self.gradient)

    def settings(self, total_steps: int) -> str:
        """As on the command line."""
        words = [f"schedule={self.schedule}", *([f"schedule.q_min={self.low}"] if self.low else [])]
        words.append(f"schedule.q_max={self.high}")
        if self.gradient != self.high:
            words.append(f"schedule.{'gradient_min' if self.low else 'gradient'}={self.gradient}")
        if self.part != 1:
            words.append(f"training.steps={round(self.part * total_steps)}")
        return " ".join(words)


def candidates(top: int) -> list[Candidate]:
    """Static precisions up to the baseline's bits, the ten cyclic schedules for each q_min, and the baseline trained for fewer
    steps. Gradients have the baseline's bits, as in the papers, or the forward bits."""
    bits = range(LOWEST, top + 1)
    static = [Candidate("static", 0, high, gradient) for high in bits for gradient in dict.fromkeys((high, top))]
    cyclic = [Candidate(name, low, top, g) for name in SUITE for low in bits[:-1] for g in (low, top)]
    return [*static, *cyclic, *(Candidate("static", 0, top, top, part) for part in SHORTER)]


def cost_of(candidate: Candidate, plan: Plan, measure: str) -> float | None:
    """The cost as a fraction of the baseline's; None if the quantizer does not support the bits. Raises SettingError if the cost
    model does not compute this measure."""
    if candidate.part != 1:
        return candidate.part
    schedule, quantizer = candidate.options.bind(COST_STEPS), plan.config.quantizer
    try:
        quantizer.check(schedule.precisions)
        quantizer.check_ends(schedule.lowest, schedule.reference)
    except SettingError:
        return None
    cost = plan.config.hardware.cost(plan.workload, schedule.histogram, plan.config.quantizer.initial_precision)
    found: float | None = getattr(cost, f"{measure}_relative_to_static".removeprefix("bitops_"))
    if found is None:
        remedy = "use measure=bitops; latency: hardware=tensorcore, zc706 or bitfusion; energy: hardware=bitfusion"
        raise SettingError("measure", measure, "is not computed by this cost model", remedy)
    return found


# Evidence


def group_of(row: Mapping[str, Any]) -> str:
    """The group of comparable runs that a recorded run belongs to: the settings that they share, as JSON."""
    shared = {key: value for key, value in json.loads(row["settings"]).items() if key not in IGNORED}
    shared["training"] = {key: value for key, value in shared["training"].items() if key not in IGNORED_TRAINING}
    kinds = {group: _kind(group, shared[group]["name"]) for group in GROUPS if group in shared}
    for group, kind in {**kinds, "training": TrainingOptions}.items():
        if kind is not None:
            shared[group] = _changed(shared[group], kind)
    return json.dumps(shared, sort_keys=True)


def _kind(group: str, name: str) -> type[Settings] | None:
    """The class of an option; None if there is no such option any more."""
    return GROUPS[group][name].kind if name in GROUPS[group] else None


def _changed(values: Mapping[str, Any], kind: type[Settings]) -> dict[str, Any]:
    """The values that affect results and are not default; settings added after a run are missing from its record and count as
    default."""
    known = {field.name: field for field in fields(kind)}
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in known and not known[name].metadata.get("affects_result", True):
            continue
        default = default_of(known[name]) if name in known else None
        if isinstance(default, Settings) and isinstance(value, Mapping):
            value, default = _changed(value, type(default)), {}
        if name == "name" or value != default:
            found[name] = value
    return found


def evidence_of(rows: Sequence[Mapping[str, Any]], baseline: int, steps: int) -> dict[Candidate, dict[str, Any]]:
    """The evidence of one group of runs on each setting, against static `baseline` bits for `steps` steps."""
    finals: dict[Candidate, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if (candidate := _candidate(row, steps)) is not None:
            finals[candidate][row["seed"]] = float(row["final"])
    static = finals.pop(Candidate("static", 0, baseline, baseline), {})
    paired = {
        candidate: [value - static[seed] for seed, value in values.items() if seed in static]
        for candidate, values in finals.items()
    }
    return {candidate: _measured(differences) for candidate, differences in paired.items() if differences}


def _candidate(row: Mapping[str, Any], steps: int) -> Candidate | None:
    """The setting of a recorded run in a group with this full length; None if it is not a candidate."""
    schedule = json.loads(row["settings"])["schedule"]
    part, high = round(int(row["total_steps"]) / steps, 2), int(row["q_max"] or 0)
    if row["schedule"] == "static":
        return Candidate("static", 0, high, schedule.get("gradient") or high, part)
    if row["schedule"] not in SUITE or part != 1 or not str(row["q_min"]).isdigit():
        return None
    low, gradient = int(row["q_min"]), schedule.get("gradient_min")
    usual = asdict(SCHEDULES[row["schedule"]](q_min=low, q_max=high, gradient_min=gradient))
    same = all(schedule[name] == value for name, value in usual.items() if name in schedule and name != "range_test")
    return Candidate(row["schedule"], low, high, gradient or high) if same else None


def _measured(differences: Sequence[float]) -> dict[str, Any]:
    """Differences in accuracy to the static baseline, in points: their mean over n seeds, the ends of its 95 % interval, and the
    confidence in words."""
    found = over_seeds(differences, own=2)
    low, high = found.interval() or (None, None)
    if low is None or high is None:
        sureness = "one seed: no interval"
    elif low <= 0 <= high:
        sureness = "undecided"
    else:
        few = "" if found.n >= ENOUGH_SEEDS else f", but {found.n} seeds only"
        sureness = ("better" if low > 0 else "worse") + few
    return {"difference": found.mean, "low": low, "high": high, "n": found.n, "sureness": sureness}


def choose_group(
    rows: Iterable[Mapping[str, Any]],
    wanted: Collection[Candidate],
    baseline: int,
    board: Collection[str] = (),
    model: str = "",
) -> tuple[str, dict[Candidate, dict[str, Any]]]:
    """The group of recorded runs and its full length that cover most of the wanted settings: their name and evidence. Groups of
    the network `model` come first, then those with runs whose hashes are in `board`; `rows` are from results/summary/runs.csv."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if is_accuracy(row):
            groups[group_of(row)].append(row)
    best, chosen = (False, 0, 0), ("", dict[Candidate, dict[str, Any]]())
    for members in groups.values():
        first, own = members[0], members[0]["model"] == model
        for steps in sorted({int(row["total_steps"]) for row in members}, reverse=True):
            found = {key: value for key, value in evidence_of(members, baseline, steps).items() if key in wanted}
            rank = own, sum(row["hash"] in board for row in members), sum(value["n"] for value in found.values())
            if found and rank > best:
                name = f"{first['model']}, {first['dataset']}, {first['train_samples']} training samples, {steps} steps"
                best, chosen = rank, (f"{name}, quantizer {first['quantizer']}, scale {first['scale']}", found)
    return chosen


def recorded_runs(summary: Path, quantizer: str) -> tuple[list[dict[str, Any]], set[str]]:
    """Recorded runs of a quantizer, without superseded ones, and the hashes of the board's runs."""
    rows = [row for row in read_csv(summary, missing_ok=True) if row["quantizer"] == quantizer]
    files = sorted((summary.parents[1] / MANIFEST.name).glob("*/*.csv")) if len(summary.parents) > 1 else []
    places = [(file.parent.name, place) for file in files for place in read_manifest(file)]
    current = {place.hash for _, place in places if not place.superseded}
    old = {place.hash for _, place in places if place.superseded} - current
    board = {place.hash for paper, place in places if paper == "board"} & current
    return [row for row in rows if row["hash"] not in old], board


class MeasuredGain(NamedTuple):
    """What a schedule gained over static 8 bits of equal cost, in points, and where."""

    fit: float  # accuracy of static 8 bits of full length on its training data, in percent
    network: str
    data: str
    steps: int
    schedule: str
    price: float  # what static 8 bits loses with fewer steps
    gain: float
    low: Optional[float]  # ends of the 95 % interval; None with one seed
    high: Optional[float]
    n: int  # number of seeds


def recorded_gains(summary: Path, fit: float | None = None) -> list[MeasuredGain]:
    """The gains in the recorded runs of board/gain, by training accuracy; only those of the network and length whose training
    accuracy is nearest to `fit`, if it is given."""
    manifest = summary.parents[1] / MANIFEST.name / "board" / "gain.csv" if len(summary.parents) > 1 else Path()
    places = read_manifest(manifest) if manifest.is_file() else []
    names = {place.hash for place in places}
    pool = Pool(read_runs([row for row in read_csv(summary, missing_ok=True) if row["hash"] in names], summary))
    found = [_gain(row, row.fit.mean) for row in gain_rows(find_results(places, pool.runs).done, pool) if row.fit]
    if fit is not None and found:
        nearest = min((row.fit for row in found), key=lambda value: abs(value - fit))
        found = [row for row in found if row.fit == nearest]
    return sorted(found, key=lambda row: (row.fit, row.schedule))


def _gain(row: Row, fit: float) -> MeasuredGain:
    price, gain, (low, high) = row.price.mean, row.gain.mean, row.gain.interval() or (None, None)
    return MeasuredGain(fit, row.network, row.data, row.steps, row.schedule, price, gain, low, high, row.gain.n)


# The command


def advise(config: RunConfig, budget: float, measure: str | None, summary: Path) -> dict[str, Any]:
    """The candidates within `budget` (a fraction of the baseline's cost), cheapest first. Raises SettingError for
    incompatible settings, or a measure that the cost model does not compute."""
    plan = make_plan(config)
    config, baseline = plan.config, plan.config.quantizer.initial_precision
    if measure is None:
        sample = config.hardware.cost(plan.workload, {baseline: 1}, baseline)
        measure = "bitops" if sample.latency_s is None else "latency"
    costs = {each: cost for each in candidates(baseline.weight) if (cost := cost_of(each, plan, measure)) is not None}
    listed = sorted(costs, key=costs.__getitem__)
    rows, board = recorded_runs(summary, config.quantizer.name)
    name, evidence = choose_group(rows, costs, baseline.weight, board, config.model.name)
    return {
        "budget": budget,
        "measure": measure,
        "hardware": config.hardware.name,
        "device": getattr(config.hardware, "device", None),
        "model": config.model.name,
        "quantizer": config.quantizer.name,
        "baseline": f"static {baseline.weight} bits",
        "cheapest": listed[0].settings(plan.total_steps),
        "cheapest_cost": costs[listed[0]],
        "evidence_from": name,
        "candidates": [
            {"settings": each.settings(plan.total_steps), "cost": costs[each], "measured": evidence.get(each)}
            for each in listed
            if costs[each] <= budget
        ],
    }


def main() -> int:
    """Run the command; returns the exit code."""
    parser = parser_of("advise", __doc__)
    parser.add_argument(
        "words", nargs="*", metavar="SETTING=VALUE", help="settings of this command, and those of train.py"
    )
    words = parser.parse_args().words
    return guarded(lambda: _advise(words))


def _advise(arguments: Sequence[str]) -> None:
    words, overrides = dict[str, str](), []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in Arguments.__dataclass_fields__:
            words[key] = value
        elif key.startswith("schedule"):
            raise SettingError("schedule", "...", "is chosen by this command", "omit it")
        else:
            overrides.append(argument)
    given = read_words(Arguments, words)
    summary = Path(given.summary) if given.summary else resource_root() / SUMMARY
    found = advise(_configured(overrides), given.share, given.measure, summary)
    gains = recorded_gains(summary, given.fit)
    if given.json:
        print(json.dumps({**found, "gains": [row._asdict() for row in gains]}))
    else:
        _print(found, given.top)
        _print_gains(gains)


def _configured(overrides: Sequence[str]) -> RunConfig:
    """The configuration of a baseline run with these settings."""
    with initialize_config_dir(str(resource_root() / "conf"), version_base="1.3"):
        config = read_config(compose("config", overrides=[*overrides, "schedule=static"]))
    return replace(config, schedule=SCHEDULES["static"](q_max=config.quantizer.initial_precision.weight))


def _print(found: Mapping[str, Any], top: int) -> None:
    console, rows = Console(width=max(Console().width, WIDTH), soft_wrap=True), found["candidates"]
    where = f"hardware={found['hardware']}" + (f", {found['device']} at peak rates" if found["device"] else "")
    title = f"{found['model']}, quantizer={found['quantizer']}: at most {100 * found['budget']:.3g} %"
    console.print(f"{title} of the {MEASURES[found['measure']]} of {found['baseline']} ({where})")
    if not rows:
        console.print(f"nothing within the budget; cheapest: {found['cheapest']}, {100 * found['cheapest_cost']:.1f} %")
        return
    table = Table(*(Column(title, no_wrap=True) for title in COLUMNS))
    for row in rows[:top]:
        table.add_row(f"{100 * row['cost']:.1f}", *_cells(row["measured"]), row["settings"].replace("schedule.", ""))
    console.print(table)
    if len(rows) > top:
        console.print(f"{len(rows) - top} more: top={len(rows)} shows them")
    if source := found["evidence_from"]:
        console.print(f"points: difference in final accuracy to {found['baseline']}, measured with {source}")
    else:
        console.print("no recorded runs of these settings with this quantizer")


def _print_gains(gains: Sequence[MeasuredGain]) -> None:
    if not gains:
        return
    console = Console(width=max(Console().width, WIDTH), soft_wrap=True)
    table = Table(*(Column(title, no_wrap=True) for title in GAIN_COLUMNS))
    for row in gains:
        place = f"{row.fit:.1f}", row.network, f"{row.steps:,}", row.schedule
        table.add_row(*place, f"{row.price:+.2f}", f"{row.gain:+.2f}", _interval(row.low, row.high), str(row.n))
    console.print(f"when a schedule pays: gains over static 8 bits of equal cost, with fewer steps ({gains[0].data})")
    console.print(table)
    console.print(
        "training accuracy: of static 8 bits at full length; price: what static 8 bits loses with fewer steps"
    )


def _cells(measured: Mapping[str, Any] | None) -> list[str]:
    if measured is None:
        return ["", "", "", "not measured"]
    interval = _interval(measured["low"], measured["high"])
    return [f"{measured['difference']:+.2f}", interval, str(measured["n"]), measured["sureness"]]


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:+.2f} to {high:+.2f}"


if __name__ == "__main__":
    sys.exit(main())
