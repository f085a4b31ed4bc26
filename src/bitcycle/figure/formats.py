"""The number formats as grids: every value that an element can have, drawn from the code itself."""

from __future__ import annotations

from pathlib import Path

import torch

from bitcycle.figure.style import panels, save
from bitcycle.quantizer.element import ELEMENTS, Element

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
    values = {
        step * 2.0 ** (exponent - mantissa)
        for exponent in range(lowest, highest + 1)
        for step in range(2 ** (mantissa + 1))
    }
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
    grid.set_ylim(0.4, len(SHOWN) + 0.6)
    grid.set_xlabel("value / largest value of the element")
    steps.set_xscale("log")
    steps.set_yscale("log")
    steps.set_xlabel("value / largest value of the element")
    steps.set_ylabel("step / value")
    picture, vectors = save(figure, path.with_suffix(""))
    vectors.unlink()  # thousands of marks
    return picture
