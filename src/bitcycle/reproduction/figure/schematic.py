"""Pictures that need no runs: schedules, the quantized layer, the gated layer."""

from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from bitcycle.picture.layout import panels
from bitcycle.reproduction.analysis.cells import Cell
from bitcycle.reproduction.analysis.claim_functions import relative_cost
from bitcycle.reproduction.analysis.labels import savings_group, schedule_of
from bitcycle.reproduction.figure.data import ItemData
from bitcycle.reproduction.figure.style import FORMS, ORDERED, PROFILES, Drawing, Style
from bitcycle.schedule import SCHEDULES, SUITE, Cyclic, Schedule, schedule
from bitcycle.schedule.cyclic import GROWTH_PROFILES

STEPS = 1600
LONG = 64_000
DIAGRAMS = Path(__file__).parent / "page" / "diagrams.yaml"
FORWARD, BACKWARD = "#0072b2", "#d55e00"
BOXES = {"float": "0.92", "forward": "#cfe2f3", "backward": "#fbe2c8"}
BITS = "bits of weights and activations"


def draw_bits(axes: Axes, bound: Schedule, colour: str, smooth: bool = True) -> None:
    """Draw the forward bits over a run as a step line, and the curve before rounding behind it."""
    options, steps = bound.options, bound.length.total_steps
    if smooth and isinstance(options, Cyclic):
        places = range(0, steps, max(1, steps // 400))
        low, high = float(options.q_min), options.q_max
        curve = [low + (high - low) * options.level(step, bound.length) for step in places]
        axes.plot([step / steps for step in places], curve, color=colour, alpha=0.4, linewidth=1)
    edges = list(accumulate((count / steps for _, count in bound.run_lengths), initial=0.0))
    bits = [precision.weight for precision, _ in bound.run_lengths]
    axes.stairs(bits, edges, baseline=None, color=colour, linewidth=1.3)
    axes.set_yticks(range(3, 9))
    axes.margins(x=0.02, y=0.1)


def suite_style(cell: Cell) -> Style:
    """The style of a schedule as in Better Schedules, without a label: colour for the profile, marker for the form, outline
    for q_max = 8."""
    edge = "black" if cell.setting("schedule.q_max") == 8 else None
    name = schedule_of(cell)
    if name not in SUITE:
        return Style("", "0.35", "s", edge)
    values = SCHEDULES[name].values
    return Style("", PROFILES[values["profile"]], FORMS[values["form"]], edge)


def suite_legend(figure: Figure) -> None:
    """The legend of this encoding."""
    words = {"vertical": "triangular, mirrored values", "horizontal": "triangular, mirrored time"}
    styles = [Style(profile, colour, "s") for profile, colour in PROFILES.items()]
    styles += [Style(words.get(form, form), "0.6", mark) for form, mark in FORMS.items()]
    styles += [Style("static", "0.35", "s"), Style("q_max = 8", "0.8", "o", "black"), Style("q_max = 6", "0.8", "o")]
    columns = 5 if figure.get_figwidth() > 8 else 3
    handles = [
        Line2D([], [], ls="", marker=one.marker, color=one.colour, mec=one.edge or one.colour, label=one.label)
        for one in styles
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def suite_picture(data: ItemData) -> Drawing:
    """better, figure 2: the four profiles, CR with different numbers of cycles, and the ten schedules with n = 2."""
    figure, axes = panels(12, columns=4, width=2.5, height=1.75)
    z = [index / 200 for index in range(201)]
    for name, colour in PROFILES.items():
        profile = GROWTH_PROFILES[name]
        axes[0].plot(z, [profile(x) for x in z], color=colour, label=name)
    axes[0].set_title("growth profiles")
    for cycles in (1, 2, 4, 8):
        bound = schedule("CR", q_min=3, q_max=8, cycles=cycles, total_steps=STEPS)
        assert isinstance(bound.options, Cyclic)
        curve = [3 + 5 * bound.options.level(step, bound.length) for step in range(0, STEPS, 4)]
        shade, places = matplotlib.colormaps[ORDERED]((cycles - 1) / 8), [i / len(curve) for i in range(len(curve))]
        axes[1].plot(places, curve, color=shade, linewidth=1, label=f"n = {cycles}")
    axes[1].set_title("CR before rounding")
    for part in axes[:2]:
        beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
        part.legend(fontsize=6.5, frameon=False, handlelength=1.0, borderpad=0, **beside)
    looks = {"profile": list(PROFILES), "form": list(FORMS)}
    order = {name: [known.index(SCHEDULES[name].values[key]) for key, known in looks.items()] for name in SUITE}
    for part, name in zip(axes[2:], sorted(SUITE, key=order.__getitem__)):
        bound = schedule(name, q_min=3, q_max=8, cycles=2, total_steps=STEPS)
        draw_bits(part, bound, PROFILES[SCHEDULES[name].values["profile"]])
        part.set_title(f"{name}: cost {relative_cost(bound):.2f} ({savings_group(name)})", fontsize=8.5)
    figure.supxlabel("share of the run", fontsize=9)
    figure.supylabel(BITS, fontsize=9)
    return Drawing(figure, "3 to 8 bits, n = 2; thin: before rounding. Drawn from the code, no training.")


def cosine_picture(data: ItemData) -> Drawing:
    """cpt, figure 9: FW(3,8) with eight cycles, before and after rounding."""
    figure, (axes,) = panels(1, width=7, height=2.6)
    draw_bits(axes, schedule("CR", q_min=3, q_max=8, cycles=8, total_steps=LONG), PROFILES["cosine"])
    axes.set(xlabel="share of the run", ylabel=BITS)
    return Drawing(figure, "Rounded to whole bits; thin: before rounding. Drawn from the code, no training.")


def static_and_cyclic(data: ItemData) -> Drawing:
    """cpt, figure 3: static against cyclic precision."""
    figure, axes = panels(2, columns=2, width=3.6, height=2.3)
    several = {"static precision": ("static", {}), "cyclic precision (CPT)": ("CR", {"q_min": 3, "cycles": 4})}
    for part, (title, (name, options)) in zip(axes, several.items()):
        draw_bits(part, schedule(name, q_max=8, total_steps=STEPS, **options), FORWARD, smooth=False)
        part.axhline(8.12, color=BACKWARD, linestyle="--", linewidth=1)
        part.set(title=title, ylim=(2.5, 8.6))
    axes[0].text(0.04, 7.2, "weights and activations", color=FORWARD, fontsize=8)
    axes[0].text(0.04, 6.7, "gradients (dashed)", color=BACKWARD, fontsize=8)
    figure.supxlabel("share of the run", fontsize=9)
    figure.supylabel("bits", fontsize=9)
    return Drawing(figure, "3 to 8 bits, 4 of the 32 cycles. Drawn from the code, no training.")


def diagram(data: ItemData, name: str) -> Drawing:
    """A block diagram in page/diagrams.yaml: the quantized layer (better, figure 1) or the gated layer (fractrain, figure 2)."""
    found = yaml.safe_load(DIAGRAMS.read_text(encoding="utf-8"))[name]
    figure, axes = plt.subplots(figsize=(8.2, 4.0), layout="constrained")
    axes.set(xlim=(0, 10.4), ylim=(0.1, 4.2))
    axes.axis("off")
    for x, y, text, kind in found["boxes"]:
        width, height = (0.85, 0.45) if ("/" in text and "\n" not in text) or text == "skip" else (1.75, 0.8)
        place = (x - width / 2, y - height / 2)
        axes.add_patch(Rectangle(place, width, height, facecolor=BOXES[kind], edgecolor="0.3", zorder=2))
        axes.text(x, y, text, ha="center", va="center", fontsize=8, zorder=3)
    for way, colour in (("forward", FORWARD), ("backward", BACKWARD)):
        for x, y, *to in found[way]:
            style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.1}
            axes.annotate("", to, (x, y), arrowprops=style, zorder=1)
    for x, y, text, colour in found["words"]:
        axes.text(x, y, text, color=colour, fontsize=8.5, va="center")
    return Drawing(figure, found["caption"])
