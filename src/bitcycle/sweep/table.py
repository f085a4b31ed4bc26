"""The table at the end of a sweep: one row for each setting, with the mean over its seeds and the cost."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bitcycle.errors import DataError
from bitcycle.sweep.registry import SweepRun
from bitcycle.training.display import console
from bitcycle.training.plan import Plan, make_plan
from bitcycle.training.run import recounted
from bitcycle.training.run_folder import RunFolder

logger = logging.getLogger(__name__)

COSTS = {
    "gbitops": "GBitOps",
    "relative_to_static": "cost relative to static q_max",
    "energy_j": "energy (J)",
    "latency_s": "latency (s)",
}
"""Field of a cost -> heading; those that no run has are left out."""

PLACES = ("data_root", "results_root")
"""Settings that hold paths of one machine."""


Finished = tuple[RunFolder, Mapping[str, Any]]
"""The folder of a finished run, and its summary."""


class FinishedSetting(NamedTuple):
    """The finished runs that differ in nothing but their seed."""

    settings: Mapping[str, Any]  # GROUP.NAME -> value
    summaries: list[Mapping[str, Any]]


def finished_runs(runs: Iterable[SweepRun]) -> list[Finished]:
    """The finished runs among these. Costs are those of the settings of `runs`: counted again where others were recorded, as they
    are no part of a run's name; runs whose costs cannot be counted again, as their data have moved, have none."""
    done = [run for run in runs if run.path and run.state == "done" and run.folder.config.exists()]
    plans: dict[str, Plan] = {}  # by hash: one for all seeds
    found: list[Finished] = []
    for run in track(done, "counting", console=Console(stderr=True), transient=True):
        summary, name = run.folder.read_summary(), run.key[1]
        if run.config is not None and not run.config.hardware.is_recorded(summary["counting"]):
            try:
                plans[name] = plans.get(name) or make_plan(run.config)
                summary = recounted(replace(plans[name], folder=run.folder))
            except DataError as error:
                logger.warning("%s: no cost by this cost model: %s", run.path, error)
                summary["cost"]["total"] = dict.fromkeys(summary["cost"]["total"])
        found.append((run.folder, summary))
    return found


def show_runs(finished: Sequence[Finished]) -> None:
    """Print the table of finished runs; nothing if there are none."""
    if finished:
        console(180).print(table_of(finished_settings(finished)))


def finished_settings(finished: Iterable[Finished]) -> list[FinishedSetting]:
    """The finished runs by setting, in their order."""
    found: dict[str, FinishedSetting] = {}
    for folder, summary in finished:
        settings = dict(_flat(folder.read_settings()))
        for name in (*PLACES, "seed"):
            settings.pop(name, None)
        found.setdefault(summary["hash"], FinishedSetting(settings, [])).summaries.append(summary)
    return list(found.values())


def table_of(found: Sequence[FinishedSetting]) -> Table:
    """One row for each setting: what varies, n, and means of the final metric and of what the cost model estimates."""
    varying = _varying([group.settings for group in found])
    metrics = dict.fromkeys(_metric(group) for group in found)
    totals = [run["cost"]["total"] for group in found for run in group.summaries]
    costs = [name for name in COSTS if any(total.get(name) is not None for total in totals)]
    table = Table(*varying, "n", *metrics, *(COSTS[name] for name in costs), title="Finished runs")
    for group in found:
        runs = group.summaries
        final = _mean([run["final"] for run in runs])
        table.add_row(
            *(str(group.settings.get(name, "")) for name in varying),
            str(len(runs)),
            *(final if metric == _metric(group) else "" for metric in metrics),
            *(_mean([run["cost"]["total"].get(name) for run in runs]) for name in costs),
        )
    return table


def _mean(values: Sequence[float | None]) -> str:
    """Their mean; empty if one is missing."""
    known = [value for value in values if value is not None]
    return f"{mean(known):.4g}" if len(known) == len(values) else ""


def _metric(group: FinishedSetting) -> str:
    name, unit = (group.summaries[0][key] for key in ("metric", "unit"))
    return f"{name} ({unit})" if unit else str(name)


def _varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that differ; of a group whose options differ the choice, and what differs between equal choices, as most other
    settings follow from it."""

    def differs(name: str, among: Sequence[Mapping[str, Any]]) -> bool:
        return len({str(one.get(name)) for one in among}) > 1

    found = []
    for name in dict.fromkeys(name for one in settings for name in one):
        choice = f"{name.partition('.')[0]}.name"
        alike = defaultdict(list)
        for one in settings:
            alike[str(one.get(choice))].append(one)
        if differs(name, settings) and (name.endswith(".name") or any(differs(name, some) for some in alike.values())):
            found.append(name)
    return found


def _flat(value: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        return [(prefix, value)]
    return [pair for name, part in value.items() for pair in _flat(part, f"{prefix}.{name}" if prefix else str(name))]
