"""The pictures of FracTrain: accuracy against effective MACs, curves against accumulated cost, bits that the gates choose."""

from __future__ import annotations

import re
from collections.abc import Callable

from matplotlib.figure import Figure

from bitcycle.analysis.compare import Comparison
from bitcycle.analysis.items import Published
from bitcycle.analysis.labels import (
    backward_bits,
    dataset_of,
    forward_bits,
    matches,
    method_of,
    model_of,
    panel_of,
    schedule_of,
)
from bitcycle.analysis.results import Cell, Results
from bitcycle.figure.better import draw_curves
from bitcycle.figure.cpt import MARKS, digitized_points, relative_to
from bitcycle.figure.schematic import algorithm, gated_layer
from bitcycle.figure.style import (
    COLOURS,
    SETTINGS,
    ItemData,
    Point,
    legend,
    panel_title,
    panels,
    published_bars,
    scatter,
    titled,
)

X_AXIS = "effective MACs relative to"
EPSILON_MARKS = ("o", "s", "^", "D", "v", "P")
ALPHA_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")


def variant_of(cell: Cell) -> str:
    """The method in the words of figure 7: Manual-PFQ four-stage, Auto-PFQ two-stage, ..."""
    method = method_of(cell)
    if method not in ("PFQ", "Manual-PFQ"):
        return method
    stages = len(cell.setting("schedule.stages") or [3, 4, 6, 8])
    number = {2: "two-stage", 4: "four-stage"}.get(stages, f"{stages} stages")
    return f"{'Auto' if method == 'PFQ' else 'Manual'}-PFQ {number}"


def _is_static(cell: Cell, forward: str, backward: str) -> bool:
    return method_of(cell) == "SBM" and (forward_bits(cell), backward_bits(cell)) == (forward, backward)


def pfq_against_cost(data: ItemData) -> Figure:
    """Figures 3 and 7: accuracy against effective MACs of PFQ and static precision."""
    named = variant_of if data.item.name == "fig7" else method_of
    points = _points(data.results, named, lambda cell: _is_static(cell, "8", "8"))
    points += digitized_points(
        data.digitized, "effective_macs", lambda row: (row["fw_bits"], row["bw_bits"]) == ("8", "8")
    )
    if not points:
        return published_bars(data)
    figure, axes = scatter(data.results, points, f"{X_AXIS} SBM FW8/BW8", "best test accuracy (%)", _panels(points))
    legend(figure, axes.values())
    note = "hollow: published, read from the picture, costs up to an unnamed stopping point; filled: ours, full runs"
    return titled(
        figure,
        data,
        note
        if data.digitized
        else "ours: cost of full runs; the published picture is lost, its ranges are in the table",
    )


def dfq_against_cost(data: ItemData) -> Figure:
    """Figure 5: accuracy against effective MACs of DFQ and static precision."""
    statics = [cell for cell in data.results.done if method_of(cell) == "SBM"]
    dearest: dict[str, float] = {}
    for cell in statics:
        if cost := cell.value("gbitops"):
            dearest[panel_of(cell)] = max(cost.mean, dearest.get(panel_of(cell), 0))

    def reference(cell: Cell) -> bool:
        cost = cell.value("gbitops")
        return method_of(cell) == "SBM" and cost is not None and cost.mean == dearest[panel_of(cell)]

    points = _points(data.results, method_of, reference)
    points += digitized_points(data.digitized, "effective_macs", lambda row: row["method"] == "SBM")
    if not points:
        return published_bars(data)
    figure, axes = scatter(
        data.results, points, f"{X_AXIS} the dearest SBM point", "best test accuracy (%)", _panels(points)
    )
    legend(figure, axes.values())
    return titled(figure, data, "hollow: published, read from the picture; filled: ours, full runs")


def _panels(points: list[Point]) -> list[str]:
    return list(dict.fromkeys(point.panel for point in points if point.published))


def _points(results: Results, named: Callable[[Cell], str], reference: Callable[[Cell], bool]) -> list[Point]:
    found = []
    for cell in results.done:
        value, cost = cell.value("best"), relative_to(cell, results, reference)
        if value is not None and cost is not None:
            name = named(cell)
            colour, mark = COLOURS.get(name, "0.5"), MARKS.get(name.split("-")[0], "o")
            found.append(Point(panel_of(cell), name, cost, value.mean, colour, mark, value.std))
    return found


