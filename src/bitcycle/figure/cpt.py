"""CPT: accuracy against cost, curves, loss surfaces, range tests, numbers of cycles."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from bitcycle.analysis.aggregation import Cell
from bitcycle.analysis.items import Published
from bitcycle.analysis.labels import anything, forward_bits, highest, matches, method_of, schedule_of, start_of
from bitcycle.analysis.landscape import results_of
from bitcycle.figure.data import ItemData, panels_of
from bitcycle.figure.landscape import CONTOURS, LEVELS, described_surface, draw_contours, radial_rise
from bitcycle.figure.plots import Point, curves, draw_series, points_by_setting, title, tradeoff
from bitcycle.figure.run import draw_levels
from bitcycle.figure.schematic import cosine_picture, static_and_cyclic
from bitcycle.figure.style import Drawing, Look, legend, look_of, panels
from bitcycle.figure.table import Spec


def cpt_method(cell: Cell) -> str:
    """The method in the words of CPT."""
    if schedule_of(cell) == "pfq_manual":
        return (
            "progressive precision"
            if len(cell.setting("schedule.boundaries") or []) > 2
            else "static first-stage precision"
        )
    return "CPT on gradients only" if schedule_of(cell) == "gradient_cycle" else method_of(cell)


STATIC = {"method": "SBM", "fw": 8}
"""The baseline of all pictures."""


def look(cell: Cell) -> Look:
    """The look of a method."""
    return look_of(cpt_method(cell))


def named(cell: Cell) -> Look:
    """The look of a method, labelled with its bits."""
    method = cpt_method(cell)
    return look_of(method, f"{method} {'3 to 8' if method == 'progressive precision' else forward_bits(cell)} bits")


def training(data: ItemData) -> Drawing | None:
    """Figure 1: test accuracy during static, progressive and cyclic precision; the ends alone of runs too short for curves."""
    return curves(data, named) or tradeoff(data, named, STATIC, "best")


def contours(data: ItemData) -> Drawing | None:
    """Figures 2 and 6: contours of the loss around each network, and how far it rises over all pairs of directions."""
    cells = [(cell, found) for p in panels_of(data) for cell in p.cells if (found := results_of(cell.runs, "surface"))]
    if not data.complete_enough or 2 * len(cells) < len(data.results.done):
        return None
    figure, axes = panels(len(cells) + 1, width=3.0, height=3.0, columns=len(cells) + 1)
    series: dict[Look, list[Point]] = {}
    for (cell, found), part in zip(cells, axes):
        draw_contours(part, min(found, key=lambda result: result.options.get("seed", 0)))
        title(part, named(cell).label)
        rises = [radial_rise(surface) for surface in found]
        shade = named(cell)._replace(marker="^" if highest(forward_bits(cell)) < 8 else named(cell).marker)
        values = {radius: [rise[radius] for rise in rises] for radius in rises[0]}
        series[shade] = [(radius, statistics.fmean(v), (min(v), max(v))) for radius, v in values.items()]
    draw_series(axes[-1], series, line=True)
    axes[-1].set_xlabel("distance in lengths of the filters")
    axes[-1].set_ylabel("rise of the loss")
    title(axes[-1], f"mean over {max(len(found) for _, found in cells)} pairs of random directions")
    shown = ScalarMappable(Normalize(LEVELS[0], LEVELS[-1]), CONTOURS)
    figure.colorbar(shown, ax=axes[-2], label="loss (cross-entropy)", shrink=0.7)
    legend(figure, axes[-1:])
    words = " / ".join(dict.fromkeys(described_surface(found[0]) for _, found in cells))
    pairs = "contours: the first pair of directions; bars: smallest and largest of all pairs"
    return Drawing(figure, f"{panels_of(data)[0].title}. {words}; {pairs}. One training each.")


def range_tests(data: ItemData) -> Drawing | None:
    """Figure 4: training accuracy while the precision rises, and the bound that is found."""
    cells = [(panel, cell) for panel in panels_of(data) for cell in panel.cells]
    runs = [(panel, cell, cell.runs[0]) for panel, cell in cells if cell.runs[0].curve.get("range_test")]
    if not runs or not data.complete_enough:
        return None
    figure, axes = panels(len(runs), width=4.5, columns=2)
    for (panel, cell, run), part in zip(runs, axes):
        test, seen = run.curve["range_test"], run.curve["observations"]
        part.plot(seen["step"], seen["accuracy"], color="#0072b2", linewidth=0.8, alpha=0.6)
        draw_levels(part, test)
        title(part, f"{panel.name}: found {found_bounds(cell)} bits")
        part.set_xlabel("optimizer step")
    axes[0].set_ylabel("training accuracy (%)")
    return Drawing(figure, "Numbers above: bits; thick: mean at the end of a precision; the first seed is shown.")


# Which cell a printed number is about


def same_cell(row: Published, cell: Cell) -> bool:
    """As `matches`, in the words of CPT."""
    if row["method"] in ("progressive precision", "Full Precision"):
        bare = {**row, "method": "", "fw_bits": "", "bw_bits": ""}
        return cpt_method(cell) == row["method"] and matches(bare, cell)
    return matches(row, cell)


def same_start(text: str, cell: Cell) -> bool:
    """Table 7: the epoch of 160 at which the cycles begin."""
    found = re.search(r"epoch (\d+)", text)
    return found is not None and abs(160 * start_of(cell) - int(found[1])) < 1


def same_rate(text: str, cell: Cell) -> bool:
    """Table 1: the learning rate of the first stage."""
    return abs(float(text.rpartition(" ")[2]) - float(cell.setting("training.learning_rate.initial", 0.1))) < 1e-9


PATTERNS = {"cosine": "CR", "triangular": "triangular", "cosine annealing": "cosine_anneal"}
first_stage = partial(
    matches,
    method=lambda text, cell: text == cpt_method(cell),
    fw_bits=lambda text, cell: text == str((cell.setting("schedule.stages") or [0])[0]),
    bw_bits=anything,
    setting=same_rate,
)


def found_bounds(cell: Cell) -> str:
    """The bounds that the seeds of a range test found."""
    return ", ".join(sorted({str(run.row["q_min"]) for run in cell.runs}))


FIGURES: dict[str, Callable[[ItemData], Drawing | None]] = {
    "fig1": training,
    "fig2": contours,
    "fig3": static_and_cyclic,
    "fig4": range_tests,
    "fig5": partial(
        tradeoff,
        look=look,
        base=STATIC,
        column="best",
        cost="gbitops",
        published_base={"method": "SBM", "fw_bits": "8"},
    ),
    "fig6": contours,
    "fig7": partial(
        points_by_setting,
        place=lambda cell: f"up to {highest(forward_bits(cell))} bits",
        look=look,
        column="best",
        line=False,
    ),
    "fig8": partial(
        points_by_setting,
        place=lambda cell: float(cell.setting("schedule.cycles") or 1),
        look=look,
        column="best",
        x="cycles",
        base=STATIC,
        log=True,
    ),
    "fig9": cosine_picture,
}
SPEC = Spec("best", same_cell, named=cpt_method, base=STATIC)
SPECS = {
    "fig4": Spec("best", matches, named=cpt_method, measures={"q_min found": found_bounds}),
    "table1": replace(SPEC, match=first_stage),
    "table6": replace(SPEC, match=partial(matches, schedule=lambda text, cell: PATTERNS[text] == schedule_of(cell))),
    "table7": replace(SPEC, match=partial(matches, method=anything, setting=same_start)),
    "table8": replace(SPEC, match=partial(matches, method=anything)),
}
