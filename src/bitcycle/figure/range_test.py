"""The picture of a precision range test (CPT, figure 4): training accuracy over the steps, precision by precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from bitcycle.figure.style import legend, panels, save
from bitcycle.training.run_folder import RunFolder, read_json, read_records

CURVE, FOUND = "#0072b2", "#d55e00"


def draw_range_test(folder: RunFolder) -> Path:
    """Draw the finished range test of a run folder; returns the PNG file, beside which an SVG file lies."""
    summary: dict[str, Any] = read_json(folder.summary)
    test, q_min = summary["found"]["range_test"], summary["found"]["q_min"]
    records = [record for record in read_records(folder.metrics) if record["kind"] == "observation"]
    steps, values = [record["step"] for record in records], [record["accuracy"] for record in records]
    figure, (axes,) = panels(1, width=8, height=3.3)
    draw_levels(axes, test, q_min)
    axes.plot(steps, values, color=CURVE, linewidth=1, alpha=0.5, label=f"mean of {steps[0]} steps")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training accuracy (%)")
    axes.set_xlim(0, len(test["levels"]) * test["level_steps"])
    axes.set_ylim(bottom=0)
    legend(figure, [axes])
    name = f"precision range test of {summary['model']} on {summary['dataset']}, quantizer {summary['quantizer']}"
    figure.suptitle(f"{name}: q_min = {q_min} ({summary['scale']} scale, seed {summary['seed']})", fontsize=9.5)
    return save(figure, folder.picture.with_suffix(""))[0]


def draw_levels(axes: Axes, test: dict[str, Any], q_min: int | None = None) -> None:
    """A band for each precision, its mean accuracy at the end, what it had to rise above, and a circle at the bound found."""
    steps, window = test["level_steps"], test["window"]
    labels = iter((f"mean of the last {window} steps", f"needed: best before + {100 * test['threshold']:g} points"))
    for index, level in enumerate(test["levels"]):
        start, end, accuracy = index * steps, (index + 1) * steps, 100 * level["accuracy"]
        needed = accuracy - 100 * (level["rise"] - test["threshold"])
        if index % 2 == 0:
            axes.axvspan(start, end, color="black", alpha=0.04, linewidth=0)
        words: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "center", "fontsize": 9}
        axes.text((start + end) / 2, 1.02, f"{level['bits']} bits", **words)
        axes.hlines(accuracy, end - window, end, color=CURVE, linewidth=3, label=next(labels, ""))
        axes.hlines(needed, start, end, color="0.5", linestyle="--", linewidth=1, label=next(labels, ""))
        if level["bits"] == q_min:
            circle: dict[str, Any] = {
                "markersize": 14,
                "mfc": "none",
                "mec": FOUND,
                "mew": 2,
                "label": f"q_min = {q_min}",
            }
            axes.plot(end - window / 2, accuracy, "o", **circle)
