"""What recorded runs say about settings: differences in accuracy to static precision, and gains at equal cost."""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple, Optional

from bitcycle.configuration import GROUPS
from bitcycle.files import read_csv
from bitcycle.recipe.options import TrainingOptions
from bitcycle.reproduction.analysis.cells import find_results, read_runs
from bitcycle.reproduction.analysis.collect import is_accuracy
from bitcycle.reproduction.analysis.contrast import Pool
from bitcycle.reproduction.analysis.gain_table import Row, gain_rows
from bitcycle.reproduction.analysis.statistics import over_seeds
from bitcycle.reproduction.candidate import Candidate
from bitcycle.reproduction.manifest import MANIFEST, read_manifest
from bitcycle.schedule import SCHEDULES, SUITE
from bitcycle.settings import Settings, default_of

ENOUGH_SEEDS = 5
IGNORED = ("schedule", "seed", "hardware", "logging", "dry_run", "scale")
"""Groups of settings that may differ between runs of one group, besides those that do not affect results."""
IGNORED_TRAINING = ("steps", "evaluation_steps", "compute")


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
    groups = _groups([row for row in rows if is_accuracy(row)])
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


def _groups(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Runs by group. Groups with runs of the same hash are one: older runs recorded settings that have been removed since."""
    own = [group_of(row) for row in rows]
    by_hash: dict[str, set[str]] = defaultdict(set)
    for row, name in zip(rows, own):
        by_hash[row["hash"]].add(name)
    joined: dict[str, frozenset[str]] = {name: frozenset({name}) for name in own}
    for names in by_hash.values():
        one = frozenset[str]().union(*(joined[name] for name in names))
        joined |= dict.fromkeys(one, one)
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row, name in zip(rows, own):
        groups[min(joined[name], key=lambda other: (len(other), other))].append(row)
    return groups


def recorded_runs(summary: Path, quantizer: str) -> tuple[list[dict[str, Any]], set[str]]:
    """Recorded runs of a quantizer, without superseded ones, and the hashes of the board's runs."""
    rows = [row for row in read_csv(summary, missing_ok=True) if row["quantizer"] == quantizer]
    files = sorted((summary.parents[1] / MANIFEST.name).glob("*/*.csv")) if len(summary.parents) > 1 else []
    places = [(file.parent.name, place) for file in files for place in read_manifest(file)]
    current = {place.hash for _, place in places if not place.superseded}
    old = {place.hash for _, place in places if place.superseded} - current
    board = {name for paper, place in places if paper == "board" and not place.superseded for name in place.names}
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
    names = {name for place in places for name in place.names}
    pool = Pool(read_runs([row for row in read_csv(summary, missing_ok=True) if row["hash"] in names], summary))
    found = [_gain(row, row.fit.mean) for row in gain_rows(find_results(places, pool.runs).done, pool) if row.fit]
    if fit is not None and found:
        nearest = min((row.fit for row in found), key=lambda value: abs(value - fit))
        found = [row for row in found if row.fit == nearest]
    return sorted(found, key=lambda row: (row.fit, row.schedule))


def _gain(row: Row, fit: float) -> MeasuredGain:
    price, gain, (low, high) = row.price.mean, row.gain.mean, row.gain.interval() or (None, None)
    return MeasuredGain(fit, row.network, row.data, row.steps, row.schedule, price, gain, low, high, row.gain.n)
