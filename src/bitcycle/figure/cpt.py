"""The pictures of CPT: learning curves, the range test, accuracy against bit operations, repeats and numbers of cycles."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from bitcycle.analysis.compare import Comparison
from bitcycle.analysis.items import Published
from bitcycle.analysis.labels import (
    backward_bits,
    dataset_of,
    forward_bits,
    highest,
    matches,
    method_of,
    model_of,
    panel_of,
    schedule_of,
)
from bitcycle.analysis.landscape import results_of
from bitcycle.analysis.results import Cell, Results
from bitcycle.figure.better import draw_curves
from bitcycle.figure.landscape import CONTOURS, LEVELS, described, draw_contours, first_of
from bitcycle.figure.schematic import cosine_picture, static_and_cyclic
from bitcycle.figure.style import (
    COLOURS,
    ItemData,
    Point,
    commands,
    legend,
    not_analysed,
    panel_title,
    panels,
    published_bars,
    scatter,
    titled,
)

MARKS = {
    "SBM": "s",
    "SBM+CLR": "D",
    "CPT": "o",
    "PFQ": "o",
    "DFQ": "o",
    "FracTrain": "*",
    "DoReFa": "^",
    "WAGEUBN": "v",
}


def cpt_method(cell: Cell) -> str:
    """The method in the words of CPT."""
    if schedule_of(cell) == "pfq_manual":
        boundaries = cell.setting("schedule.boundaries") or []
        return "progressive precision" if len(boundaries) > 2 else "static first-stage precision"
    return "CPT on gradients only" if schedule_of(cell) == "gradient_cycle" else method_of(cell)


def curves(data: ItemData) -> Figure:
    """Figure 1: test accuracy during static, progressive and cyclic precision."""
    if not data.results.done:
        return published_bars(data)
    names = list(dict.fromkeys(panel_of(cell) for cell in data.results.done))
    figure, axes = panels(len(names), width=6, height=3.4, columns=1)
    for name, part in zip(names, axes, strict=True):
        for cell in data.results.done:
            if panel_of(cell) == name:
                method = cpt_method(cell)
                draw_curves(
                    part,
                    cell,
                    f"{method} {forward_bits(cell) if method != 'progressive precision' else '3 to 8'}",
                    COLOURS.get(method, "0.5"),
                )
        part.set_title(panel_title(name, data.results))
        part.set_xlabel("optimizer step")
        part.set_ylabel("test accuracy (%), bits of the step")
    legend(figure, axes, 3)
    words = [f"{row['method']} {row['printed']}" for row in data.published if row["metric"] == "delta_test_accuracy"]
    return titled(figure, data, f"band: one standard deviation; published against static: {', '.join(words)}")


def contours(data: ItemData) -> Figure:
    """Figures 2 and 6: contours of the loss around each network."""
    cells = [(cell, first_of(results_of(cell, "surface"))) for cell in data.results.cells]
    found = [(cell, surface) for cell, surface in cells if surface is not None]
    if not found:
        return not_analysed(data)
    figure, axes = panels(len(cells), width=3.2, height=3.0, columns=3 if len(cells) == 3 else 2)
    for (cell, surface), part in zip(cells, axes, strict=True):
        name = cpt_method(cell)
        words = f"{name} {'3 to 8' if name == 'progressive precision' else forward_bits(cell)} bits"
        ours = f"ours: {cell.actual('model')}, {cell.actual('dataset')}"
        lowest = cell.actual("schedule.q_min")
        if cell.actual("schedule") == "CR" and lowest != cell.setting("schedule.q_min"):
            ours += f", from {lowest} bits"
        part.set_title(f"{model_of(cell)}: {words}\n{ours if cell.stand_ins else dataset_of(cell)}", fontsize=8.5)
        if surface is None:
            part.text(0.5, 0.5, "no result yet", ha="center", va="center", transform=part.transAxes, color="0.4")
            part.set_box_aspect(1)
            part.set_xticks([])
            part.set_yticks([])
        else:
            draw_contours(part, surface)
    shown = ScalarMappable(Normalize(LEVELS[0], LEVELS[-1]), CONTOURS)
    figure.colorbar(shown, ax=axes, label="loss (cross-entropy)", shrink=0.8)
    words = " / ".join(dict.fromkeys(described(surface) for _, surface in found))
    if missing := len(cells) - len(found):
        words += f"; {missing} of {len(cells)} panels without result: {commands(data)}"
    return titled(figure, data, f"axes: lengths of the filters along two random directions; {words}")


def range_tests(data: ItemData) -> Figure:
    """Figure 4: training accuracy while the precision rises, and the bound that is found."""
    runs = [(cell, run) for cell in data.results.done for run in cell.runs[:1] if run.curve.get("range_test")]
    if not runs:
        return published_bars(data)
    figure, axes = panels(len(runs), width=4.5, columns=2)
    for (cell, run), part in zip(runs, axes, strict=True):
        test, seen = run.curve["range_test"], run.curve["observations"]
        part.plot(seen["step"], seen["accuracy"], color="tab:blue", linewidth=0.8, alpha=0.6)
        steps = test["level_steps"]
        for index, level in enumerate(test["levels"]):
            if index % 2 == 0:
                part.axvspan(index * steps, (index + 1) * steps, color="black", alpha=0.05, linewidth=0)
            part.text(
                (index + 0.5) * steps,
                0.97,
                f"{level['bits']}",
                ha="center",
                va="top",
                fontsize=8,
                transform=part.get_xaxis_transform(),
            )
            part.hlines(
                100 * level["accuracy"],
                (index + 1) * steps - test["window"],
                (index + 1) * steps,
                color="tab:blue",
                linewidth=3,
            )
        bounds = sorted({str(run.row["q_min"]) for run in cell.runs})
        published = next((row["value"] for row in data.published if row["model"] == model_of(cell)), "-")
        part.set_title(f"{model_of(cell)}: found {', '.join(bounds)}, published {published} bits")
        part.set_xlabel("optimizer step")
    axes[0].set_ylabel("training accuracy (%)")
    return titled(figure, data, "numbers above: bits; thick: mean at the end of a precision; first seed shown")


def against_operations(data: ItemData) -> Figure:
    """Figure 5: accuracy against bit operations relative to static 8 bits; published points hollow."""
    points = [point for cell in data.results.done if (point := _point(cell, data.results))]
    points += digitized_points(data.digitized, "gbitops", _is_reference)
    if not points:
        return published_bars(data)
    figure, axes = scatter(
        data.results,
        points,
        "bit operations relative to static FW8/BW8",
        "test accuracy (%)",
        list(dict.fromkeys(p.panel for p in points if p.published)),
    )
    legend(figure, axes.values())
    return titled(figure, data, "hollow: published, read from the picture; filled: ours")


def _is_reference(row: Published) -> bool:
    return row["method"] == "SBM" and row["fw_bits"] == "8"


def _point(cell: Cell, results: Results) -> Point | None:
    value, cost = (
        cell.value("best"),
        relative_to(cell, results, lambda other: method_of(other) == "SBM" and forward_bits(other) == "8"),
    )
    if value is None or cost is None:
        return None
    method = cpt_method(cell)
    return Point(
        panel_of(cell), method, cost, value.mean, COLOURS.get(method, "0.5"), MARKS.get(method, "o"), value.std
    )


def relative_to(cell: Cell, results: Results, is_reference: Callable[[Cell], bool]) -> float | None:
    """Bit operations relative to the first cell of the same panel that is the reference; else to its own static q_max."""
    own = cell.value("gbitops")
    for other in results.done:
        if panel_of(other) == panel_of(cell) and is_reference(other) and own and (cost := other.value("gbitops")):
            return own.mean / cost.mean
    found = cell.value("relative_to_static")
    return found.mean if found else None


def digitized_points(rows: Sequence[Published], cost: str, is_reference: Callable[[Published], bool]) -> list[Point]:
    """Points that were read from a picture, costs relative to the dearest reference of their panel."""
    pairs: dict[tuple[str, ...], dict[str, float]] = {}
    first: dict[tuple[str, ...], Published] = {}
    for row in rows:
        key = tuple(row[name] for name in ("model", "dataset", "method", "fw_bits", "bw_bits", "setting"))
        pairs.setdefault(key, {})[row["metric"]] = float(row["value"])
        first.setdefault(key, row)
    references: dict[str, float] = {}
    for key, values in pairs.items():
        if is_reference(first[key]) and cost in values:
            panel = f"{key[0]}, {key[1]}"
            references[panel] = max(values[cost], references.get(panel, 0))
    found = []
    for (model, dataset, method, *_), values in pairs.items():
        panel = f"{model}, {dataset}"
        if cost in values and "test_accuracy" in values and panel in references:
            colour, mark = COLOURS.get(method, "0.5"), MARKS.get(method, "o")
            found.append(
                Point(
                    panel,
                    f"{method}, published",
                    values[cost] / references[panel],
                    values["test_accuracy"],
                    colour,
                    mark,
                    published=True,
                )
            )
    return found


def repeats(data: ItemData) -> Figure:
    """Figure 7: box plots of the repeats for each precision range, CPT beside static."""
    if not data.results.done:
        return published_bars(data)
    ranges = sorted({highest(forward_bits(cell)) for cell in data.results.done})
    figure, axes = panels(1, width=7, height=3.4)
    for cell in data.results.done:
        method = method_of(cell)
        place = ranges.index(highest(forward_bits(cell))) + (0.18 if method == "CPT" else -0.18)
        values = [number for run in cell.runs if (number := run.number("best")) is not None]
        colour = COLOURS[method]
        axes[0].boxplot(
            [values],
            positions=[place],
            widths=0.28,
            patch_artist=True,
            manage_ticks=False,
            boxprops={"facecolor": "none", "edgecolor": colour},
            medianprops={"color": colour},
            whiskerprops={"color": colour},
            capprops={"color": colour},
        )
        axes[0].plot([place] * len(values), values, ".", color=colour, label=method)
    axes[0].set_xticks(range(len(ranges)), [f"FW(3,{high})" for high in ranges])
    axes[0].set_ylabel("best test accuracy (%)")
    legend(figure, axes)
    return titled(
        figure,
        data,
        "published: CPT gains 0.74 to 2.03 points over ranges that stood in the picture; ours are own choices",
    )


def number_of_cycles(data: ItemData) -> Figure:
    """Figure 8: mean accuracy against the number of cycles, with static precision as a line."""
    if not data.results.done:
        return published_bars(data)
    names = list(dict.fromkeys(panel_of(cell) for cell in data.results.done))
    figure, axes = panels(len(names), width=4, columns=2)
    for name, part in zip(names, axes, strict=True):
        cells = [cell for cell in data.results.done if panel_of(cell) == name]
        swept = sorted((int(cell.setting("schedule.cycles")), cell) for cell in cells if method_of(cell) == "CPT")
        values = [(cycles, value) for cycles, cell in swept if (value := cell.value("best"))]
        part.errorbar(
            [c for c, _ in values],
            [v.mean for _, v in values],
            yerr=[v.std or 0 for _, v in values],
            fmt="o-",
            color=COLOURS["CPT"],
            capsize=2,
            label="CPT",
        )
        for cell in cells:
            if method_of(cell) == "SBM" and (value := cell.value("best")):
                part.axhline(value.mean, color=COLOURS["SBM"], linestyle="--", label="SBM")
                part.axhspan(
                    value.mean - (value.std or 0), value.mean + (value.std or 0), color=COLOURS["SBM"], alpha=0.1
                )
        if values:  # an axis without a number on it cannot be logarithmic
            part.set_xscale("log", base=2)
        part.set_xticks([c for c, _ in values], [str(c) for c, _ in values])
        part.set_title(panel_title(name, data.results))
        part.set_xlabel("cycles")
    axes[0].set_ylabel("best test accuracy (%)")
    legend(figure, axes)
    return titled(figure, data, "published: the numbers of cycles differ by at most 0.5 points")


# Which cell a printed number is about


def same_cell(row: Published, cell: Cell) -> bool:
    """As `matches`, in the words of CPT."""
    words = {**row, "method": ""} if row["method"] in ("progressive precision", "Full Precision") else row
    if row["method"] == "progressive precision":
        return cpt_method(cell) == row["method"] and matches({**words, "fw_bits": "", "bw_bits": ""}, cell)
    if row["method"] == "Full Precision":
        return method_of(cell) == "Full Precision" and matches({**words, "fw_bits": "", "bw_bits": ""}, cell)
    return matches(words, cell)


def same_stage(row: Published, cell: Cell) -> bool:
    """Table 1: bits and learning rate of the first stage."""
    rate = float(row["setting"].rpartition(" ")[2])
    return (
        model_of(cell) == row["model"]
        and cpt_method(cell) == row["method"]
        and str((cell.setting("schedule.stages") or [0])[0]) == row["fw_bits"]
        and abs(float(cell.setting("training.learning_rate.initial", 0.1)) - rate) < 1e-9
    )


PATTERNS = {"cosine": "CR", "triangular": "triangular", "cosine annealing": "cosine_anneal"}


def same_pattern(row: Published, cell: Cell) -> bool:
    """Table 6: the pattern within a cycle."""
    return PATTERNS[row["schedule"]] == schedule_of(cell) and matches(row, cell)


def start_of(cell: Cell) -> float:
    """The epoch of 160 at which the cycles begin."""
    return 160 * float(cell.setting("schedule.start", 0.5)) if schedule_of(cell) == "delayed" else 0.0


def same_start(row: Published, cell: Cell) -> bool:
    """Table 7: the epoch at which CPT begins."""
    found = re.search(r"epoch (\d+)", row["setting"])
    return found is not None and abs(start_of(cell) - int(found[1])) < 1 and matches({**row, "method": ""}, cell)


def same_gradient(row: Published, cell: Cell) -> bool:
    """Table 8: bits of the gradient."""
    return (
        forward_bits(cell) == row["fw_bits"]
        and backward_bits(cell) == row["bw_bits"]
        and model_of(cell) == row["model"]
    )


def _test_of(row: Published, cell: Cell) -> bool:
    return bool(row["model"]) and row["model"] == model_of(cell) and row["dataset"] == dataset_of(cell)


def _described(cell: Cell) -> dict[str, str]:
    words = {"method": cpt_method(cell)}
    if schedule_of(cell) == "delayed":
        words["setting"] = f"CPT starts at epoch {start_of(cell):g}"
    elif cell.setting("schedule.cycles") and schedule_of(cell) == "CR":
        words["setting"] = f"{cell.setting('schedule.cycles')} cycles"
    return words


FIGURES: dict[str, Callable[[ItemData], Figure]] = {
    "fig1": curves,
    "fig2": contours,
    "fig3": static_and_cyclic,
    "fig4": range_tests,
    "fig5": against_operations,
    "fig6": contours,
    "fig7": repeats,
    "fig8": number_of_cycles,
    "fig9": cosine_picture,
}
COMPARISON = Comparison("best", same_cell, describe=_described)
COMPARISONS = {
    "fig4": Comparison("best", _test_of, describe=_described),
    "table1": Comparison("best", same_stage, describe=_described),
    "table6": Comparison("best", same_pattern, describe=_described),
    "table7": Comparison("best", same_start, describe=_described),
    "table8": Comparison("best", same_gradient, describe=_described),
}
