"""How pictures look, the same in all of them: colours, marks, titles; and files that are equal bytes when nothing has changed."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Optional

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

matplotlib.rcParams.update(
    {
        "svg.hashsalt": "bitcycle",  # names inside SVG files are random otherwise
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "0.92",
        "axes.axisbelow": True,
    }
)
UNDATED: dict[str, dict[str, str | None]] = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
"""Neither dates nor versions: equal pictures are equal files."""
LOOKS = {
    **dict.fromkeys(("static", "SBM"), ("0.35", "s")),
    **dict.fromkeys(("Full Precision", "full precision", "float"), ("black", "s")),
    **dict.fromkeys(("CPT", "partial pre-training", "HLHLp", "FP-Agg", "initial window, by its end"), ("#0072b2", "o")),
    **dict.fromkeys(("SBM+CLR", "low precision", "fine-tuning", "Q-Agg"), ("#e69f00", "D")),
    **dict.fromkeys(("progressive precision", "PFQ", "Auto-PFQ four-stage"), ("#009e73", "P")),
    "Auto-PFQ two-stage": ("#56b4e9", "v"),
    "Manual-PFQ four-stage": ("#b8a000", "X"),
    **dict.fromkeys(("DoReFa", "Manual-PFQ two-stage"), ("#8a5a00", "^")),
    "WAGEUBN": ("#b8a000", "v"),
    "DFQ": ("#cc79a7", "X"),
    "FracTrain": ("#d55e00", "*"),
    "later window, by its beginning": ("#d55e00", "D"),
}
"""Colour and mark of each method, the same in all papers; told apart by colour-blind readers. All others are grey circles."""
PROFILES = {"linear": "#009e73", "cosine": "#0072b2", "exponential": "#d55e00", "rex": "#aa4499"}
"""Colours of the profiles of Better Schedules."""
FORMS = {"repeated": "o", "vertical": "^", "horizontal": "v"}
"""Marks of its forms: repeated, triangular with mirrored values, triangular with mirrored time."""
ORDERED = "viridis"
"""Colour map of ordered things."""


class Look(NamedTuple):
    """How a setting looks: its label, colour, mark, and the colour of an outline."""

    label: str
    colour: str = "0.5"
    marker: str = "o"
    edge: Optional[str] = None


class Drawing(NamedTuple):
    """A picture and what stands below it: what is compared, with which intervals, over how many seeds."""

    figure: Figure
    caption: str


def look_of(method: str) -> Look:
    """The look of a method.

    >>> look_of("CPT"), look_of("other")
    (Look(label='CPT', colour='#0072b2', marker='o', edge=None), Look(label='other', colour='0.5', marker='o', edge=None))
    """
    return Look(method, *LOOKS.get(method, ()))


def panels(count: int, columns: int = 3, width: float = 0.0, height: float = 2.9) -> tuple[Figure, list[Axes]]:
    """A picture of a number of axes in rows; where no width is given, that of a page is divided."""
    columns = max(1, min(columns, count))
    rows = -(-count // columns)
    size = (max((width or {1: 7.0, 2: 4.6}.get(columns, 3.6)) * columns, 6.0), height * rows + 0.7)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def legend(figure: Figure, axes: Iterable[Axes], columns: int = 4) -> None:
    """One legend below all axes, each entry once."""
    entries: dict[str, Any] = {}
    for part in axes:
        for handle, label in zip(*part.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        fitting = min(columns, max(1, int(figure.get_figwidth() * 13 // (max(map(len, entries)) + 7))))
        look: dict[str, Any] = {"loc": "outside lower center", "ncols": fitting, "frameon": False, "fontsize": 8}
        figure.legend(list(entries.values()), list(entries), **look)


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a PNG file of at most 256 colours and an SVG file, without dates or versions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(path.name + suffix) for suffix in UNDATED]
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110, metadata=UNDATED[".png"])
    figure.set_layout_engine("none")  # the places are found: once is enough
    Image.open(stream).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(files[0], optimize=True)
    figure.savefig(files[1], metadata=UNDATED[".svg"])
    plt.close(figure)
    return files
