"""The picture of one run: precision above, accuracy and loss below, over the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bitcycle.figure.schedules import UNDATED
from bitcycle.schedule import Precision
from bitcycle.training.plan import Plan
from bitcycle.training.run_folder import read_json, read_records

AT_Q_MAX = "_at_q_max"
FORWARD, BACKWARD, ACCURACY, LOSS = "tab:blue", "tab:gray", "tab:green", "tab:orange"


def draw_run(plan: Plan) -> Path:
    """Draw the precision, the metric and the training loss of a run over its steps.

    Returns:
        the path of the PNG file in the run folder; an SVG file of the same name lies beside it.
    """
    records = read_records(plan.folder.metrics)
    summary: dict[str, Any] = read_json(plan.folder.summary) or {}
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 5), sharex=True, height_ratios=(2, 3), constrained_layout=True
    )
    if any("cp" in record for record in records):
        draw_compute(above, records)
    else:
        draw_precision(above, plan.schedule.run_lengths if plan.schedule.fixed else recorded_precision(records))
    draw_training(below, records, summary.get("unit", ""))
    figure.suptitle(_title(plan, summary), fontsize=10)
    for suffix, metadata in UNDATED.items():
        figure.savefig(plan.folder.picture.with_suffix(suffix), dpi=150, metadata=metadata)
    plt.close(figure)
    return plan.folder.picture


def recorded_precision(records: list[dict[str, Any]]) -> list[tuple[Precision, int]]:
    """The precision that a run recorded, at each of its records: [(precision, steps), ...]."""
    train = [record for record in records if record["kind"] == "train"]
    ends = [record["step"] for record in train]
    return [
        (Precision(*record["precision"]), end - start)
        for record, start, end in zip(train, [0, *ends[:-1]], ends, strict=True)
    ]


def draw_precision(axes: Axes, lengths: list[tuple[Precision, int]]) -> None:
    """Forward and backward bits as step lines."""
    edges = [0]
    for _, steps in lengths:
        edges.append(edges[-1] + steps)
    forward = [precision.weight for precision, _ in lengths]
    backward = [precision.gradient for precision, _ in lengths]
    axes.stairs(backward, edges, baseline=None, color=BACKWARD, linestyle="--", label="gradients")
    axes.stairs(forward, edges, baseline=None, color=FORWARD, linewidth=1.5, label="weights and activations")
    axes.set_ylabel("precision (bits)")
    low, high = min(forward), max(*forward, *backward)
    axes.set_yticks(range(low, high + 1) if high - low <= 12 else range(0, high + 1, 4))
    axes.margins(x=0, y=0.15)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=8)


def draw_compute(axes: Axes, records: list[dict[str, Any]]) -> None:
    """The compute percentage of a network that chooses its bits itself, and its target."""
    train = [record for record in records if record["kind"] == "train"]
    steps = [record["step"] for record in train]
    axes.plot(steps, [r["cp_target"] for r in train], color=BACKWARD, linestyle="--", label="target")
    axes.plot(steps, [r["cp"] for r in train], color=FORWARD, linewidth=1.5, label="compute percentage")
    axes.set_ylabel("cp (% of float32)")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=8)


def draw_training(axes: Axes, records: list[dict[str, Any]], unit: str) -> None:
    """Training loss, and the main metric at the bits of the step and at q_max."""
    train = [record for record in records if record["kind"] == "train"]
    tests = [record for record in records if record["kind"] == "evaluation"]
    metric = main_metric(tests)
    shown, steps = metric.replace("_", " "), [record["step"] for record in tests]
    values, at_q_max = ([record[name] for record in tests] for name in (metric, f"{metric}{AT_Q_MAX}"))
    axes.plot(steps, values, "o-", markersize=3, color=ACCURACY, label=f"{shown}, bits of the step")
    axes.plot(steps, at_q_max, ":", color=ACCURACY, label=f"{shown} at q_max")
    axes.set_ylabel(f"{shown} ({unit})" if unit else shown)
    axes.set_xlabel("optimizer step")
    if "accuracy" in metric:
        axes.set_ylim(top=100)
    loss_axes = axes.twinx()
    loss_axes.plot(
        [r["step"] for r in train], [r["loss"] for r in train], color=LOSS, linewidth=1, label="training loss"
    )
    loss_axes.set_ylabel("training loss")
    loss_axes.set_ylim(bottom=0)
    lines = [*axes.get_lines(), *loss_axes.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], loc="center right", fontsize=8)


def main_metric(evaluations: list[dict[str, Any]]) -> str:
    """The name of the metric that a run's evaluations record at q_max, too."""
    return next(name.removesuffix(AT_Q_MAX) for name in evaluations[0] if name.endswith(AT_Q_MAX))


def _title(plan: Plan, summary: dict[str, Any]) -> str:
    config = plan.config
    name = f"{config.model.name} on {config.dataset.name}, schedule {config.schedule.name}"
    if not summary:
        return f"{name} (scale {config.scale}, not finished)"
    relative = summary["cost"]["total"]["relative_to_static"]
    result = f"final {summary['final']:.1f} {summary['unit']}, cost {relative:.2f} of static q_max"
    return f"{name}: {result}\nscale {config.scale}, n = 1, seed {config.seed}, {summary['total_steps']} steps"
