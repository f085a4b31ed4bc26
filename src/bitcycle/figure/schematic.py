"""Pictures that need no runs, drawn from the code itself: schedules, the quantized layer, the gated layer; and listings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from bitcycle.analysis.labels import GROUPS
from bitcycle.figure.schedules import relative_cost
from bitcycle.figure.style import FORMS, PROFILES, ItemData, panels, titled
from bitcycle.help import first_comment
from bitcycle.schedule import SUITE, Cyclic, Schedule, schedule
from bitcycle.schedule.profile import growth_profile

STEPS = 1600
FORWARD, BACKWARD, FLOATING = "tab:blue", "tab:orange", "0.9"


def draw_bits(axes: Axes, bound: Schedule, colour: str, smooth: bool = True) -> None:
    """Forward bits over the run as a step line, the curve before rounding behind it."""
    options, steps = bound.options, bound.length.total_steps
    if smooth and isinstance(options, Cyclic):
        places = range(0, steps, max(1, steps // 400))
        low, high = float(options.q_min), options.q_max
        curve = [low + (high - low) * options.level(step, bound.length) for step in places]
        axes.plot([step / steps for step in places], curve, color=colour, alpha=0.4, linewidth=1)
    edges = [0.0]
    for _, count in bound.run_lengths:
        edges.append(edges[-1] + count / steps)
    bits = [precision.weight for precision, _ in bound.run_lengths]
    axes.stairs(bits, edges, baseline=None, color=colour, linewidth=1.3)
    axes.margins(x=0.02, y=0.1)


def suite_picture(data: ItemData) -> Figure:
    """better, figure 2: the four profiles, schedule CR for several numbers of cycles, and the ten schedules with n = 2."""
    figure, axes = panels(12, columns=4, width=2.5, height=1.75)
    z = [index / 200 for index in range(201)]
    for name, colour in PROFILES.items():
        profile = growth_profile(name, 0.9, 4.0, False)
        axes[0].plot(z, [profile(x) for x in z], color=colour, label=name)
    axes[0].legend(fontsize=6.5, frameon=False)
    axes[0].set_title("growth profiles")
    for shade, cycles in zip((0.25, 0.5, 0.75, 1.0), (1, 2, 4, 8)):
        bound = schedule("CR", q_min=3, q_max=8, cycles=cycles, total_steps=STEPS)
        places = range(0, STEPS, 4)
        assert isinstance(bound.options, Cyclic)
        curve = [3 + 5 * bound.options.level(step, bound.length) for step in places]
        axes[1].plot(
            [step / STEPS for step in places],
            curve,
            color=PROFILES["cosine"],
            alpha=shade,
            linewidth=1,
            label=f"n = {cycles}",
        )
    axes[1].legend(fontsize=6.5, frameon=False, ncols=2, loc="upper center")
    axes[1].set_ylim(2.7, 12.5)
    axes[1].set_yticks(range(3, 9))
    axes[1].set_title("CR, unrounded")
    for part, name in zip(
        axes[2:],
        sorted(SUITE, key=lambda name: (list(PROFILES).index(SUITE[name][0]), list(FORMS).index(SUITE[name][1]))),
    ):
        bound = schedule(name, q_min=3, q_max=8, cycles=2, total_steps=STEPS)
        draw_bits(part, bound, PROFILES[SUITE[name][0]])
        group = next(group for group, members in GROUPS.items() if name in members)
        part.set_title(f"{name}: cost {relative_cost(bound):.2f} ({group})", fontsize=8.5)
        part.set_yticks(range(3, 9))
    figure.supxlabel("share of the run", fontsize=9)
    figure.supylabel("bits of weights and activations", fontsize=9)
    return titled(figure, data, "3 to 8 bits, n = 2; thin: before rounding. Drawn from the code, no training")


def cosine_picture(data: ItemData) -> Figure:
    """cpt, figure 9: FW(3,8) with eight cycles, unrounded and rounded."""
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    draw_bits(axes, schedule("CR", q_min=3, q_max=8, cycles=8, total_steps=64_000), PROFILES["cosine"])
    axes.set_yticks(range(3, 9))
    axes.set_xlabel("share of the run")
    axes.set_ylabel("bits of weights and activations")
    return titled(figure, data, "rounded to whole bits; thin: before rounding. Drawn from the code, no training")


def static_and_cyclic(data: ItemData) -> Figure:
    """cpt, figure 3: static against cyclic precision."""
    figure, axes = panels(2, columns=2, width=3.6, height=2.3)
    for part, bound, title in (
        (axes[0], schedule("static", q_max=8, total_steps=STEPS), "static precision"),
        (axes[1], schedule("CR", q_min=3, q_max=8, cycles=4, total_steps=STEPS), "cyclic precision (CPT)"),
    ):
        draw_bits(part, bound, FORWARD, smooth=False)
        part.axhline(8.12, color=BACKWARD, linestyle="--", linewidth=1)
        part.set_title(title)
        part.set_yticks(range(3, 9))
        part.set_ylim(2.5, 8.6)
    axes[0].text(0.04, 7.2, "weights and activations", color=FORWARD, fontsize=8)
    axes[0].text(0.04, 6.7, "gradients (dashed)", color=BACKWARD, fontsize=8)
    figure.supxlabel("share of the run", fontsize=9)
    figure.supylabel("bits", fontsize=9)
    return titled(figure, data, "3 to 8 bits, 4 of the 32 cycles. Drawn from the code, no training")


def _box(
    axes: Axes, x: float, y: float, text: str, colour: str = FLOATING, width: float = 1.5, height: float = 0.62
) -> None:
    patch = Rectangle(
        (x - width / 2, y - height / 2), width, height, facecolor=colour, edgecolor="0.3", alpha=0.85, zorder=2
    )
    axes.add_patch(patch)
    axes.text(x, y, text, ha="center", va="center", fontsize=8, zorder=3)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = "0.25") -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.1}, zorder=1)


def _canvas(width: float, height: float, size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_aspect("equal")
    axes.axis("off")
    return figure, axes


BLUE, ORANGE = "#cfe2f3", "#fbe2c8"


def layer_schematic(data: ItemData) -> Figure:
    """better, figure 1: where one layer quantizes, forward and backward."""
    figure, axes = _canvas(10.4, 4.4, (8.2, 4.2))
    for x, y, text, colour in (
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
    ):
        _box(axes, x, y, text, colour, width=1.75, height=0.8)
    for start, end in (
        ((1.9, 3.5), (2.3, 3.5)),
        ((4.1, 3.5), (4.7, 3.5)),
        ((6.5, 3.5), (7.5, 3.5)),
        ((4.1, 2.2), (4.7, 2.2)),
        ((5.6, 2.6), (5.6, 3.1)),
    ):
        _arrow(axes, start, end, FORWARD)
    for start, end in (
        ((7.5, 0.8), (6.5, 0.8)),
        ((4.7, 0.8), (4.1, 0.8)),
        ((2.3, 0.8), (1.9, 0.8)),
        ((3.2, 1.2), (3.2, 1.8)),
    ):
        _arrow(axes, start, end, BACKWARD)
    axes.text(9.35, 3.5, "forward", color=FORWARD, fontsize=8.5, va="center")
    axes.text(9.35, 0.8, "backward", color=BACKWARD, fontsize=8.5, va="center")
    axes.text(3.35, 1.5, "$\\partial L/\\partial W_l$", fontsize=8, va="center")
    return titled(
        figure,
        data,
        "weights and activations follow the schedule, gradients stay at q_max; as `bitcycle.layer` does it",
    )


def gated_layer(data: ItemData) -> Figure:
    """fractrain, figure 2: a gate that chooses the bits of a block for each sample."""
    figure, axes = _canvas(10.4, 4.2, (8.2, 4.0))
    options = ("skip", "2/6", "3/6", "4/6", "4/12", "6/8", "6/12")
    _box(axes, 1.0, 2.6, "input of\nthe block", width=1.5, height=0.8)
    _box(axes, 3.3, 3.6, "pool, two 1x1\nconvolutions", ORANGE, width=1.8, height=0.8)
    _box(axes, 5.8, 3.6, "LSTM, shared\nby all blocks", ORANGE, width=1.8, height=0.8)
    _box(axes, 8.3, 3.6, "softmax,\nlargest one", ORANGE, width=1.8, height=0.8)
    for index, option in enumerate(options):
        _box(axes, 3.0 + index * 1.0, 1.9, option, BLUE, width=0.85, height=0.5)
    _box(axes, 6.0, 0.6, "convolutions at the chosen bits\n(activations / gradients)", width=4.4, height=0.8)
    _arrow(axes, (1.0, 3.0), (2.4, 3.6), BACKWARD)
    _arrow(axes, (4.2, 3.6), (4.9, 3.6), BACKWARD)
    _arrow(axes, (6.7, 3.6), (7.4, 3.6), BACKWARD)
    _arrow(axes, (8.3, 3.2), (7.2, 2.2), BACKWARD)
    _arrow(axes, (6.0, 1.62), (6.0, 1.02), FORWARD)
    _arrow(axes, (1.0, 2.2), (3.75, 0.6), FORWARD)
    _arrow(axes, (8.2, 0.6), (9.3, 0.6), FORWARD)
    axes.text(9.4, 0.6, "output", fontsize=8, va="center")
    note = "one choice for each block and sample; published: the gates cost less than 0.1 % of a block"
    return titled(figure, data, note)


def listing(*files: str) -> list[tuple[str, str]]:
    """(file, documentation of the module) of the files that implement an algorithm."""
    root = Path(__file__).parent.parent
    return [(f"src/bitcycle/{file}", (root / file).read_text()) for file in files]


ALGORITHMS: dict[str, tuple[str, Sequence[str], str]] = {
    "partial/alg1": (
        "schedule=partial_pretrain quantizer=pact_binary training=partial",
        (
            "budget: T steps; learning rate schedule r(t, T) of a whole run; split s = 1/2",
            "1. train in full precision for s T steps, with rate r(t, s T)",
            "2. insert binary weights and activations, keeping the float weights (fresh optimizer: keep_optimizer=false)",
            "3. train for (1 - s) T steps with 1 bit, with rate r(t - s T, (1 - s) T)",
        ),
        "src/bitcycle/schedule/phased.py (PartialPretrain)",
    ),
    "fractrain/alg1": (
        "schedule=pfq",
        (
            "stages of forward bits (3,4,6,8) and gradient bits (6,6,8,8); threshold epsilon = 0.05; factor alpha = 0.3",
            "k = 0",
            "for each epoch:",
            "    train one epoch with the bits of stage k; l = its mean loss",
            "    d = differences of the last five losses to l, relative to the mean of the first ten",
            "    if k < 3 and max |d| < epsilon:  k = k + 1;  epsilon = alpha epsilon;  forget the last losses",
        ),
        "src/bitcycle/schedule/staged.py (Pfq), plateau.py (PlateauIndicator)",
    ),
    "fractrain/alg2": (
        "schedule=fractrain",
        (
            "target cp of the stages (1.5, 2, 2.5, 3) %; beta = 0.001; indicator as in PFQ",
            "k = 0",
            "for each step:",
            "    for each block and sample: its gate reads the input and chooses activation/gradient bits, or to skip",
            "    loss = cross entropy + beta c, where c is the cost, with + above the target cp of stage k and - below it",
            "    update weights and gates (straight through the choice)",
            "after each epoch: if the indicator finds the loss flat and k < 3: k = k + 1",
        ),
        "src/bitcycle/schedule/gated.py (FracTrain), src/bitcycle/layer/gate.py",
    ),
    "hlhlp/appB": (
        "schedule=hlhlp quantizer=uniform_l2 training=hlhlp",
        (
            "eta: rate of the recipe; alpha in [0.01, 0.1]; Delta_b: step sizes at b bits that minimize the squared error",
            "1. H  train in float, rate eta",
            "2. L  from the best by validation: 2 bits, rate alpha eta Delta_2 / Delta_8; keep the 3 to 5 best by validation",
            "3. H  from the one with the smallest Tr(sqrt v): 8 bits, rate alpha eta",
            "4. L  from the best by validation: 2 bits, rate alpha eta, falling",
        ),
        "src/bitcycle/schedule/phased.py (Hlhlp); the paper's own listing is not part of its text",
    ),
}
"""What an algorithm is in this code: the command, its steps, the file."""


def algorithm(data: ItemData) -> Figure:
    """An algorithm of the papers as this code has it."""
    command, steps, source = ALGORITHMS[data.item.id]
    figure, axes = plt.subplots(figsize=(8.6, 0.8 + 0.27 * (len(steps) + 3)), layout="constrained")
    axes.axis("off")
    lines = [*steps, "", f"run: python train.py {command}", f"code: {source}"]
    for number, line in enumerate(lines):
        axes.text(
            0.01,
            1 - (number + 0.5) / len(lines),
            line,
            fontsize=8,
            family="monospace" if line in steps else None,
            va="center",
            color="black" if line in steps else "0.35",
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    return titled(figure, data)


def data_sets(data: ItemData) -> Figure:
    """hlhlp, appendix C is not part of the text: the data sets that this repository reads instead, from conf/dataset."""
    files = sorted((data.conf / "dataset").glob("*.yaml"))
    figure, axes = plt.subplots(figsize=(9.6, 0.9 + 0.22 * len(files)), layout="constrained")
    axes.axis("off")
    for number, file in enumerate(files):
        y = 1 - (number + 0.5) / len(files)
        axes.text(0.0, y, f"dataset={file.stem}", fontsize=7.5, family="monospace", va="center")
        axes.text(0.2, y, first_comment(file), fontsize=7.5, va="center", color="0.25")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    return titled(
        figure, data, "the appendix is not part of the paper's text; these are the data sets of this repository"
    )
