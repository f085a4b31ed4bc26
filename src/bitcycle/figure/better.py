"""The pictures of Better Schedules in its encoding: colours are profiles, shapes are forms, a dark outline is q_max = 8."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bitcycle.analysis.claims_better import probes, window_of
from bitcycle.analysis.compare import Comparison
from bitcycle.analysis.items import Published
from bitcycle.analysis.labels import (
    aggregation_of,
    dataset_of,
    group_of,
    matches,
    model_of,
    panel_of,
    schedule_of,
)
from bitcycle.analysis.results import Cell, Results, plain
from bitcycle.figure.schedules import relative_cost
from bitcycle.figure.schematic import layer_schematic, suite_picture
from bitcycle.figure.style import (
    FORMS,
    PROFILES,
    ItemData,
    Point,
    draw_points,
    label_axes,
    panels,
    published_bars,
    title_of,
    titled,
)
from bitcycle.schedule import SUITE, schedule

STATIC = "0.35"
HIGH = 8
"""The q_max that has an outline, and whose static cost is 1."""
X_AXIS = f"bit operations relative to static {HIGH} bits"


def look(name: str) -> tuple[str, str]:
    """(colour, mark) of a schedule."""
    if name not in SUITE:
        return STATIC, "*"
    profile, form, _ = SUITE[name]
    return PROFILES[profile], FORMS[form]


def cost_of(cell: Cell, results: Results) -> float | None:
    """Bit operations relative to static 8 bits in the same panel."""
    own = cell.value("gbitops")
    other = static(results, panel_of(cell), HIGH)
    reference = other.value("gbitops") if other else None
    if own and reference:
        return own.mean / reference.mean
    relative = cell.value("relative_to_static")
    return relative.mean if relative else None


def static(results: Results, panel: str, q_max: int) -> Cell | None:
    """The static cell of a panel."""
    return next(
        (
            cell
            for cell in results.done
            if panel_of(cell) == panel and schedule_of(cell) == "static" and cell.setting("schedule.q_max") == q_max
        ),
        None,
    )


def schedules_against_cost(data: ItemData) -> Figure:
    """Figures 3, 4, 6 and 7: metric against training cost, one panel for each network and data set."""
    by_panel = merged_panels(data.results)
    published = published_panels(data)
    names = list(dict.fromkeys([*by_panel, *published])) if not by_panel else list(by_panel)
    if not names:
        return published_bars(data)
    figure, axes = panels(len(names))
    for name, part in zip(names, axes, strict=True):
        cells = by_panel.get(name, [])
        draw_points(part, [point for cell in cells if (point := _point(cell, data.results))])
        said = [
            row for panel in sorted({panel_of(cell) for cell in cells} or {name}) for row in published.get(panel, [])
        ]
        for number, rows in enumerate(statements(said)):
            _draw_published(part, rows, data.results, panel_of(cells[0]) if cells else name, number)
        if not cells:
            _draw_computed_costs(part, said)
        part.set_title("\n".join(textwrap.wrap(name, 46)), fontsize=8.5)
        metric = cells[0].runs[0].row["metric"].replace("_", " ") if cells else "difference to static, as published"
        label_axes(figure, [part], "", metric)
    label_axes(figure, axes, X_AXIS, "")
    _encoding(figure)
    return titled(figure, data, "thick bars: differences to static, dotted lines: costs, as the paper's text has them")


def merged_panels(results: Results) -> dict[str, list[Cell]]:
    """Panel -> its cells; panels whose runs are the same, as one network stands in for several, are one."""
    single: dict[str, list[Cell]] = {}
    for cell in results.done:
        single.setdefault(panel_of(cell), []).append(cell)
    alike: dict[frozenset[int], list[str]] = {}
    for name, cells in single.items():
        alike.setdefault(frozenset(id(run) for cell in cells for run in cell.runs), []).append(name)
    found = {}
    for names in alike.values():
        cells = single[names[0]]
        ours = ", ".join(dict.fromkeys(str(cells[0].actual(key)) for key in ("model", "dataset")))
        found[names[0] if not cells[0].stand_ins else f"{ours} for {'; '.join(names)}"] = cells
    return found


def statements(rows: Sequence[Published]) -> list[list[Published]]:
    """Published numbers that say one thing together: both ends of a range, for each schedule and metric; each once."""
    found: dict[tuple[str, ...], list[Published]] = {}
    for row in rows:
        known = found.setdefault((row["metric"], row["schedule"], row["q_min"], row["q_max"]), [])
        if all(other["value"] != row["value"] for other in known):
            known.append(row)
    return list(found.values())


def _point(cell: Cell, results: Results) -> Point | None:
    value, cost = cell.value("final"), cost_of(cell, results)
    if value is None or cost is None:
        return None
    colour, mark = look(schedule_of(cell))
    edge = "black" if cell.setting("schedule.q_max") == HIGH else None
    return Point(panel_of(cell), "", cost, value.mean, colour, mark, value.std, edge=edge)


def published_panels(data: ItemData) -> dict[str, list[Published]]:
    """Panel -> what the paper says about it."""
    found: dict[str, list[Published]] = {}
    for row in data.published:
        models = row["model"].split("/")
        for model in models if row["model"] else []:
            mode = f", {row['method'].split()[-1]}" if "Agg" in row["method"] else ""
            found.setdefault(f"{model}, {row['dataset']}{mode}", []).append(row)
    return found


def named_schedules(row: Published) -> list[str]:
    """The schedules that a published number is about.

    >>> named_schedules({"schedule": "Large group (RR, RTH)"}), named_schedules({"schedule": "ETV"})
    (['RR', 'RTH'], ['ETV'])
    """
    text = row["schedule"]
    return [
        name
        for name in SUITE
        if name in text.replace("(", " ").replace(")", " ").replace(",", " ").split()
        or group_of(name) == text.split()[0]
    ]


def computed_cost(name: str, q_min: int, q_max: int, cycles: int = 8) -> float:
    """Cost of a schedule relative to static 8 bits, from its bits alone."""
    if name == "static":
        return (q_max / HIGH) ** 2
    return (
        relative_cost(schedule(name, q_min=q_min, q_max=q_max, cycles=cycles, total_steps=8000)) * (q_max / HIGH) ** 2
    )


def _bounds(row: Published) -> list[tuple[int, int]]:
    """(q_min, q_max) of a published number; "6 and 8" are two."""
    return [(int(row["q_min"]), int(high)) for high in row["q_max"].split(" and ")]


DIFFERENCES = {"accuracy_drop_vs_static": -1, "delta_test_accuracy": 1, "delta_map": 1}


def _draw_published(axes: Axes, rows: Sequence[Published], results: Results, panel: str, number: int) -> None:
    """A published difference to static as a bar at the cost of its schedules, a published cost as a dotted line."""
    row, values = rows[0], [float(row["value"]) for row in rows]
    if row["metric"] in ("training_cost_reduction", "training_cost"):
        # in GBitOps static is printed as more than 9
        x = 1 - values[0] / 100 if row["metric"] == "training_cost_reduction" else values[0] / 9
        axes.axvline(x, color="0.5", linestyle=":", linewidth=1)
        axes.text(
            x,
            0.7 - 0.08 * (number % 3),
            f" {row['schedule'].split(' (')[0]}",
            transform=axes.get_xaxis_transform(),
            fontsize=6.5,
            color="0.3",
            va="top",
        )
    if row["metric"] not in DIFFERENCES:
        return
    names, sign = named_schedules(row), DIFFERENCES[row["metric"]]
    low = 0.0 if row["relation"] == "<=" else min(values)
    for q_min, q_max in _bounds(row):
        x = statistics.fmean(computed_cost(name, q_min, q_max) for name in names)
        cell = static(results, panel, q_max)
        base = cell.value("final") if cell else None
        level = base.mean if base else 0.0
        ends = [level + sign * low, level + sign * max(values)]
        colour = look(names[0])[0]
        if ends[0] == ends[1]:
            axes.plot([x - 0.02, x + 0.02], ends, color=colour, linewidth=3, alpha=0.5)
        else:
            axes.plot([x, x], ends, color=colour, linewidth=4, alpha=0.5, solid_capstyle="butt")
    text = (
        f"{'/'.join(names)}: {sign * low:+g} to {sign * max(values):+g}"
        if low != max(values)
        else f"{names[0]}: {sign * low:+g}"
    )
    axes.annotate(text, (x, sum(ends) / 2), (6, 0), textcoords="offset points", va="center", fontsize=7, color="0.3")


def _draw_computed_costs(axes: Axes, rows: Sequence[Published]) -> None:
    """Where the schedules will lie: their costs are known without training."""
    bounds = sorted({bound for row in rows for bound in _bounds(row) if bound[0] < bound[1]}) or [(3, 8)]
    axes.axhline(0, color=STATIC, linewidth=0.8)
    for q_min, q_max in bounds:
        for name in ("static", *SUITE):
            colour, mark = look(name)
            edge = "black" if q_max == HIGH else None
            x, y = computed_cost(name, q_min, q_max), 0.04 if q_max == HIGH else 0.11
            axes.plot(
                [x],
                [y],
                mark,
                color=colour,
                markersize=5,
                markeredgecolor=edge,
                clip_on=False,
                transform=axes.get_xaxis_transform(),
            )
    low, high = axes.get_ylim()
    if not any(row["metric"] in DIFFERENCES for row in rows):
        low, high = -1.0, 1.0
        axes.set_yticks([0])
    axes.set_ylim(low - 0.35 * (high - low), high + 0.2 * (high - low))
    axes.set_xlim(right=1.06)


def _encoding(figure: Figure) -> None:
    entries = [Line2D([], [], marker="s", linestyle="none", color=c, label=p) for p, c in PROFILES.items()]
    entries += [Line2D([], [], marker=m, linestyle="none", color="0.6", label=_FORM_WORDS[f]) for f, m in FORMS.items()]
    entries += [
        Line2D([], [], marker="*", linestyle="none", color=STATIC, label="static"),
        Line2D([], [], marker="o", linestyle="none", color="0.8", mec="black", label="q_max = 8"),
        Line2D([], [], marker="o", linestyle="none", color="0.8", label="q_max = 6"),
    ]
    columns = 5 if figure.get_figwidth() > 6 else 3
    figure.legend(handles=entries, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


_FORM_WORDS = {"repeated": "repeated", "vertical": "triangular, vertical", "horizontal": "triangular, horizontal"}


def aggregation(data: ItemData) -> Figure:
    """Figure 5: validation curves with full-precision and quantized aggregation at static 8 bits."""
    cells = [
        cell for cell in data.results.done if schedule_of(cell) == "static" and cell.setting("schedule.q_max") == HIGH
    ]
    if not cells:
        return published_bars(data)
    names = list(dict.fromkeys(f"{model_of(cell)}, {dataset_of(cell)}" for cell in cells))
    figure, axes = panels(len(names))
    for name, part in zip(names, axes, strict=True):
        shown = [cell for cell in cells if name == f"{model_of(cell)}, {dataset_of(cell)}"]
        for cell in shown:
            colour = {"FP-Agg": "tab:blue", "Q-Agg": "tab:orange"}[aggregation_of(cell)]
            draw_curves(part, cell, aggregation_of(cell), colour)
        part.legend(fontsize=7.5, frameon=False, loc="lower right")
        part.set_title(title_of(name, shown))
        part.set_ylabel(cells[0].runs[0].row["metric"].replace("_", " "))
        part.set_xlabel("optimizer step")
    gain = next((row["value"] for row in data.published), "")
    return titled(figure, data, f"published: FP-Agg is {gain} pp better on OGBN-Arxiv" if gain else "")


def draw_curves(axes: Axes, cell: Cell, label: str, colour: str, x: str = "step") -> None:
    """The evaluations of a cell: their mean over seeds as a line, one standard deviation as a band.

    Args:
        x: step, share (of the run) or gbitops.
    """
    curves = [run.curve["evaluations"] for run in cell.runs if run.curve and run.curve["evaluations"]["step"]]
    if not curves:
        return
    length = min(len(curve["step"]) for curve in curves)
    values = [[curve["value"][index] for curve in curves] for index in range(length)]
    places = curves[0]["gbitops" if x == "gbitops" else "step"][:length]
    if x == "share":
        places = [step / curves[0]["step"][-1] for step in places]
    means = [statistics.fmean(group) for group in values]
    axes.plot(places, means, color=colour, linewidth=1.3, label=f"{label} ({means[-1]:.2f}, n = {len(curves)})")
    if len(curves) > 1:
        spread = [statistics.stdev(group) for group in values]
        axes.fill_between(
            places,
            [m - s for m, s in zip(means, spread)],
            [m + s for m, s in zip(means, spread)],
            color=colour,
            alpha=0.2,
            linewidth=0,
        )


def deficits(data: ItemData) -> Figure:
    """Figure 8: accuracy against the length of an initial window, and against the place of a window of fixed length."""
    if not data.results.done:
        return published_bars(data)
    moved = probes(data.results.done)
    initial = [cell for cell in data.results.done if window_of(cell)[0] == 0 and cell not in moved]
    figure, axes = panels(2, columns=2, width=4)
    for part, cells, end, label in (
        (axes[0], initial, 1, "length of the initial window"),
        (axes[1], moved, 0, "begin of the window"),
    ):
        values = sorted((window_of(cell)[end], value) for cell in cells if (value := cell.value("final")))
        part.errorbar(
            [place for place, _ in values],
            [value.mean for _, value in values],
            yerr=[value.std or 0 for _, value in values],
            fmt="o-",
            color="tab:blue",
            capsize=2,
        )
        unit = (moved or initial)[-1].setting("schedule.unit", "fraction")
        # as the sweep names them: shorter runs have shorter windows
        part.set_xlabel(f"{label} ({unit}s at paper scale)")
    axes[0].set_ylabel(data.results.done[0].runs[0].row["metric"].replace("_", " "))
    return titled(figure, data, "3-bit windows in 8-bit training; the paper prints no values")


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
    bare = {**row, "method": "", "fw_bits": "", "bw_bits": ""}
    mode = row["method"].split()[-1] if "Agg" in row["method"] else ""
    return (
        matches(bare, cell)
        and mode in ("", aggregation_of(cell))
        and str(cell.setting("schedule.q_max")) == row["q_max"]
        and row["schedule"] == schedule_of(cell)
    )


def _described(cell: Cell) -> dict[str, str]:
    if schedule_of(cell) != "deficit":
        return {"group": aggregation_of(cell)}
    return {"group": aggregation_of(cell), "setting": "window {:g} to {:g}".format(*window_of(cell))}


FIGURES: dict[str, Callable[[ItemData], Figure]] = {
    "fig1": layer_schematic,
    "fig2": suite_picture,
    "fig3": schedules_against_cost,
    "fig4": schedules_against_cost,
    "fig5": aggregation,
    "fig6": schedules_against_cost,
    "fig7": schedules_against_cost,
    "fig8": deficits,
}
COMPARISON = Comparison("final", same_schedule, describe=_described)
COMPARISONS = {"table1": Comparison("final", same_window, describe=_described)}
