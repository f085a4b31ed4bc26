"""FracTrain: accuracy against effective MACs, curves against accumulated cost, bits that the gates choose."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import matplotlib

from bitcycle.analysis.aggregation import Cell
from bitcycle.analysis.items import Published
from bitcycle.analysis.labels import anything, backward_bits, forward_bits, matches, method_of, schedule_of
from bitcycle.figure.data import ItemData, panels_of
from bitcycle.figure.plots import curves, points_by_setting, title, tradeoff
from bitcycle.figure.schematic import diagram
from bitcycle.figure.style import ORDERED, Drawing, Look, legend, look_of, panels
from bitcycle.figure.table import Spec


def variant_of(cell: Cell) -> str:
    """The method in the words of figure 7: Manual-PFQ four-stage, Auto-PFQ two-stage, ..."""
    method = method_of(cell)
    if method not in ("PFQ", "Manual-PFQ"):
        return method
    stages = len(cell.setting("schedule.stages") or [3, 4, 6, 8])
    number = {2: "two-stage", 4: "four-stage"}.get(stages, f"{stages} stages")
    return f"{'Auto' if method == 'PFQ' else 'Manual'}-PFQ {number}"


STATIC = {"method": "SBM", "fw": 8, "bw": 8}
"""The baseline of all pictures."""


def look(cell: Cell) -> Look:
    """The look of a method."""
    return look_of(method_of(cell))


def indicator_settings(data: ItemData) -> Drawing | None:
    """Figure 4: difference to static 8 bits by threshold epsilon, a series for each factor alpha."""
    alphas = sorted({float(cell.setting("schedule.alpha", 0.3)) for cell in data.results.done})
    shades = matplotlib.colormaps[ORDERED]

    def looked(cell: Cell) -> Look:
        alpha = float(cell.setting("schedule.alpha", 0.3))
        colour = matplotlib.colors.to_hex(shades(alphas.index(alpha) / max(1, len(alphas) - 1)))
        return Look(f"alpha = {alpha:g}", colour, "os^Dv"[alphas.index(alpha) % 5])

    def place(cell: Cell) -> float | None:
        return float(cell.setting("schedule.epsilon", 0.05)) if schedule_of(cell) == "pfq" else None

    return points_by_setting(data, place, looked, "best", "threshold epsilon", STATIC, True)


def stages_and_loss(data: ItemData) -> Drawing | None:
    """Figure 1: precision and training loss of PFQ and static precision."""
    shown = panels_of(data) if data.complete_enough else []
    cells = [cell for panel in shown for cell in panel.cells if cell.runs[0].curve]
    if not cells:
        return None
    figure, (above, below) = panels(2, columns=1, width=6.5, height=2.3)
    for cell in cells:
        training, shape = cell.runs[0].curve["training"], look(cell)
        bits = f"{shape.label} FW({forward_bits(cell)})/BW({backward_bits(cell)})"
        steps: dict[str, Any] = {"drawstyle": "steps-pre", "color": shape.colour}
        above.plot(training["step"], training["weight"], **steps, label=bits)
        above.plot(training["step"], training["gradient"], **steps, linestyle=":")
        below.plot(training["step"], training["loss"], color=shape.colour, linewidth=1)
    above.set_ylabel("bits (dotted: gradients)")
    below.set_ylabel("training loss")
    below.set_xlabel("optimizer step")
    title(above, shown[0].title)
    legend(figure, [above], 2)
    return Drawing(figure, "The first seed of each.")


def accumulated_cost(data: ItemData) -> Drawing | None:
    """Figure 6: test accuracy against the bit operations spent so far; the ends alone where runs are too short for curves."""
    return curves(data, look, "gbitops") or tradeoff(data, look, STATIC, "best")


def bits_of_blocks(data: ItemData) -> Drawing | None:
    """Figure 8: the options that the gates choose in each block, at the moments of the training that were kept."""
    cells = [(p, c) for p in panels_of(data) for c in p.cells if schedule_of(c) == "fractrain"]
    found = next(((panel, run) for panel, cell in cells for run in cell.runs[:1] if run.curve.get("allocation")), None)
    if found is None or not data.complete_enough:
        return None
    panel, run = found
    allocation, total = run.curve["allocation"], int(run.row["total_steps"])
    moments = sorted((int(step), blocks) for step, blocks in allocation.items())[:3]
    options = sorted(next(iter(moments[0][1].values())), key=lambda pair: [int(bits) for bits in pair.split("/")])
    shades = matplotlib.colormaps[ORDERED]
    figure, axes = panels(len(moments), columns=3, width=3.2, height=2.6)
    for (step, blocks), part in zip(moments, axes):
        bottoms = [0.0] * len(blocks)
        for index, option in enumerate(options):
            shares = [block.get(option, 0.0) for block in blocks.values()]
            colour, label = shades(index / max(1, len(options) - 1)), "skip" if option == "0/0" else option
            part.bar(range(len(blocks)), shares, bottom=bottoms, color=colour, label=label, width=0.85)
            bottoms = [bottom + share for bottom, share in zip(bottoms, shares)]
        title(part, f"step {step:,} of {total:,}")
        part.set_xticks(range(len(blocks)), list(blocks), rotation=60, fontsize=6.5)
    axes[0].set_ylabel("share of samples")
    legend(figure, axes, 8)
    return Drawing(
        figure,
        f"{panel.title}, first seed; options are bits of activations / gradients, from few (dark) to many (light).",
    )


# Which cell a printed number is about


def same_cell(row: Published, cell: Cell) -> bool:
    """As `matches`; bits of a gated network are not compared, and static ones where only the baseline says them."""
    method = row["method"].removesuffix(" improvement")
    if not row["model"] or method not in ("SBM", "PFQ", "DoReFa", "WAGEUBN", "DFQ", "FracTrain"):
        return False
    if method not in ("DFQ", "FracTrain"):
        return matches(row, cell)
    target = re.fullmatch(r"cp=([\d.]+)", row["schedule"])
    if target and abs(float(cell.setting("schedule.target", 3.0)) - float(target[1])) > 1e-9:
        return False
    return not row["setting"].startswith("point") and matches(row, cell, fw_bits=anything, bw_bits=anything)


def same_part(row: Published, cell: Cell) -> bool:
    """Table 5: adaptation to other classes, or fine-tuning on other samples."""
    part = {"adaptation": "second_classes", "fine-tuning": "second_samples"}[row["group"]]
    return cell.setting("dataset.part") == part and same_cell(row, cell)


against_cost = partial(tradeoff, look=look, base=STATIC, column="best", cost="effective_macs")
FIGURES: dict[str, Callable[[ItemData], Drawing | None]] = {
    "fig1": stages_and_loss,
    "fig2": partial(diagram, name="gate"),
    "fig3": partial(against_cost, published_base={"fw_bits": "8", "bw_bits": "8"}),
    "fig4": indicator_settings,
    "fig5": partial(against_cost, published_base={"method": "SBM"}),
    "fig6": accumulated_cost,
    "fig7": partial(tradeoff, look=lambda cell: look_of(variant_of(cell)), base=STATIC, column="best"),
    "fig8": bits_of_blocks,
}
SPEC = Spec("best", same_cell, named=variant_of, base=STATIC)
SPECS = {
    "fig1": replace(SPEC, match=lambda row, cell: row["method"] == "PFQ" and schedule_of(cell) == "pfq"),
    "table5": replace(SPEC, match=same_part, cost="gbitops_to_best"),
    "sec4.6-fpga": replace(SPEC, match=lambda row, cell: False),
}
"""Figure 1 names neither network nor data. The design of the FPGA of section 4.6 is not known: nothing of ours is comparable."""
