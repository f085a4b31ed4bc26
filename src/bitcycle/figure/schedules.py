"""The ten schedules of Better Schedules as small pictures, in the colours of their profiles (drawn from the code itself)."""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.axes import Axes

from bitcycle.figure.style import PROFILES, UNDATED, panels, save
from bitcycle.schedule import Cyclic, Schedule, schedule

STEPS = 64_000
GROUPS = {"Large": ("RR", "RTH"), "Medium": ("LR", "LT", "CR", "CT", "RTV", "ETV"), "Small": ("ER", "ETH")}
"""Savings groups of Better Schedules, section 3.2."""
LAYOUT = ("RR", "LR", "CR", "ER", "RTV", "RTH", "LT", "CT", "ETH", "ETV")
__all__ = ["UNDATED", "draw_bits", "draw_suite", "group_of", "relative_cost"]


def relative_cost(bound: Schedule) -> float:
    """Bit operations of a schedule relative to static q_max, of a network that is quantized throughout.

    mean of (w a + w g + a g) over the steps, divided by its value at static q_max.
    """
    products = [
        (p.weight * p.activation + p.weight * p.gradient + p.activation * p.gradient, n) for p, n in bound.run_lengths
    ]
    w, a, g = bound.reference
    return sum(product * n for product, n in products) / (bound.length.total_steps * (w * a + w * g + a * g))


def group_of(name: str) -> str:
    """The savings group of a schedule of the suite."""
    return next(group for group, members in GROUPS.items() if name in members)


def draw_bits(axes: Axes, bound: Schedule, colour: str, smooth: bool = True) -> None:
    """Forward bits over the share of the run as a step line, the curve before rounding behind it."""
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
    axes.set_yticks(range(3, 9))
    axes.margins(x=0.02, y=0.1)


def draw_suite(path: Path, cycles: int = 8) -> Path:
    """Draw all ten schedules between 3 and 8 bits with their savings; writes `path` and an SVG file beside it."""
    figure, axes = panels(len(LAYOUT), columns=5, width=2.2, height=1.7)
    for part, name in zip(axes, LAYOUT):
        bound = schedule(name, q_min=3, q_max=8, cycles=cycles, total_steps=STEPS)
        assert isinstance(bound.options, Cyclic)
        draw_bits(part, bound, PROFILES[bound.options.profile])
        saving = 100 * (1 - relative_cost(bound))
        part.set_title(f"{name} saves {saving:.0f} % ({group_of(name)})", fontsize=9)
        part.set_xticks([0, 0.5, 1], ["0", f"{STEPS // 2000}k", f"{STEPS // 1000}k"])
    figure.supxlabel("training step", fontsize=10)
    figure.supylabel("bits of weights and activations", fontsize=10)
    return save(figure, path.with_suffix(""))[0]


def main() -> None:
    """Draw the suite into the file given on the command line."""
    print(draw_suite(Path(sys.argv[1] if len(sys.argv) > 1 else "results/pictures/schedules.png")))


if __name__ == "__main__":
    main()
