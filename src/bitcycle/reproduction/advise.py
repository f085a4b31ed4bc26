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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Column, Table

from bitcycle.configuration import RunConfig, read_config
from bitcycle.door import parser_of
from bitcycle.files import resource_root
from bitcycle.guard import guarded
from bitcycle.reproduction.analysis.collect import SUMMARY
from bitcycle.reproduction.candidate import candidates, cost_of
from bitcycle.reproduction.evidence import MeasuredGain, choose_group, recorded_gains, recorded_runs
from bitcycle.schedule import SCHEDULES
from bitcycle.settings import SettingError, Settings, read_words, setting
from bitcycle.training.plan import make_plan

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


def advise(config: RunConfig, budget: float, measure: str | None, summary: Path) -> dict[str, Any]:
    """The candidates within `budget` (a fraction of the baseline's cost), cheapest first. Raises SettingError for
    incompatible settings, or a measure that the cost model does not compute."""
    plan = make_plan(config)
    config, baseline = plan.config, plan.config.quantizer.initial_precision
    if measure is None:
        sample = config.hardware.cost(plan.workload, {baseline: 1}, baseline)
        measure = "bitops" if sample.latency_s is None else "latency"
    every = candidates(baseline.weight, baseline.gradient)
    costs = {each: cost for each in every if (cost := cost_of(each, plan, measure)) is not None}
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
    if config.quantizer.name == "none":
        raise SettingError(
            "quantizer", "none", "quantizes nothing, so that bits save nothing", "use quantizer=sbm or another"
        )
    top = config.quantizer.initial_precision
    gradient = None if top.gradient == top.weight else top.gradient
    return replace(config, schedule=SCHEDULES["static"](q_max=top.weight, gradient=gradient))


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
        "training accuracy: of static 8 bits at full length; price: what static 8 bits loses with fewer steps\n"
        "fewer bits throughout, schedule=static above, are the other way to spend as little: compare with them, too"
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
