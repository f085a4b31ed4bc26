"""Pictures of README.md and docs: the ten schedules and the number formats."""

from __future__ import annotations

from pathlib import Path

import torch

from bitcycle.picture.layout import panels, save
from bitcycle.quantizer.format import ELEMENTS, Element
from bitcycle.reproduction.analysis.claim_functions import relative_cost
from bitcycle.reproduction.analysis.labels import savings_group
from bitcycle.reproduction.figure.schematic import BITS, LONG, draw_bits
from bitcycle.reproduction.figure.style import PROFILES
from bitcycle.schedule import SCHEDULES, schedule

LAYOUT = ("RR", "LR", "CR", "ER", "RTV", "RTH", "LT", "CT", "ETH", "ETV")


def draw_suite(path: Path) -> Path:
    """Draw all ten schedules, 3 to 8 bits and eight cycles, with their savings; writes `path` and an SVG file beside it."""
    figure, axes = panels(len(LAYOUT), columns=5, width=2.2, height=1.7)
    for part, name in zip(axes, LAYOUT):
        bound = schedule(name, q_min=3, q_max=8, cycles=8, total_steps=LONG)
        draw_bits(part, bound, PROFILES[SCHEDULES[name].values["profile"]])
        part.set_title(f"{name} saves {100 * (1 - relative_cost(bound)):.0f} % ({savings_group(name)})", fontsize=9)
        part.set_xticks([0, 0.5, 1], ["0", f"{LONG // 2000}k", f"{LONG // 1000}k"])
    figure.supxlabel("training step", fontsize=10)
    figure.supylabel(BITS, fontsize=10)
    return save(figure, path.with_suffix(""))[0]


# Number formats

SHOWN = {
    "e2m1": "E2M1: mxfp4, nvfp4",
    "e2m3": "E2M3: mxfp6",
    "e3m2": "E3M2: mxfp6",
    "e4m3": "E4M3: mxfp8, fp8",
    "e5m2": "E5M2: mxfp8, fp8",
    "int8": "fixed point 1.6: mxint8",
}
"""Elements of the picture and their titles."""


def values_of(element: Element) -> list[float]:
    """Every non-negative value of a format, in ascending order."""
    _, mantissa, lowest, highest, largest = element
    exponents, steps = range(lowest, highest + 1), range(2 ** (mantissa + 1))
    values = {step * 2.0 ** (exponent - mantissa) for exponent in exponents for step in steps}
    return sorted(value for value in values if value <= largest)


def draw_formats(path: Path) -> Path:
    """Draw the grid of each format, relative to its largest value; writes `path`.

    Left: the grid around zero. Right: the distance between neighbours as a part of the value, over its size.
    """
    figure, (grid, steps) = panels(2, columns=2, width=5.0, height=3.1)
    for place, name in enumerate(SHOWN):
        values = torch.tensor(values_of(ELEMENTS[name]), dtype=torch.float64)
        values = values / values[-1]
        both = torch.cat([-values.flip(0), values])
        colour, row = f"C{place}", len(SHOWN) - place
        grid.plot(both, torch.full_like(both, row), "|", color=colour, markersize=12, markeredgewidth=0.7)
        steps.plot(values[1:], (values[1:] - values[:-1]) / values[1:], "-o", color=colour, markersize=2, linewidth=0.8)
    grid.set_yticks(range(len(SHOWN), 0, -1), list(SHOWN.values()))
    grid.set(ylim=(0.4, len(SHOWN) + 0.6), xlabel="value / largest value of the element")
    steps.set(xscale="log", yscale="log", xlabel="value / largest value of the element", ylabel="step / value")
    picture, vectors = save(figure, path.with_suffix(""))
    vectors.unlink()  # thousands of marks
    return picture
