"""Layout and reproducible files of all pictures."""

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox
from PIL import Image

plt.style.use(Path(__file__).with_name("bitcycle.mplstyle"))
UNDATED: dict[str, dict[str, str | None]] = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
"""Metadata without dates and versions, so that equal pictures are equal files."""


def panels(count: int, columns: int = 3, width: float = 0.0, height: float = 2.9) -> tuple[Figure, list[Axes]]:
    """A figure with `count` axes in rows; by default, their width depends on the number of columns."""
    columns = max(1, min(columns, count))
    rows = -(-count // columns)
    size = (max((width or {1: 7.0, 2: 4.6}.get(columns, 3.6)) * columns, 6.0), height * rows + 0.7)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def legend(figure: Figure, axes: Iterable[Axes], columns: int = 4) -> None:
    """A single legend below all axes, without duplicate entries; hollow markers stand for a label that has no filled ones."""
    entries: dict[str, Any] = {}
    for part in axes:
        for handle, label in zip(*part.get_legend_handles_labels(), strict=True):
            if label not in entries or (_is_hollow(entries[label]) and not _is_hollow(handle)):
                entries[label] = handle
    if entries:
        fitting = min(columns, max(1, int(figure.get_figwidth() * 13 // (max(map(len, entries)) + 7))))
        style: dict[str, Any] = {"loc": "outside lower center", "ncols": fitting, "frameon": False, "fontsize": 8}
        figure.legend(list(entries.values()), list(entries), **style)


def _is_hollow(handle: Any) -> bool:
    marked = handle[0] if isinstance(handle, ErrorbarContainer) else handle
    return isinstance(marked, Line2D) and marked.get_markerfacecolor() == "white"


def render(figure: Figure) -> dict[str, bytes]:
    """Suffix -> content of a PNG file with at most 256 colours and of an SVG file; closes the figure."""
    png, reduced, svg = io.BytesIO(), io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=110, metadata=UNDATED[".png"])
    figure.set_layout_engine("none")  # already laid out
    for axes in figure.axes:  # to the same place however many figures the process drew before
        place = (round(float(part), 9) for part in axes.get_position(original=True).bounds)
        axes.set_position(Bbox.from_bounds(*place))
    colours = Image.open(png).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    colours.save(reduced, "png", optimize=True)
    figure.savefig(svg, format="svg", metadata=UNDATED[".svg"])
    plt.close(figure)
    return {".png": reduced.getvalue(), ".svg": svg.getvalue()}


def write_files(path: Path, content: Mapping[str, bytes]) -> list[Path]:
    """Write the files of `render` to `path` with their suffixes; a file without content is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(path.name + suffix) for suffix in UNDATED]
    for file in files:
        if file.suffix in content:
            file.write_bytes(content[file.suffix])
        else:
            file.unlink(missing_ok=True)
    return files


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as a PNG file and an SVG file."""
    return write_files(path, render(figure))
