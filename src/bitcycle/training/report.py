"""What would run and what it would cost, and what a finished run found, as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bitcycle.hardware import Cost, LayerCost
from bitcycle.schedule import Precision
from bitcycle.training.plan import Plan


def plan_report(plan: Plan) -> Group:
    """Settings, precision, layers and cost of a planned run."""
    cost, hardware = plan.cost(), plan.config.hardware
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(plan):
        facts.add_row(Text(name, style="bold"), value)
    layers = Table(
        "layers", "count", "bits", "MMACs", "forward", "error", "weight gradient", "share", title="cost by layer group"
    )
    for row in _layer_rows(plan, cost):
        layers.add_row(*row)
    counting = f"counted as {hardware.convention}: " + ", ".join(
        f"{rule}={hardware.rule(rule)}" for rule in ("count", "images", "float_layers", "input_gradient")
    )
    return Group(
        facts, layers, Text(f"(GBitOps; {counting})", style="dim"), *_cost_lines(cost, plan.schedule.reference)
    )


def _facts(plan: Plan) -> list[tuple[str, str]]:
    config = plan.config
    lengths = plan.schedule.run_lengths
    shown = "  ".join(f"{'/'.join(map(str, precision))}x{steps}" for precision, steps in lengths[:8])
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
        ("bits w/a/g x steps", shown + (f"  ... ({len(lengths)} stretches)" if len(lengths) > 8 else "")),
    ]


def _layer_rows(plan: Plan, cost: Cost) -> list[list[str]]:
    """One row for each kind of layer: quantized, fixed, float, elementwise."""
    treatments = {rule.name: rule.treatment for rule in plan.layers}
    operations = {operation.name: operation for operation in plan.workload.operations}
    groups: dict[str, list[LayerCost]] = {}
    for layer in cost.layers:
        groups.setdefault(treatments.get(layer.name, "float" if layer.name in operations else layer.name), []).append(
            layer
        )
    total = sum(layer.total for layer in cost.layers) or 1
    rows = []
    for treatment, members in groups.items():
        macs = sum(operations[layer.name].macs for layer in members if layer.name in operations)
        passes = [
            sum(getattr(layer, name) for layer in members) / 1e9 for name in ("forward", "error", "weight_gradient")
        ]
        share = sum(layer.total for layer in members) / total
        bits = {"quantized": "schedule", "float": "32"}.get(
            treatment, "schedule" if treatment.startswith("(") else treatment
        )
        if treatment == "float" and plan.config.hardware.rule("float_layers") == "schedule":
            bits = "32, charged as the schedule"
        rows.append(
            [
                treatment,
                str(len(members)),
                bits,
                f"{macs / 1e6:.2f}",
                *(f"{value:.4g}" for value in passes),
                f"{share:.1%}",
            ]
        )
    return rows


def _cost_lines(cost: Cost, reference: Precision) -> list[Text]:
    static = "/".join(map(str, reference))
    lines = [f"{cost.gbitops:.4g} GBitOps = {cost.effective_macs:.4g} effective MACs; {saving(cost, static)}"]
    if cost.energy_j is not None:
        lines.append(f"energy {cost.energy_j:.4g} J")
    if cost.latency_s is not None:
        lines.append(f"latency {cost.latency_s:.4g} s")
    return [Text(line, style="bold") for line in lines]


def saving(cost: Cost, static: str) -> str:
    """The cost relative to static q_max in words."""
    percent = cost.saving_percent
    if percent >= 0:
        return f"{percent:.1f} % less than static {static} bits"
    return f"{cost.relative_to_static:.2f} times static {static} bits"


def summary_report(summary: dict[str, Any], reference: Precision) -> list[str]:
    """The result of a run in a few lines."""
    total, to_best = summary["cost"]["total"], summary["cost"]["to_best"]
    metric, static = summary["metric"], "/".join(map(str, reference))
    relative = total["relative_to_static"]
    against = f"{100 * (1 - relative):.1f} % less than" if relative <= 1 else f"{relative:.2f} times"
    return [
        f"{metric}: final {summary['final']:.2f}, best {summary['best']:.2f} at step {summary['best_step']}, "
        f"at q_max {summary['at_q_max']['final']:.2f} (n = 1, scale {summary['scale']})",
        f"cost: {total['gbitops']:.4g} GBitOps, {against} static {static} bits; up to the best {to_best['gbitops']:.4g} GBitOps",
    ]


def print_report(report: Group | Sequence[str], console: Console | None = None) -> None:
    """Print a report on standard output."""
    console = console or Console(width=None if Console().is_terminal else 120)
    if isinstance(report, Group):
        console.print(report)
    else:
        for line in report:
            console.print(line, highlight=False)
