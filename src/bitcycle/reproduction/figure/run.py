"""Pictures of papers that show curves of runs: range tests; bits and loss; bits chosen by gates."""

from typing import Any

from matplotlib import colormaps

from bitcycle.picture.layout import legend, panels
from bitcycle.picture.run import draw_levels
from bitcycle.reproduction.analysis.facts import fact
from bitcycle.reproduction.analysis.labels import backward_bits, forward_bits
from bitcycle.reproduction.figure.data import ItemData, panels_of
from bitcycle.reproduction.figure.plots import label_axes, styles
from bitcycle.reproduction.figure.style import ORDERED, Drawing


def range_tests(data: ItemData) -> Drawing | None:
    """Training accuracy as precision increases, and the lower bound found by each range test."""
    cells = [(panel, cell) for panel in panels_of(data) for cell in panel.cells if "range_test" in cell.runs[0].curve]
    if not cells:
        return None
    figure, axes = panels(len(cells), width=4.5, columns=2)
    for (panel, cell), part in zip(cells, axes):
        draw_levels(part, cell.runs[0].curve)
        title = f"{panel.name}: found {fact(cell, 'q_min found')} bits"
        label_axes(part, title, "optimizer step", pad=18.0)  # the bits stand below it
    axes[0].set_ylabel("training accuracy (%)")
    return Drawing(
        figure,
        "Numbers above: bits; thick: mean at the end of a precision; dashed: what it has to reach; the first seed is shown.",
    )


def bits_and_loss(data: ItemData, style: str) -> Drawing | None:
    """Precision and training loss of each setting, one column for each network and data."""
    every = [(panel, [cell for cell in panel.cells if cell.runs[0].curve]) for panel in panels_of(data)]
    shown = [(panel, cells) for panel, cells in every if cells]
    if not shown:
        return None
    width = 6.5 if len(shown) == 1 else 5.0
    figure, axes = panels(2 * len(shown), columns=len(shown), width=width, height=2.3)
    for (panel, cells), above, below in zip(shown, axes, axes[len(shown) :]):
        for cell in cells:
            training, shape = cell.runs[0].curve["training"], styles(data, style)(cell)
            bits = f"{shape.label} FW({forward_bits(cell)})/BW({backward_bits(cell)})"
            steps: dict[str, Any] = {"drawstyle": "steps-pre", "color": shape.colour}
            above.plot(training["step"], training["weight"], **steps, label=bits)
            above.plot(training["step"], training["gradient"], **steps, linestyle=":")
            below.plot(training["step"], training["loss"], color=shape.colour, linewidth=1)
        label_axes(above, panel.title, y="bits (dotted: gradients)")
        below.set(xlabel="optimizer step", ylabel="training loss")
    legend(figure, axes[: len(shown)], 2)
    return Drawing(figure, "The first seed of each.")


def bits_of_blocks(data: ItemData) -> Drawing | None:
    """The options chosen by the gates of each block, at the recorded evaluations."""
    cells = [(panel, cell.runs[0]) for panel in panels_of(data) for cell in panel.cells]
    found = next(((panel, run) for panel, run in cells if run.curve.get("allocation")), None)
    if found is None:
        return None
    panel, run = found
    allocation, total = run.curve["allocation"], int(run.row["total_steps"])
    moments = sorted((int(step), blocks) for step, blocks in allocation.items())[:3]
    options = sorted(next(iter(moments[0][1].values())), key=lambda pair: [int(bits) for bits in pair.split("/")])
    shades = colormaps[ORDERED]
    figure, axes = panels(len(moments), columns=3, width=3.2, height=2.6)
    for (step, blocks), part in zip(moments, axes):
        bottoms = [0.0] * len(blocks)
        for index, option in enumerate(options):
            shares = [block.get(option, 0.0) for block in blocks.values()]
            colour, label = shades(index / max(1, len(options) - 1)), "skip" if option == "0/0" else option
            part.bar(range(len(blocks)), shares, bottom=bottoms, color=colour, label=label, width=0.85)
            bottoms = [bottom + share for bottom, share in zip(bottoms, shares)]
        label_axes(part, f"step {step:,} of {total:,}")
        part.set_xticks(range(len(blocks)), list(blocks), rotation=60, fontsize=6.5)
    axes[0].set_ylabel("share of samples")
    legend(figure, axes, 8)
    words = "first seed; options are bits of activations / gradients, from few (dark) to many (light)."
    return Drawing(figure, f"{panel.title}, {words}")
