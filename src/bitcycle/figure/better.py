"""Better Schedules, in its encoding: colours are profiles, shapes are forms, a dark outline is q_max = 8."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from matplotlib.lines import Line2D

from bitcycle.analysis.aggregation import Cell, plain
from bitcycle.analysis.labels import aggregation_of, anything, matches, schedule_of, window_of
from bitcycle.figure.data import ItemData
from bitcycle.figure.plots import curves, points_by_setting, tradeoff
from bitcycle.figure.schematic import diagram, suite_picture
from bitcycle.figure.style import FORMS, PROFILES, Drawing, Look, look_of
from bitcycle.figure.table import Spec
from bitcycle.schedule import SUITE

STATIC = {"schedule": "static", "schedule.q_max": 8}
"""The baseline of all pictures, whose cost is 1."""


def look(cell: Cell) -> Look:
    """The paper's look of a schedule, without a label."""
    edge = "black" if cell.setting("schedule.q_max") == 8 else None
    name = schedule_of(cell)
    if name not in SUITE:
        return Look("", "0.35", "s", edge)
    profile, form, _ = SUITE[name]
    return Look("", PROFILES[profile], FORMS[form], edge)


def with_legend(drawn: Drawing | None) -> Drawing | None:
    """The picture with the legend of the paper's encoding in place of its own."""
    for old in drawn.figure.legends if drawn else ():
        old.remove()
    if drawn:
        words = {"repeated": "repeated", "vertical": "triangular, mirrored values"}
        words["horizontal"] = "triangular, mirrored time"
        looks: list[dict[str, Any]] = [
            {"marker": "s", "color": colour, "label": profile} for profile, colour in PROFILES.items()
        ]
        looks += [{"marker": mark, "color": "0.6", "label": words[form]} for form, mark in FORMS.items()]
        looks += [{"marker": "s", "color": "0.35", "label": "static"}]
        looks += [
            {"marker": "o", "color": "0.8", "mec": edge, "label": f"q_max = {q}"}
            for edge, q in (("black", 8), ("0.8", 6))
        ]
        columns = 5 if drawn.figure.get_figwidth() > 8 else 3
        handles = [Line2D([], [], linestyle="none", **look) for look in looks]
        drawn.figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    return drawn


def schedules_against_cost(data: ItemData) -> Drawing | None:
    """Figures 3, 4, 6 and 7: difference of the metric to static 8 bits against training cost."""
    return with_legend(tradeoff(data, look, STATIC, "final", aggregation_of))


def look_of_mode(cell: Cell) -> Look:
    """Figure 5: full-precision or quantized aggregation."""
    return look_of("Q-Agg" if cell.setting("model.aggregation") == "quantized" else "FP-Agg")


def look_of_window(cell: Cell) -> Look:
    """Figure 8: whether a window of low precision begins at 0."""
    if window_of(cell)[0] == 0:
        return Look("initial window, by its end", "#0072b2")
    return Look("later window, by its beginning", "#d55e00", "D")


# Which cell a printed number is about


def in_window(text: str, cell: Cell) -> bool:
    """Table 1: a window as [16K, 144K] of iterations, or epochs."""
    words = text.rpartition(": ")[2].strip("[]").replace("K", "000")
    start, end = window_of(cell)
    if words == "None":
        return start == end
    wanted = [float(plain(word)) for word in words.split(", ")]
    if str(cell.setting("schedule.unit", "fraction")) == "fraction":
        total = float(cell.setting("training.steps") or cell.setting("training.epochs") or 1)
        start, end = start * total, end * total
    return all(abs(one - other) <= 0.01 * max(1, other) for one, other in zip((start, end), wanted))


without_bits = partial(matches, fw_bits=anything, bw_bits=anything)
same_schedule = partial(
    without_bits,
    method=lambda text, cell: "Agg" not in text or text.split()[-1] == aggregation_of(cell),
    schedule=lambda text, cell: text == schedule_of(cell),
    q_max=lambda text, cell: text == str(cell.setting("schedule.q_max")),
)
FIGURES: dict[str, Callable[[ItemData], Drawing | None]] = {
    "fig1": partial(diagram, name="layer"),
    "fig2": suite_picture,
    **dict.fromkeys(("fig3", "fig4", "fig6", "fig7"), schedules_against_cost),
    "fig5": partial(curves, look=look_of_mode, keep=STATIC),
    "fig8": partial(
        points_by_setting,
        place=lambda cell: window_of(cell)[0] or window_of(cell)[1],
        look=look_of_window,
        column="final",
        x="optimizer step (epoch for a graph in one batch)",
        base=STATIC,
        note=" 3-bit windows in 8-bit training; runs with longer windows are longer.",
    ),
}
SPEC = Spec("final", same_schedule, base=STATIC)
SPECS = {"table1": Spec("final", partial(without_bits, method=anything, setting=in_window), base=STATIC)}
