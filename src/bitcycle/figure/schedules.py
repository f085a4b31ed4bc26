"""The ten schedules of Better Schedules as small pictures, in the colours of their profiles (drawn from the code itself)."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bitcycle.schedule import Cyclic, Schedule, schedule

matplotlib.rcParams["svg.hashsalt"] = "bitcycle"  # names inside SVG files are random otherwise

STEPS = 64_000
UNDATED: dict[str, dict[str, str | None]] = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
"""Neither dates nor versions: equal pictures are equal files."""
GROUPS = {"Large": ("RR", "RTH"), "Medium": ("LR", "LT", "CR", "CT", "RTV", "ETV"), "Small": ("ER", "ETH")}
"""Savings groups of Better Schedules, section 3.2."""
COLOURS = {"linear": "tab:green", "cosine": "tab:blue", "exponential": "tab:red", "rex": "tab:purple"}
LAYOUT = (("RR", "LR", "CR", "ER", "RTV"), ("RTH", "LT", "CT", "ETH", "ETV"))


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


def draw_suite(path: Path, cycles: int = 8) -> Path:
    """Draw all ten schedules between 3 and 8 bits with their savings; writes `path` and an SVG file beside it."""
    figure, grid = plt.subplots(2, 5, figsize=(11, 4), sharex=True, sharey=True, constrained_layout=True)
    for row, names in zip(grid, LAYOUT, strict=True):
        for axes, name in zip(row, names, strict=True):
            draw_schedule(axes, schedule(name, q_min=3, q_max=8, cycles=cycles, total_steps=STEPS))
    figure.supxlabel("training step", fontsize=10)
    figure.supylabel("bits of weights and activations", fontsize=10)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=150, metadata=UNDATED[suffix])
    plt.close(figure)
    return path.with_suffix(".png")


def draw_schedule(axes: Axes, bound: Schedule) -> None:
    """Bits over the steps, with the unrounded curve behind them."""
    assert isinstance(bound.options, Cyclic)
    steps, options = bound.length.total_steps, bound.options
    colour = COLOURS[options.profile]
    points = range(0, steps, steps // 800)
    smooth = [options.q_min + (options.q_max - options.q_min) * options.level(step, bound.length) for step in points]
    axes.plot(points, smooth, color=colour, alpha=0.4, linewidth=1)
    edges = [0]
    for _, count in bound.run_lengths:
        edges.append(edges[-1] + count)
    axes.stairs(
        [precision.weight for precision, _ in bound.run_lengths], edges, baseline=None, color=colour, linewidth=1.2
    )
    saving = 100 * (1 - relative_cost(bound))
    axes.set_title(f"{bound.name}  saves {saving:.0f} % ({group_of(bound.name)})", fontsize=9)
    axes.set_xticks([0, steps // 2, steps], ["0", f"{steps // 2000}k", f"{steps // 1000}k"])
    axes.set_yticks(range(options.q_min, options.q_max + 1))
    axes.margins(x=0.02)


def main() -> None:
    """Draw the suite into the file given on the command line."""
    print(draw_suite(Path(sys.argv[1] if len(sys.argv) > 1 else "results/pictures/schedules.png")))


if __name__ == "__main__":
    main()
