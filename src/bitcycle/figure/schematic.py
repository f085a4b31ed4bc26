"""Pictures that need no runs, drawn from the code itself: schedules, the quantized layer, the gated layer."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from bitcycle.figure.data import ItemData
from bitcycle.figure.schedules import draw_bits, group_of, relative_cost
from bitcycle.figure.style import FORMS, ORDERED, PROFILES, Drawing, panels
from bitcycle.schedule import SUITE, Cyclic, schedule
from bitcycle.schedule.profile import growth_profile

STEPS = 1600
FORWARD, BACKWARD, FLOATING = "#0072b2", "#d55e00", "0.92"
BLUE, ORANGE = "#cfe2f3", "#fbe2c8"
BITS = "bits of weights and activations"


def suite_picture(data: ItemData) -> Drawing:
    """better, figure 2: the four profiles, schedule CR for several numbers of cycles, and the ten schedules with n = 2."""
    figure, axes = panels(12, columns=4, width=2.5, height=1.75)
    z = [index / 200 for index in range(201)]
    for name, colour in PROFILES.items():
        profile = growth_profile(name, 0.9, 4.0, False)
        axes[0].plot(z, [profile(x) for x in z], color=colour, label=name)
    axes[0].set_title("growth profiles")
    for cycles in (1, 2, 4, 8):
        bound = schedule("CR", q_min=3, q_max=8, cycles=cycles, total_steps=STEPS)
        assert isinstance(bound.options, Cyclic)
        curve = [3 + 5 * bound.options.level(step, bound.length) for step in range(0, STEPS, 4)]
        shade = matplotlib.colormaps[ORDERED]((cycles - 1) / 8)
        axes[1].plot(
            [index / len(curve) for index in range(len(curve))], curve, color=shade, linewidth=1, label=f"n = {cycles}"
        )
    axes[1].set_title("CR before rounding")
    for part in axes[:2]:
        part.legend(
            fontsize=6.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.0, borderpad=0
        )
    order = list(PROFILES), list(FORMS)
    for part, name in zip(axes[2:], sorted(SUITE, key=lambda name: [o.index(w) for o, w in zip(order, SUITE[name])])):
        bound = schedule(name, q_min=3, q_max=8, cycles=2, total_steps=STEPS)
        draw_bits(part, bound, PROFILES[SUITE[name][0]])
        part.set_title(f"{name}: cost {relative_cost(bound):.2f} ({group_of(name)})", fontsize=8.5)
    figure.supxlabel("share of the run", fontsize=9)
    figure.supylabel(BITS, fontsize=9)
    return Drawing(figure, "3 to 8 bits, n = 2; thin: before rounding. Drawn from the code, no training.")


def cosine_picture(data: ItemData) -> Drawing:
    """cpt, figure 9: FW(3,8) with eight cycles, unrounded and rounded."""
    figure, (axes,) = panels(1, width=7, height=2.6)
    draw_bits(axes, schedule("CR", q_min=3, q_max=8, cycles=8, total_steps=64_000), PROFILES["cosine"])
    axes.set_xlabel("share of the run")
    axes.set_ylabel(BITS)
    return Drawing(figure, "Rounded to whole bits; thin: before rounding. Drawn from the code, no training.")


def static_and_cyclic(data: ItemData) -> Drawing:
    """cpt, figure 3: static against cyclic precision."""
    figure, axes = panels(2, columns=2, width=3.6, height=2.3)
    for part, name, options, title in (
        (axes[0], "static", {}, "static precision"),
        (axes[1], "CR", {"q_min": 3, "cycles": 4}, "cyclic precision (CPT)"),
    ):
        draw_bits(part, schedule(name, q_max=8, total_steps=STEPS, **options), FORWARD, smooth=False)
        part.axhline(8.12, color=BACKWARD, linestyle="--", linewidth=1)
        part.set_title(title)
        part.set_ylim(2.5, 8.6)
    axes[0].text(0.04, 7.2, "weights and activations", color=FORWARD, fontsize=8)
    axes[0].text(0.04, 6.7, "gradients (dashed)", color=BACKWARD, fontsize=8)
    figure.supxlabel("share of the run", fontsize=9)
    figure.supylabel("bits", fontsize=9)
    return Drawing(figure, "3 to 8 bits, 4 of the 32 cycles. Drawn from the code, no training.")


Box = tuple[float, float, str, str]
Arrow = tuple[float, float, float, float]


def diagram(
    boxes: Sequence[Box], forward: Sequence[Arrow], backward: Sequence[Arrow], words: Sequence[Box], caption: str
) -> Drawing:
    """Boxes (x, y, text, colour) with arrows between them, and words without a box."""
    figure, axes = plt.subplots(figsize=(8.2, 4.0), layout="constrained")
    axes.set_xlim(0, 10.4)
    axes.set_ylim(0.1, 4.2)
    axes.axis("off")
    for x, y, text, colour in boxes:
        width, height = (0.85, 0.45) if ("/" in text and "\n" not in text) or text == "skip" else (1.75, 0.8)
        place = (x - width / 2, y - height / 2)
        axes.add_patch(Rectangle(place, width, height, facecolor=colour, edgecolor="0.3", zorder=2))
        axes.text(x, y, text, ha="center", va="center", fontsize=8, zorder=3)
    for arrows, colour in ((forward, FORWARD), (backward, BACKWARD)):
        for x, y, to_x, to_y in arrows:
            look = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.1}
            axes.annotate("", (to_x, to_y), (x, y), arrowprops=look, zorder=1)
    for x, y, text, colour in words:
        axes.text(x, y, text, color=colour, fontsize=8.5, va="center")
    return Drawing(figure, caption)


def layer_schematic(data: ItemData) -> Drawing:
    """better, figure 1: where one layer quantizes, forward and backward."""
    boxes = (
        (1.0, 3.5, "activations\n$A_{l-1}$", FLOATING),
        (3.2, 3.5, "quantize\n$q_t$ bits", BLUE),
        (5.6, 3.5, "layer $l$\nproduct", FLOATING),
        (8.4, 3.5, "activations\n$A_l$", FLOATING),
        (5.6, 2.2, "quantize\n$q_t$ bits", BLUE),
        (3.2, 2.2, "weights\n$W_l$ (float)", FLOATING),
        (8.4, 0.8, "gradient\n$\\partial L/\\partial A_l$", FLOATING),
        (5.6, 0.8, "quantize\n$q_{max}$ bits", ORANGE),
        (1.0, 0.8, "gradient\n$\\partial L/\\partial A_{l-1}$", FLOATING),
        (3.2, 0.8, "products with\n$W$, $A$ quantized", FLOATING),
    )
    forward = (
        (1.9, 3.5, 2.3, 3.5),
        (4.1, 3.5, 4.7, 3.5),
        (6.5, 3.5, 7.5, 3.5),
        (4.1, 2.2, 4.7, 2.2),
        (5.6, 2.6, 5.6, 3.1),
    )
    backward = ((7.5, 0.8, 6.5, 0.8), (4.7, 0.8, 4.1, 0.8), (2.3, 0.8, 1.9, 0.8), (3.2, 1.2, 3.2, 1.8))
    words = (
        (9.35, 3.5, "forward", FORWARD),
        (9.35, 0.8, "backward", BACKWARD),
        (3.35, 1.5, "$\\partial L/\\partial W_l$", "black"),
    )
    caption = "Weights and activations follow the schedule, gradients stay at q_max; as `bitcycle.layer` does it."
    return diagram(boxes, forward, backward, words, caption)


def gated_layer(data: ItemData) -> Drawing:
    """fractrain, figure 2: a gate that chooses the bits of a block for each sample."""
    options = ("skip", "2/6", "3/6", "4/6", "4/12", "6/8", "6/12")
    boxes = (
        (1.0, 2.6, "input of\nthe block", FLOATING),
        (3.3, 3.6, "pool, two 1x1\nconvolutions", ORANGE),
        (5.8, 3.6, "LSTM, shared\nby all blocks", ORANGE),
        (8.3, 3.6, "softmax,\nlargest one", ORANGE),
        *((3.0 + index, 1.9, option, BLUE) for index, option in enumerate(options)),
        (6.0, 0.6, "convolutions at\nthe chosen bits", FLOATING),
    )
    gate = ((1.0, 3.0, 2.4, 3.6), (4.2, 3.6, 4.9, 3.6), (6.7, 3.6, 7.4, 3.6), (8.3, 3.2, 7.2, 2.2))
    data_way = ((6.0, 1.65, 6.0, 1.05), (1.0, 2.2, 5.1, 0.6), (6.9, 0.6, 9.3, 0.6))
    words = ((9.4, 0.6, "output", "black"), (6.1, 1.35, "activation / gradient bits", "0.3"))
    caption = "One choice for each block and sample; published: the gates cost less than 0.1 % of a block."
    return diagram(boxes, data_way, gate, words, caption)