def indicator_settings(data: ItemData) -> Figure:
    """Figure 4: shapes are thresholds epsilon, colours are factors alpha."""
    if not data.results.done:
        return published_bars(data)
    cells = [cell for cell in data.results.done if schedule_of(cell) == "pfq"]
    epsilons = sorted({float(cell.setting("schedule.epsilon", 0.05)) for cell in cells})
    alphas = sorted({float(cell.setting("schedule.alpha", 0.3)) for cell in cells})
    points = []
    for cell in data.results.done:
        value, cost = cell.value("best"), relative_to(cell, data.results, lambda other: _is_static(other, "8", "8"))
        if value is None or cost is None:
            continue
        if schedule_of(cell) == "pfq":
            epsilon, alpha = float(cell.setting("schedule.epsilon", 0.05)), float(cell.setting("schedule.alpha", 0.3))
            look = ALPHA_COLOURS[alphas.index(alpha) % 4], EPSILON_MARKS[epsilons.index(epsilon) % 6]
            label = f"epsilon {epsilon:g}, alpha {alpha:g}"
        else:
            look, label = (COLOURS["SBM"], "*"), f"SBM FW{forward_bits(cell)}/BW{backward_bits(cell)}"
        points.append(Point(panel_of(cell), label, cost, value.mean, *look, value.std))
    figure, axes = scatter(data.results, points, f"{X_AXIS} SBM FW8/BW8", "best test accuracy (%)")
    legend(figure, axes.values())
    return titled(
        figure,
        data,
        "the grid is ours; that of the paper stood in the picture. The paper's choice: epsilon 0.05, alpha 0.3",
    )


def stages_and_loss(data: ItemData) -> Figure:
    """Figure 1: precision and training loss of PFQ and static precision."""
    cells = [cell for cell in data.results.done if cell.runs[0].curve]
    if not cells:
        return published_bars(data)
    figure, (above, below) = panels(2, columns=1, width=6.5, height=2.3)
    for cell in cells:
        method, training = method_of(cell), cell.runs[0].curve["training"]
        colour = COLOURS.get(method, "0.5")
        above.plot(
            training["step"],
            training["weight"],
            drawstyle="steps-pre",
            color=colour,
            label=f"{method} FW({forward_bits(cell)})/BW({backward_bits(cell)})",
        )
        above.plot(training["step"], training["gradient"], drawstyle="steps-pre", color=colour, linestyle=":")
        below.plot(training["step"], training["loss"], color=colour, linewidth=1)
    above.set_ylabel("bits (dotted: gradients)")
    below.set_ylabel("training loss")
    below.set_xlabel("optimizer step")
    legend(figure, [above])
    words = ", ".join(
        f"{row['metric'].replace('_', ' ')} {row['printed']}" for row in data.published if row["metric"] not in SETTINGS
    )
    return titled(figure, data, f"first seed; published: {words}")


def accumulated_cost(data: ItemData) -> Figure:
    """Figure 6: test accuracy during training against the bit operations spent so far."""
    cells = [cell for cell in data.results.done if dataset_of(cell) == "CIFAR-10" and cell.runs[0].curve]
    if not cells:
        return published_bars(data)
    names = list(dict.fromkeys(panel_of(cell) for cell in cells))
    figure, axes = panels(len(names), width=4.4, columns=2)
    for name, part in zip(names, axes, strict=True):
        for cell in cells:
            if panel_of(cell) == name:
                draw_curves(part, cell, method_of(cell), COLOURS.get(method_of(cell), "0.5"), "gbitops")
        part.set_title(panel_title(name, data.results))
        part.set_xlabel("accumulated GBitOps")
        part.legend(fontsize=7, frameon=False, loc="lower right")
    axes[0].set_ylabel("test accuracy (%)")
    return titled(figure, data, "band: one standard deviation")


