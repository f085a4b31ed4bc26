"""Reports for the console: the plan and cost of a run, its results, and the progress of all runs in a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bitcycle.hardware import cost_table, saving
from bitcycle.precision import Precision
from bitcycle.schedule import FORMAT_BITS, Schedule
from bitcycle.training.display import console
from bitcycle.training.outcome import metric_text
from bitcycle.training.plan import Plan
from bitcycle.training.run_folder import RunFolder


def plan_report(plan: Plan) -> Group:
    """Settings, precision, layers and cost of a planned run."""
    planned, (_, most) = plan.cost(), plan.cost_bounds()
    cost = cost_table(plan.workload, plan.config.hardware, planned or most, plan.schedule.reference)
    described, facts = plan.describe(), Table.grid(padding=(0, 2))
    for name, value in _facts(plan, described):
        facts.add_row(Text(name, style="bold"), value)
    layers = Table(*cost.columns, title="cost by layer group" + ("" if planned else ", at most"))
    for section in cost.sections:
        for row in section:
            layers.add_row(*row)
        layers.add_section()
    counting, *totals = cost.notes
    if planned is None:
        totals.insert(0, f"the schedule {plan.schedule.follows}: {_bounds(described)}")
    if first := described["preliminary"]:
        totals.append(f"preceded by: {first['schedule']}, at most {first['total_steps']} steps, {_bounds(first)}")
    return Group(facts, layers, Text(f"({counting})", style="dim"), *(Text(line, style="bold") for line in totals))


def _bounds(described: dict[str, Any]) -> str:
    least, most = (described["cost_bounds"][end]["gbitops"] for end in ("least", "most"))
    return f"between {least:.4g} and {most:.4g} GBitOps"


def _facts(plan: Plan, described: dict[str, Any]) -> list[tuple[str, str]]:
    config, samples = plan.config, f"{plan.info.train_samples} in the training set"
    chosen = f"schedule {config.schedule.name}, quantizer {config.quantizer.name}"
    return [
        ("run", f"{config.model.name} on {config.dataset.name}, {chosen}"),
        ("scale", described["scale"]),
        ("folder", described["run_dir"]),
        ("state", described["state"]),
        ("steps", f"{described['total_steps']} of {described['batch_size']} samples ({samples})"),
        ("parameters", f"{described['parameters']:,}"),
        ("MACs per sample", f"{described['macs_per_sample']['total']:,.0f}"),
        ("bits w/a/g x steps", _precision(plan.schedule)),
        *([("formats", _formats(plan.schedule))] if plan.schedule.options.format_lists else []),
        *_phases(described["phases"]),
    ]


def _phases(phases: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """A line for each phase, if there are several: its first step, initial learning rate and starting weights."""
    lines = []
    for number, phase in enumerate(phases, start=1):
        rate = phase["learning_rate"]
        shown = f"rate {rate:.4g}" if rate is not None else "rate by the weights' step sizes"
        begins = "initial" if phase["first_step"] == 0 else phase["start_from"]
        line = f"from step {phase['first_step']}, {shown}, {begins} weights, {phase['evaluations']} evaluations"
        lines.append((f"phase {number}", line))
    return lines if len(lines) > 1 else []


def _formats(schedule: Schedule) -> str:
    """The formats that the bits of the schedule select."""
    forward, gradient = schedule.options.format_lists or ((), ())
    words = (", ".join(f"{name} ({FORMAT_BITS[name]})" for name in names) for names in (forward, gradient))
    return "; gradients ".join(words)


def _precision(schedule: Schedule) -> str:
    """The first intervals of constant bits."""
    if not schedule.fixed:
        return schedule.summary
    lengths = schedule.run_lengths
    shown = "  ".join(f"{'/'.join(map(str, precision))}x{steps}" for precision, steps in lengths[:8])
    return shown + (f"  ... ({len(lengths)} intervals)" if len(lengths) > 8 else "")


def summary_report(summary: dict[str, Any], reference: Precision) -> list[str]:
    """The result of a run in a few lines."""
    total, to_best = summary["cost"]["total"], summary["cost"]["to_best"]
    metric, static = summary["metric"], "/".join(map(str, reference))
    at_q_max = "" if "phases" in summary else f", at q_max {metric_text(summary['at_q_max']['final'])}"
    lines = [
        f"{metric}: final {metric_text(summary['final'])}, best {metric_text(summary['best'])} at step {summary['best_step']}"
        f"{at_q_max} (n = 1, scale {summary['scale']})",
        f"cost: {total['gbitops']:.4g} GBitOps, {saving(total['relative_to_static'], static)}; "
        f"up to the best {to_best['gbitops']:.4g} GBitOps",
    ]
    for phase in summary.get("phases", []):
        chosen = f"with the weights after step {phase['from_step']} ({phase['start_from']})"
        weights = chosen if phase["first_step"] > 0 else "with initial weights"
        bits = "/".join(map(str, phase["precision"]))
        lines.append(
            f"phase {phase['phase']}: {bits} bits from step {phase['first_step']}, {weights}:"
            f" {metric} {metric_text(phase['final'])}"
        )
    if "validation" in summary:
        held_out = summary["validation"]
        lines.append(
            f"validation: final {metric_text(held_out['final'])}, best {metric_text(held_out['best'])}"
            f" with {metric} {metric_text(held_out['test_at_best'])}"
        )
    for word, key, unit in (("energy", "energy_j", "J"), ("latency", "latency_s", "s")):
        if total.get(key) is not None:
            less = saving(total[f"{word}_relative_to_static"], static)
            lines.append(f"{word}: {total[key]:.4g} {unit}, {less}; up to the best {to_best[key]:.4g} {unit}")
    if "averaged" in summary:
        averaged = summary["averaged"]
        lines.append(
            f"averaged weights: final {metric_text(averaged['final'])}, best {metric_text(averaged['best'])}"
            f" (mean of {averaged['weights']})"
        )
    return [*lines, *_found(summary)]


def _found(summary: dict[str, Any]) -> list[str]:
    """The result of a search schedule or a preliminary run."""
    found = {name: value for name, value in summary.get("found", {}).items() if not isinstance(value, dict)}
    lines = [f"found {', '.join(f'{name}: {value}' for name, value in found.items())}"] if found else []
    for name, first in summary.get("preliminary", {}).items():
        lines.append(f"preceded by: {name}, {first['total_steps']} steps, {first['cost']['gbitops']:.4g} GBitOps")
    return lines


def status_table(root: Path) -> Table:
    """One row for each run folder below `root`."""
    table = Table("run", "state", "step", "last update", "result", title=f"runs in {root}")
    for status_file in sorted(root.rglob("status.json")):
        folder = RunFolder(status_file.parent)
        status, summary = folder.read_status(), folder.read_summary()
        state = str(status.get("state", "unreadable"))
        if state == "running" and not folder.is_in_use():
            state = "stopped"
        result = (
            f"{summary['metric']} {metric_text(summary['final'])}"
            if state == "done" and summary
            else status.get("reason") or ""
        )
        step = f"{status.get('step', '?')}/{status.get('total_steps', '?')}"
        table.add_row(str(folder.path.relative_to(root)), state, step, str(status.get("updated", "")), str(result)[:60])
    return table


def print_report(report: Group | Sequence[str]) -> None:
    """Print a report on standard output."""
    screen = console(120)
    for part in [report] if isinstance(report, Group) else report:
        screen.print(part, highlight=False)
