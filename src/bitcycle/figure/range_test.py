"""The picture of a precision range test (CPT, figure 4): training accuracy over the steps, precision by precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from omegaconf import OmegaConf

from bitcycle.training.run_folder import RunFolder, read_json, read_records

CURVE, LEVEL, FOUND, BEFORE = "tab:blue", "tab:blue", "tab:red", "tab:gray"


def draw_range_test(folder: RunFolder) -> Path:
    """Draw the finished range test of a run folder.

    Returns:
        the path of the PNG file in the run folder; an SVG file of the same name lies beside it.
    """
    summary: dict[str, Any] = read_json(folder.summary)
    found = summary["found"]
    records = [record for record in read_records(folder.metrics) if record["kind"] == "observation"]
    figure, axes = plt.subplots(figsize=(8, 4), constrained_layout=True)
    draw_levels(axes, found)
    steps, values = [record["step"] for record in records], [record["accuracy"] for record in records]
    axes.plot(steps, values, color=CURVE, linewidth=1, alpha=0.5, label=f"mean of {steps[0]} steps")
    draw_found(axes, found)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training accuracy (%)")
    axes.set_xlim(0, len(found["range_test"]["levels"]) * found["range_test"]["level_steps"])
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(_title(folder, summary), fontsize=10)
    figure.savefig(folder.picture, dpi=150)
    figure.savefig(folder.picture.with_suffix(".svg"))
    plt.close(figure)
    return folder.picture


def draw_levels(axes: Axes, found: dict[str, Any]) -> None:
    """A band for each precision, its mean accuracy at the end, and what it had to rise above."""
    test = found["range_test"]
    steps, window = test["level_steps"], test["window"]
    for index, level in enumerate(test["levels"]):
        start, end = index * steps, (index + 1) * steps
        if index % 2 == 0:
            axes.axvspan(start, end, color="black", alpha=0.04, linewidth=0)
        top = axes.get_xaxis_transform()
        axes.text((start + end) / 2, 1.02, f"{level['bits']} bits", transform=top, ha="center", fontsize=9)
        needed = level["accuracy"] - level["rise"] + test["threshold"]
        first = index == 0
        label = f"mean of the last {window} steps" if first else ""
        axes.hlines(100 * level["accuracy"], end - window, end, color=LEVEL, linewidth=3, label=label)
        label = f"needed: best before + {100 * test['threshold']:g} points" if first else ""
        axes.hlines(100 * needed, start, end, color=BEFORE, linestyle="--", linewidth=1, label=label)


def draw_found(axes: Axes, found: dict[str, Any]) -> None:
    """A circle where accuracy rose by more than the threshold."""
    test = found["range_test"]
    for index, level in enumerate(test["levels"]):
        if level["bits"] == found["q_min"]:
            middle = (index + 1) * test["level_steps"] - test["window"] / 2
            label = f"q_min = {found['q_min']}"
            axes.plot(middle, 100 * level["accuracy"], "o", markersize=14, mfc="none", mec=FOUND, mew=2, label=label)


def _title(folder: RunFolder, summary: dict[str, Any]) -> str:
    threshold = summary["found"]["range_test"]["threshold"]
    batch_size = OmegaConf.load(folder.config).training.batch_size
    name = f"precision range test of {summary['model']} on {summary['dataset']}, quantizer {summary['quantizer']}"
    rest = f"scale {summary['scale']}, n = 1, seed {summary['seed']}, batches of {batch_size}, threshold {threshold:g}"
    return f"{name}: q_min = {summary['found']['q_min']}\n{rest}"
