"""HLHLp: tables of four phases, loss surfaces in planes, sharpness, and robustness."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt

from bitcycle.analysis.aggregation import Cell, Results
from bitcycle.analysis.items import Published
from bitcycle.analysis.labels import LEVELS, dataset_of, levels_of, model_of, phase_bits, phase_method, same
from bitcycle.analysis.landscape import results_of
from bitcycle.analysis.statistics import over_seeds
from bitcycle.figure.data import ItemData
from bitcycle.figure.landscape import described_surface, draw_plane
from bitcycle.figure.plots import Point, draw_series, point, points_by_setting
from bitcycle.figure.style import Drawing, Look, legend, look_of, panels
from bitcycle.figure.table import Spec
from bitcycle.measurement.artifacts import Result

ABLATIONS = {"A": [32, 2, 8, 2], "B": [32, 32, 32, 2], "C": [32, 2, 2, 2], "D": [32, 2]}
"""Table 6: bits of the phases of its variants."""


def network_name(cell: Cell, phase: int | None) -> str:
    """The paper's name of a network: FLOAT, Hlp, HLp or HLHLp; the phase is that at whose end it stood, None the last."""
    method = phase_method(cell)
    if method == "float" or phase == 1:
        return "FLOAT"
    return "Hlp" if method == "fine-tuning" else "HLHLp" if phase is None else "HLp"


def planes(results: Results, split: str) -> list[tuple[Result, list[str]]]:
    """Every plane of the train or test split with the names of its networks; of several seeds the first."""
    cells = {run.training: cell for cell in results.done for run in cell.runs}
    found: dict[tuple[str, ...], Result] = {}
    for plane in (plane for cell in results.done for plane in results_of(cell.runs, "plane")):
        parts = [(cells.get((part["hash"], str(part["seed"]))), part["phase"]) for part in plane.header["runs"]]
        if plane.options["split"] == split and all(cell is not None for cell, _ in parts):
            found.setdefault(tuple(network_name(cell, phase) for cell, phase in parts if cell), plane)
    return [(plane, list(names)) for names, plane in sorted(found.items(), reverse=True)]


def plane_pictures(data: ItemData) -> Drawing | None:
    """Figure 1 (test error) and appendix H (training loss, else sharpness): planes through three networks."""
    test = data.item.name == "fig1"
    found = planes(data.results, "test" if test else "train")
    if not found:
        return None if test else measured(data, "sharpness", "epsilon", "sharpness_percent", "epsilon-sharpness (%)")
    figure = plt.figure(figsize=(5.2 * len(found), 5.0), layout="constrained")
    for index, (plane, names) in enumerate(found):
        axes = figure.add_subplot(1, len(found), index + 1, projection="3d")
        drawn = ("error_percent", "test error (%)") if test else ("loss", "training loss")
        draw_plane(figure, axes, plane, names, *drawn)
        axes.set_title(", ".join(names))
    return Drawing(figure, f"{described_surface(found[0][0])}; quantized weights as plain numbers.")


def measured(data: ItemData, kind: str, category: str, column: str, label: str) -> Drawing | None:
    """Appendices D, F and H: a measurement of each network by corruption, noise or size of the box.

    Args:
        data: of the item.
        kind: of the measurement.
        category: its column of categories.
        column: its column of numbers.
        label: of the axis.
    """
    series: dict[Look, list[Point]] = {}
    for cell, phase in itertools.product(data.results.done if data.complete_enough else (), (None, 1, 2)):
        groups: dict[str, list[float]] = {}
        for row in (row for result in results_of(cell.runs, kind, phase) for row in result.rows):
            groups.setdefault(row[category], []).append(float(row[column]))
        if groups:
            number = len(series)
            look = Look(network_name(cell, phase), f"C{number}", "os^Dv"[number % 5])
            series[look] = [point(name, over_seeds(values)) for name, values in groups.items()]
    if not series:
        return None
    figure, axes = panels(1, width=8, height=3.0)
    draw_series(axes[0], series)
    axes[0].set_ylabel(label)
    legend(figure, axes)
    return Drawing(figure, "Means over severities, ratios and seeds, with 95 % intervals.")


# Which cell a printed number is about


def same_cell(row: Published, cell: Cell) -> bool:
    """Network, data and method agree, and the levels of the weights where the row names them."""
    if row["method"] not in ("float", "fine-tuning", "HLHLp") or row["metric"] == "residual_degradation_ratio":
        return False
    named = next((levels for levels in LEVELS if levels in (row["group"] + row["setting"]).lower()), "")
    alike = same(row["model"], model_of(cell)) and same(row["dataset"], dataset_of(cell))
    levels = not named or "float" in row["method"] or named == levels_of(cell)
    return alike and row["method"] == phase_method(cell) and levels


def same_speech(row: Published, cell: Cell) -> bool:
    """Table 5: the recordings of WSJ; there is no proxy for Aurora-4."""
    return row["dataset"] == "WSJ test" and row["method"] == phase_method(cell)


def same_ablation(row: Published, cell: Cell) -> bool:
    """Table 6: a step of a variant that ends one of its phases."""
    return ablation_phase(row) is not None and phase_bits(cell) == ABLATIONS[row["group"][1]]


def ablation_phase(row: Published) -> int | None:
    """Table 6: the phase that ends with a step. In D the first phase is as long as three of the four steps.

    >>> [ablation_phase({"group": f"({variant}) step {step}"}) for variant in "AD" for step in (1, 3, 4)]
    [1, 3, 4, None, 1, 2]
    """
    found = re.match(r"\((\w)\) step (\d)", row["group"])
    phase = int(found[2]) - 4 + len(ABLATIONS[found[1]]) if found else 0
    return phase if phase > 0 else None


def phase_ends(cell: Cell) -> str:
    """The metric at the end of each phase, the mean over seeds."""
    values = [cell.at_end_of_phase(phase) for phase in range(1, len(phase_bits(cell)) + 1)]
    return ", ".join(f"{value.mean:.4g}" for value in values if value)


FIGURES: dict[str, Callable[[ItemData], Drawing | None]] = {
    "fig1": plane_pictures,
    "appD": partial(measured, kind="corruption", category="corruption", column="error_percent", label="error (%)"),
    "appE": partial(
        points_by_setting,
        place=lambda cell: str(cell.setting("quantizer")),
        look=lambda cell: look_of(phase_method(cell)),
        column="final",
        line=False,
    ),
    "appF": partial(measured, kind="noise", category="noise", column="cer_percent", label="character error rate (%)"),
    "appH": plane_pictures,
}
SPEC = Spec("final", same_cell, named=phase_method, base={"phases": "fine-tuning"})
SPECS = {
    "table5": replace(SPEC, match=same_speech),
    "table6": replace(SPEC, match=same_ablation, phase=ablation_phase, measures={"at the ends of phases": phase_ends}),
}
