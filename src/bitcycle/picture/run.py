"""Pictures of single runs: precision, metric and training loss; and range tests."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bitcycle.files import read_records
from bitcycle.picture.curve import curve_of
from bitcycle.picture.layout import legend, panels, save
from bitcycle.training.plan import Plan
from bitcycle.training.run_folder import RunFolder

FORWARD, BACKWARD, ACCURACY, LOSS, FOUND = "#0072b2", "0.5", "#009e73", "#e69f00", "#d55e00"
ABOVE: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 2, "frameon": False, "fontsize": 8}
"""Position of the legend above the upper axes."""
Curve = Mapping[str, Any]
"""The curve of a run, see `bitcycle.picture.curve.curve_of`."""


def _draw(folder: RunFolder, figure_of: Callable[[Curve, Mapping[str, Any]], Figure]) -> Path:
    """Save the figure of a finished run's curve and summary in its folder; returns the PNG file."""
    summary = folder.read_summary()
    curve = curve_of(read_records(folder.metrics), summary)
    return save(figure_of(curve, summary), folder.picture.with_suffix(""))[0]


def draw_run(plan: Plan) -> Path:
    """Draw precision, metric and training loss of a finished run as PNG and SVG files; returns the PNG file."""
    return _draw(plan.folder, partial(_draw_training_run, plan))


def _draw_training_run(plan: Plan, curve: Curve, summary: Mapping[str, Any]) -> Figure:
    training = curve["training"]
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 5), sharex=True, height_ratios=(2, 3), layout="constrained")
    if "cp" in training:
        draw_compute(above, training)
    elif plan.schedule.fixed:
        precisions, steps = zip(*plan.schedule.run_lengths)
        bits = ([getattr(precision, role) for precision in precisions] for role in ("weight", "gradient"))
        draw_precision(above, list(accumulate(steps)), *bits)
    else:
        draw_precision(above, training["step"], training["weight"], training["gradient"])
    draw_training(below, curve, summary["unit"])
    config, cost = plan.config, summary["cost"]["total"]["relative_to_static"]
    name = f"{config.model.name} on {config.dataset.name}, schedule {config.schedule.name}"
    result = f"final {summary['final']:.1f} {summary['unit']}, cost {cost:.2f} of static q_max"
    figure.suptitle(f"{name} ({config.scale} scale, seed {config.seed}): {result}", fontsize=9.5)
    return figure


def draw_precision(axes: Axes, ends: Sequence[int], forward: Sequence[int], backward: Sequence[int]) -> None:
    """Draw forward and backward bits as step lines; `ends` are the steps at which each precision ends."""
    edges = [0, *ends]
    axes.stairs(backward, edges, baseline=None, color=BACKWARD, linestyle="--", label="gradients")
    axes.stairs(forward, edges, baseline=None, color=FORWARD, linewidth=1.5, label="weights and activations")
    axes.set_ylabel("precision (bits)")
    low, high = min(forward), max(*forward, *backward)
    axes.set_yticks(range(low, high + 1) if high - low <= 12 else range(0, high + 1, 4))
    axes.margins(x=0, y=0.15)
    axes.legend(**ABOVE)


def draw_compute(axes: Axes, training: Curve) -> None:
    """Draw the compute percentage of a network that chooses its bits, and its target."""
    axes.plot(training["step"], training["cp_target"], color=BACKWARD, linestyle="--", label="target")
    axes.plot(training["step"], training["cp"], color=FORWARD, linewidth=1.5, label="compute percentage")
    axes.set(ylabel="cp (% of float32)", ylim=(0, None), xmargin=0)
    axes.legend(**ABOVE)


def draw_training(axes: Axes, curve: Curve, unit: str) -> None:
    """Draw the training loss, and the main metric at the current bits and at q_max."""
    shown, tests, training = curve["metric"].replace("_", " "), curve["evaluations"], curve["training"]
    axes.plot(tests["step"], tests["value"], "o-", ms=3, color=ACCURACY, label=f"{shown}, bits of the step")
    if tests["at_q_max"] != tests["value"]:
        axes.plot(tests["step"], tests["at_q_max"], ":", color=ACCURACY, label=f"{shown} at q_max")
    axes.set(xlabel="optimizer step", ylabel=f"{shown} ({unit})" if unit else shown)
    if "accuracy" in shown:
        axes.set_ylim(top=100)
    right = axes.twinx()
    right.plot(training["step"], training["loss"], color=LOSS, linewidth=1, label="training loss")
    right.set(ylabel="training loss", ylim=(0, None))
    lines = [*axes.get_lines(), *right.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], loc="center right", fontsize=8)


# Range tests (CPT, figure 4)


def draw_range_test(folder: RunFolder) -> Path:
    """Draw the finished range test in a run folder as PNG and SVG files; returns the PNG file."""
    return _draw(folder, _draw_levels_of_range_test)


def _draw_levels_of_range_test(curve: Curve, summary: Mapping[str, Any]) -> Figure:
    q_min = summary["found"]["q_min"]
    figure, (axes,) = panels(1, width=8, height=3.3)
    draw_levels(axes, curve, q_min)
    end = len(curve["range_test"]["levels"]) * curve["range_test"]["level_steps"]
    axes.set(xlabel="optimizer step", ylabel="training accuracy (%)", xlim=(0, end), ylim=(0, None))
    legend(figure, [axes])
    name = f"precision range test of {summary['model']} on {summary['dataset']}, quantizer {summary['quantizer']}"
    figure.suptitle(f"{name}: q_min = {q_min} ({summary['scale']} scale, seed {summary['seed']})", fontsize=9.5)
    return figure


def draw_levels(axes: Axes, curve: Curve, q_min: int | None = None) -> None:
    """Draw the observed accuracy; for each precision a band, the mean accuracy at its end and the accuracy that was needed; and
    a circle at `q_min`."""
    test, seen = curve["range_test"], curve["observations"]
    axes.plot(
        seen["step"], seen["accuracy"], color=FORWARD, lw=0.8, alpha=0.6, label=f"mean of {seen['step'][0]} steps"
    )
    steps, window = test["level_steps"], test["window"]
    labels = iter((f"mean of the last {window} steps", f"needed: best before + {100 * test['threshold']:g} points"))
    for index, level in enumerate(test["levels"]):
        start, end, accuracy = index * steps, (index + 1) * steps, 100 * level["accuracy"]
        needed = accuracy - 100 * (level["rise"] - test["threshold"])
        if index % 2 == 0:
            axes.axvspan(start, end, color="black", alpha=0.04, linewidth=0)
        words: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "center", "fontsize": 9}
        axes.text((start + end) / 2, 1.02, f"{level['bits']} bits", **words)
        axes.hlines(accuracy, end - window, end, color=FORWARD, linewidth=3, label=next(labels, ""))
        axes.hlines(needed, start, end, color="0.5", linestyle="--", linewidth=1, label=next(labels, ""))
        if level["bits"] == q_min:
            circle: dict[str, Any] = {"markersize": 14, "mfc": "none", "mec": FOUND, "mew": 2}
            axes.plot(end - window / 2, accuracy, "o", label=f"q_min = {q_min}", **circle)
