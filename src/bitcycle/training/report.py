"""What would run and what it would cost, and what a finished run found, as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bitcycle.hardware import cost_table, saving
from bitcycle.schedule import Precision
from bitcycle.training.plan import Plan


def plan_report(plan: Plan) -> Group:
    """Settings, precision, layers and cost of a planned run."""
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(plan):
        facts.add_row(Text(name, style="bold"), value)
    planned, reference = plan.cost(), plan.schedule.reference
    least, most = plan.cost_bounds()
    shown = most if planned is None else planned
    cost = cost_table(plan.workload, plan.config.hardware, shown, reference)
    title = "cost by layer group" if planned is not None else "cost at most: the highest bits at every step"
    layers = Table(*cost.columns, title=title)
    for section in cost.sections:
        for row in section:
            layers.add_row(*row)
        layers.add_section()
    counting, *totals = cost.notes
    if planned is None:
        bounds = f"between {least.gbitops:.4g} and {most.gbitops:.4g} GBitOps"
        totals.insert(0, f"the schedule {plan.schedule.follows}: {bounds}")
    return Group(facts, layers, Text(f"({counting})", style="dim"), *(Text(line, style="bold") for line in totals))


def _facts(plan: Plan) -> list[tuple[str, str]]:
    config = plan.config
    return [
        (
            "run",
            f"{config.model.name} on {config.dataset.name}, schedule {config.schedule.name}, quantizer {config.quantizer.name}",
        ),
        ("scale", config.scale),
        ("folder", str(plan.folder.path)),
        ("state", plan.folder.state()),
        ("steps", f"{plan.total_steps} of {plan.batch_size} samples ({plan.info.train_samples} in the training set)"),
        ("parameters", f"{plan.parameters:,}"),
        ("MACs a sample", f"{plan.workload.macs:,}"),
        ("bits w/a/g x steps", _precision(plan)),
    ]


def _precision(plan: Plan) -> str:
    """The first stretches of equal bits."""
    if not plan.schedule.fixed:
        return plan.schedule.in_words
    lengths = plan.schedule.run_lengths
    shown = "  ".join(f"{'/'.join(map(str, precision))}x{steps}" for precision, steps in lengths[:8])
    return shown + (f"  ... ({len(lengths)} stretches)" if len(lengths) > 8 else "")


def summary_report(summary: dict[str, Any], reference: Precision) -> list[str]:
    """The result of a run in a few lines."""
    total, to_best = summary["cost"]["total"], summary["cost"]["to_best"]
    metric, static = summary["metric"], "/".join(map(str, reference))
    lines = [
        f"{metric}: final {summary['final']:.2f}, best {summary['best']:.2f} at step {summary['best_step']}, "
        f"at q_max {summary['at_q_max']['final']:.2f} (n = 1, scale {summary['scale']})",
        f"cost: {total['gbitops']:.4g} GBitOps, {saving(total['relative_to_static'], static)}; "
        f"up to the best {to_best['gbitops']:.4g} GBitOps",
    ]
    for word, key, unit in (("energy", "energy_j", "J"), ("latency", "latency_s", "s")):
        if total.get(key) is not None:
            less = saving(total[f"{word}_relative_to_static"], static)
            lines.append(f"{word}: {total[key]:.4g} {unit}, {less}; up to the best {to_best[key]:.4g} {unit}")
    return lines


def print_report(report: Group | Sequence[str], console: Console | None = None) -> None:
    """Print a report on standard output."""
    console = console or Console(width=None if Console().is_terminal else 120)
    if isinstance(report, Group):
        console.print(report)
    else:
        for line in report:
            console.print(line, highlight=False)