def bits_of_blocks(data: ItemData) -> Figure:
    """Figure 8: the options that the gates choose in each block, at three moments of the training."""
    cell = next(
        (c for c in data.results.done if schedule_of(c) == "fractrain" and c.runs[0].curve.get("allocation")), None
    )
    if cell is None:
        return published_bars(data)
    allocation, total = cell.runs[0].curve["allocation"], int(cell.runs[0].row["total_steps"])
    moments = list(allocation.items())[:3]
    figure, axes = panels(len(moments), columns=1, width=7.5, height=1.9)
    options = list(next(iter(moments[0][1].values())))
    shades = [f"C{index}" for index in range(len(options))]
    for (step, blocks), part in zip(moments, axes, strict=True):
        bottoms = [0.0] * len(blocks)
        for option, shade in zip(options, shades, strict=True):
            shares = [block.get(option, 0.0) for block in blocks.values()]
            label = "skip" if option == "0/0" else option
            part.bar(range(len(blocks)), shares, bottom=bottoms, color=shade, label=label, width=0.85)
            bottoms = [bottom + share for bottom, share in zip(bottoms, shares)]
        part.set_title(f"step {step} of {total} (epoch {160 * int(step) / total:.0f} of 160)", fontsize=8.5)
        part.set_ylabel("share of samples", fontsize=8)
        part.set_xticks(range(len(blocks)), list(blocks), rotation=60, fontsize=6.5)
    legend(figure, axes, 7)
    return titled(figure, data, f"{panel_of(cell)}; options are bits of activations / gradients; first seed")


# Which cell a printed number is about


def same_cell(row: Published, cell: Cell) -> bool:
    """As `matches`; bits of a gated network are not compared, and static ones where only the baseline says them."""
    method = row["method"].removesuffix(" improvement")
    if method in ("DFQ", "FracTrain"):
        if row["setting"].startswith("point"):
            return False
        found = re.fullmatch(r"cp=([\d.]+)", row["schedule"])
        if found and abs(float(cell.setting("schedule.target", 3.0)) - float(found[1])) > 1e-9:
            return False
        return method == method_of(cell) and bool(row["model"]) and matches({**row, "fw_bits": "", "bw_bits": ""}, cell)
    if method not in ("SBM", "PFQ", "DoReFa", "WAGEUBN") or not row["model"]:
        return False
    return matches(row, cell)


def same_part(row: Published, cell: Cell) -> bool:
    """Table 5: adaptation to other classes, or fine-tuning on other samples."""
    part = {"adaptation": "second_classes", "fine-tuning": "second_samples"}[row["group"]]
    return cell.setting("dataset.part") == part and same_cell(row, cell)


def same_deep(row: Published, cell: Cell) -> bool:
    """Table 6: the savings are of FracTrain."""
    return same_cell(row, cell)


def same_on_fpga(row: Published, cell: Cell) -> bool:
    """Section 4.6: the design of the FPGA is not known, so that nothing of ours is comparable."""
    return False


def _described(cell: Cell) -> dict[str, str]:
    words = {"method": variant_of(cell)}
    if schedule_of(cell) in ("dfq", "fractrain"):
        words["schedule"] = f"cp {cell.setting('schedule.target')}"
    if part := cell.setting("dataset.part"):
        words["setting"] = str(part).replace("_", " ")
    if schedule_of(cell) == "pfq" and cell.setting("schedule.epsilon") is not None:
        words["setting"] = f"epsilon {cell.setting('schedule.epsilon')}, alpha {cell.setting('schedule.alpha')}"
    return words


def _first(row: Published, cell: Cell) -> bool:
    """Figure 1 names neither network nor data."""
    return bool(row["method"] == "PFQ" and schedule_of(cell) == "pfq" and model_of(cell))


FIGURES: dict[str, Callable[[ItemData], Figure]] = {
    "alg1": algorithm,
    "alg2": algorithm,
    "fig1": stages_and_loss,
    "fig2": gated_layer,
    "fig3": pfq_against_cost,
    "fig4": indicator_settings,
    "fig5": dfq_against_cost,
    "fig6": accumulated_cost,
    "fig7": pfq_against_cost,
    "fig8": bits_of_blocks,
}
COMPARISON = Comparison("best", same_cell, describe=_described)
COMPARISONS = {
    "fig1": Comparison("best", _first, describe=_described),
    "table5": Comparison("best", same_part, cost="gbitops_to_best", describe=_described),
    "table6": Comparison("best", same_deep, describe=_described),
    "sec4.6-fpga": Comparison("best", same_on_fpga, describe=_described),
}
