"""Better Schedules, in its encoding: colours are profiles, shapes are forms, a dark outline is q_max = 8."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.lines import Line2D

from bitcycle.analysis.aggregation import Cell, plain
from bitcycle.analysis.items import Published
from bitcycle.analysis.labels import aggregation_of, dataset_of, matches, model_of, schedule_of, window_of
from bitcycle.figure.data import ItemData
from bitcycle.figure.plots import curves, points_by_setting, tradeoff
from bitcycle.figure.schematic import layer_schematic, suite_picture
from bitcycle.figure.style import FORMS, PROFILES, Drawing, Look, look_of
from bitcycle.figure.table import Spec
from bitcycle.schedule import SUITE

HIGH = 8
"""The q_max that has an outline, and whose static cost is 1."""


def is_static(cell: Cell) -> bool:
    """Static precision at 8 bits, the baseline of all pictures."""
    return schedule_of(cell) == "static" and cell.setting("schedule.q_max") == HIGH


def look(cell: Cell) -> Look:
    """The paper's look of a schedule, without a label."""
    edge = "black" if cell.setting("schedule.q_max") == HIGH else None
    name = schedule_of(cell)
    if name not in SUITE:
        return Look("", "0.35", "s", edge)
    profile, form, _ = SUITE[name]
    return Look("", PROFILES[profile], FORMS[form], edge)


def schedules_against_cost(data: ItemData) -> Drawing | None:
    """Figures 3, 4, 6 and 7: difference of the metric to static 8 bits against training cost."""
    drawn = tradeoff(data, look, is_static, "final", aggregation_of)
    if drawn:
        for old in drawn.figure.legends:
            old.remove()
        words = {
            "repeated": "repeated",
            "vertical": "triangular, mirrored values",
            "horizontal": "triangular, mirrored time",
        }
        entries = [Line2D([], [], marker="s", linestyle="none", color=c, label=p) for p, c in PROFILES.items()]
        entries += [Line2D([], [], marker=m, linestyle="none", color="0.6", label=words[f]) for f, m in FORMS.items()]
        entries += [Line2D([], [], marker="s", linestyle="none", color="0.35", label="static")]
        entries += [
            Line2D([], [], marker="o", linestyle="none", color="0.8", mec=e, label=f"q_max = {q}")
            for e, q in (("black", 8), ("0.8", 6))
        ]
        columns = 5 if drawn.figure.get_figwidth() > 8 else 3
        drawn.figure.legend(handles=entries, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    return drawn


def aggregation(data: ItemData) -> Drawing | None:
    """Figure 5: curves with full-precision and quantized aggregation at static 8 bits."""
    return curves(data, lambda cell: look_of(mode_of(cell)), keep=is_static)


def mode_of(cell: Cell) -> str:
    """FP-Agg or Q-Agg of a graph network."""
    return "Q-Agg" if cell.setting("model.aggregation") == "quantized" else "FP-Agg"


def deficits(data: ItemData) -> Drawing | None:
    """Figure 8: windows of low precision, by their end if they begin at 0, else by their beginning."""

    def looked(cell: Cell) -> Look:
        if window_of(cell)[0] == 0:
            return Look("initial window, by its end", "#0072b2")
        return Look("later window, by its beginning", "#d55e00", "D")

    def place(cell: Cell) -> float:
        start, end = window_of(cell)
        return start or end

    drawn = points_by_setting(
        data, place, looked, "final", "optimizer step (epoch for a graph in one batch)", is_static
    )
    return drawn and drawn._replace(
        caption=f"{drawn.caption} 3-bit windows in 8-bit training; runs with longer windows are longer."
    )


# Which cell a printed number is about


def same_window(row: Published, cell: Cell) -> bool:
    """Whether a row of table 1 is about a cell: [16K, 144K] of iterations, or epochs."""
    words = row["setting"].rpartition(": ")[2].strip("[]").replace("K", "000")
    if row["dataset"] != dataset_of(cell) or row["model"] != model_of(cell):
        return False
    start, end = window_of(cell)
    if words == "None":
        return start == end
    wanted = [float(plain(word)) for word in words.split(", ")]
    if str(cell.setting("schedule.unit", "fraction")) == "fraction":
        total = float(cell.setting("training.steps") or cell.setting("training.epochs") or 1)
        start, end = start * total, end * total
    return all(abs(one - other) <= 0.01 * max(1, other) for one, other in zip((start, end), wanted))


def same_schedule(row: Published, cell: Cell) -> bool:
    """Network, data, aggregation, bounds and schedule agree."""
    mode = row["method"].split()[-1] if "Agg" in row["method"] else ""
    bare = {**row, "method": "", "fw_bits": "", "bw_bits": ""}
    bounds = str(cell.setting("schedule.q_max")) == row["q_max"] and row["schedule"] == schedule_of(cell)
    return matches(bare, cell) and mode in ("", aggregation_of(cell)) and bounds


FIGURES: dict[str, Callable[[ItemData], Drawing | None]] = {
    "fig1": layer_schematic,
    "fig2": suite_picture,
    **dict.fromkeys(("fig3", "fig4", "fig6", "fig7"), schedules_against_cost),
    "fig5": aggregation,
    "fig8": deficits,
}
SPEC = Spec("final", same_schedule, base=is_static)
SPECS = {"table1": Spec("final", same_window, base=is_static)}
