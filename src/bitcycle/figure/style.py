"""How pictures look, the same in all of them: colours, marks, titles; and files that are equal bytes when nothing has changed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bitcycle.analysis.items import Item, Published
from bitcycle.analysis.labels import dataset_label, model_label, panel_of
from bitcycle.analysis.results import Cell, Results

matplotlib.rcParams.update(
    {
        "svg.hashsalt": "bitcycle",
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)

COLOURS = {
    "static": "0.35",
    "SBM": "0.35",
    "SBM+CLR": "tab:orange",
    "DoReFa": "tab:brown",
    "WAGEUBN": "tab:olive",
    "CPT": "tab:blue",
    "progressive precision": "tab:green",
    "PFQ": "tab:green",
    "Auto-PFQ four-stage": "tab:green",
    "Auto-PFQ two-stage": "tab:cyan",
    "Manual-PFQ four-stage": "tab:olive",
    "DFQ": "tab:purple",
    "FracTrain": "tab:red",
    "Full Precision": "black",
    "full precision": "black",
    "partial pre-training": "tab:blue",
    "low precision": "tab:orange",
    "float": "black",
    "fine-tuning": "tab:orange",
    "HLHLp": "tab:blue",
    "FP-Agg": "tab:blue",
    "Q-Agg": "tab:orange",
}
"""Colour of each method, the same in all papers."""
PROFILES = {"linear": "tab:green", "cosine": "tab:blue", "exponential": "tab:red", "rex": "tab:purple"}
"""Colours of the profiles of Better Schedules."""
FORMS = {"repeated": "o", "vertical": "^", "horizontal": "v"}
"""Marks of its forms: repeated, triangular with mirrored values, triangular with mirrored time."""
COLUMNS = 3
WIDTH, HEIGHT = 3.3, 2.9
NO_RUNS = "no runs yet"


@dataclass(frozen=True)
class ItemData:
    """Everything that is known of an item.

    Attributes:
        item: what it is.
        results: our runs.
        published: its published numbers.
        digitized: those that were read from its picture.
        command: what trains its runs; empty if it needs none.
        conf: folder of the configuration files.
        note: of its sweep: stand-ins, and own choices where the paper is silent.
        analysis: the command that analyses its finished runs; empty if they need none.
    """

    item: Item
    results: Results
    published: Sequence[Published] = ()
    digitized: Sequence[Published] = ()
    command: str = ""
    conf: Path = Path("conf")
    note: str = ""
    analysis: str = ""


@dataclass(frozen=True)
class Point:
    """One point of a picture: where, what, how it looks; `published` ones are hollow."""

    panel: str
    label: str
    x: float
    y: float
    colour: str
    marker: str = "o"
    error: Optional[float] = None
    published: bool = False
    edge: Optional[str] = None


def status_line(data: ItemData) -> str:
    """The scale of our runs, seeds, and what stands in for what; or what to run."""
    results = data.results
    if not results.done:
        commands = "; ".join(command for command in (data.command, data.analysis) if command)
        return f"{NO_RUNS}: {commands}" if commands else ""
    count = f"{len(results.runs)} {'run' if len(results.runs) == 1 else 'runs'}"  # one may fill many cells
    cells = f"{count} in {len(results.done)} of {len(results.cells)} cells"
    parts = [f"ours: scale {results.scale}, {results.trials}, {cells}"]
    if stand_ins := stand_ins_of(results):
        parts.append(f"stand-ins: {stand_ins}")
    return "; ".join(parts)


def stand_ins_of(results: Results) -> str:
    """What stands in for what, in words; empty if nothing does."""
    pairs: dict[str, list[str]] = {}
    for ours, paper in sorted(set().union(*(cell.stand_ins for cell in results.done)) if results.done else set()):
        pairs.setdefault(ours, []).append(dataset_label(paper) if dataset_label(paper) != paper else model_label(paper))
    return ", ".join(f"{ours} for {', '.join(papers)}" for ours, papers in pairs.items())


def panels(
    count: int, columns: int = COLUMNS, width: float = WIDTH, height: float = HEIGHT
) -> tuple[Figure, list[Axes]]:
    """A picture of so many axes in rows."""
    columns = max(1, min(columns, count))
    rows = -(-count // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(max(width * columns, 5.2), height * rows + 1.0), squeeze=False, layout="constrained"
    )
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def titled(figure: Figure, data: ItemData, note: str = "") -> Figure:
    """The picture with its title, the state of its runs, and a note; lines as long as the picture is wide."""
    letters = int(figure.get_figwidth() * 13.2)
    lines = [f"{data.item.id}: {data.item.title}", status_line(data), note]
    text = "\n".join(line for entry in lines if entry for line in textwrap.wrap(entry, letters))
    figure.suptitle(text, fontsize=9)
    return figure


def legend(figure: Figure, axes: Iterable[Axes], columns: int = 4) -> None:
    """One legend below all axes, each entry once."""
    entries: dict[str, Any] = {}
    for part in axes:
        for handle, label in zip(*part.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        fitting = min(columns, max(1, int(figure.get_figwidth() * 13 // (max(map(len, entries)) + 7))))
        figure.legend(
            entries.values(), entries.keys(), loc="outside lower center", ncols=fitting, frameon=False, fontsize=8
        )


def draw_points(axes: Axes, points: Sequence[Point]) -> None:
    """Points with bars of one standard deviation; published ones hollow."""
    for point in points:
        face = "none" if point.published else point.colour
        edge = point.colour if point.published else (point.edge or point.colour)
        axes.errorbar(
            [point.x],
            [point.y],
            yerr=None if point.error is None else [[point.error], [point.error]],
            fmt=point.marker,
            markersize=6,
            markerfacecolor=face,
            markeredgecolor=edge,
            markeredgewidth=1.3 if point.edge or point.published else 0.5,
            ecolor=point.colour,
            elinewidth=1,
            capsize=2,
            linestyle="none",
            alpha=0.75 if point.published else 1,
            label=point.label,
        )


def panel_title(name: str, results: Results) -> str:
    """The paper's network and data, and below what stands in for them."""
    return title_of(name, [cell for cell in results.done if panel_of(cell) == name])


def title_of(name: str, cells: Iterable[Cell]) -> str:
    """`name`, and below the networks and data that stand in for it in these cells."""
    ours = {", ".join(str(cell.actual(key)) for key in ("model", "dataset")) for cell in cells if cell.stand_ins}
    return f"{name}\nours: {' / '.join(sorted(ours))}" if ours else name


def scatter(
    results: Results, points: Sequence[Point], x: str, y: str, order: Sequence[str] = ()
) -> tuple[Figure, dict[str, Axes]]:
    """Points in one panel each for every network and data set."""
    names = [*[name for name in order if any(p.panel == name for p in points)]]
    names += [name for name in dict.fromkeys(p.panel for p in points) if name not in names]
    figure, axes = panels(len(names) or 1)
    found = dict(zip(names, axes))
    for name, part in found.items():
        draw_points(part, [point for point in points if point.panel == name])
        part.set_title(panel_title(name, results))
        part.margins(0.08)
    label_axes(figure, axes, x, y)
    return figure, found


def save(figure: Figure, path: Path) -> list[Path]:
    """Write PNG and SVG files without dates or versions, so that equal pictures are equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = []
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
        file = path.with_name(path.name + suffix)
        figure.savefig(file, dpi=120, metadata=metadata)
        files.append(file)
    plt.close(figure)
    return files


SETTINGS = {
    *(
        "repeats",
        "trials",
        "chosen_number_of_cycles",
        "number_of_cycles_drawn",
        "starting_precision",
        "first_lr_annealing",
    ),
    *("epsilon_default", "alpha_default", "images_averaged", "epoch_shown", "cp_setting", "exception_below"),
    *("deficit_length_step", "deficit_length_max", "epochs_after_deficit", "window_length", "total_epochs_probing"),
    *("recommended_full_precision_share",),
}
"""Published numbers that are no results: the table has them, a picture of them would say nothing."""
WORDS = ("group", "model", "dataset", "method", "schedule", "fw_bits", "bw_bits", "setting")


def published_bars(data: ItemData) -> Figure:
    """What the paper prints, as bars, one panel for each metric: for a picture without runs and without points that were read."""
    rows = [row for row in data.published if row["value"] and row["metric"] not in SETTINGS]
    if not rows:
        return placeholder(data, "The text of the paper prints no result of this picture.")
    varied = [word for word in WORDS if len({row[word] for row in rows}) > 1]
    groups: dict[tuple[str, str], dict[str, list[Published]]] = {}
    for row in rows:
        words = [row[word] for word in varied if row[word]]
        words = [
            word for word in dict.fromkeys(words) if not any(word != other and other in word for other in words)
        ] or words
        label = ", ".join(words) or row["method"] or row["metric"].replace("_", " ")
        bars = groups.setdefault((row["metric"], row["unit"]), {})
        bars.setdefault(label, []).append(row)
    most = max(len(bars) for bars in groups.values())
    figure, axes = panels(len(groups), columns=2, width=5, height=0.7 + 0.32 * most)
    for ((metric, unit), bars), part in zip(groups.items(), axes, strict=True):
        for position, chosen in enumerate(bars.values()):
            _draw_bar(part, position, chosen)
        part.set_yticks(
            range(len(bars)), [textwrap.shorten(label, 46, placeholder=" ...") for label in bars], fontsize=7.5
        )
        part.set_ylim(max(len(bars), 2) - 0.4, -0.6)
        part.margins(x=0.25)
        part.set_title(f"{metric.replace('_', ' ')}{f' ({unit})' if unit else ''}")
    constant = ", ".join(rows[0][word] for word in ("model", "dataset") if word not in varied and rows[0][word])
    return titled(figure, data, f"published numbers only{f': {constant}' if constant else ''}")


def _draw_bar(axes: Axes, position: int, rows: Sequence[Published]) -> None:
    """A published number as a bar from 0, a range from its one end to the other."""
    values = sorted(float(row["corrected_value"] or row["value"]) for row in rows)
    ends = {row["relation"] for row in rows}
    is_range = {"range_min", "range_max"} <= ends
    start = values[0] if is_range else 0.0
    axes.barh(position, values[-1] - start, left=start, color="none", edgecolor="tab:blue", height=0.55)
    axes.plot([0.0, values[-1]], [position] * 2, alpha=0.0)  # 0 is always in sight
    words = {"<=": "at most ", ">": "more than ", "<": "below "}.get(rows[0]["relation"], "")
    text = f"{values[0]:g} to {values[-1]:g}" if is_range else words + (rows[0]["printed"] or rows[0]["value"])
    place = max(values[-1], 0.0)
    axes.annotate(text, (place, position), (4, 0), textcoords="offset points", va="center", fontsize=7.5)


def label_axes(figure: Figure, axes: Sequence[Axes], x: str, y: str) -> None:
    """Name the axes at the left and lower border of a grid of panels; a legend below them stays clear."""
    places = [part.get_subplotspec() for part in axes]
    columns = len({place.colspan.start for place in places if place is not None}) or 1
    for index, part in enumerate(axes):
        if index % columns == 0 and y:
            part.set_ylabel(y, fontsize=8.5)
        if index + columns >= len(axes):
            part.set_xlabel(x, fontsize=8.5)


def commands(data: ItemData) -> str:
    """What trains and analyses the runs of an item at the scale of those that are there."""
    scale = f" scale={data.results.scale}" if data.results.scale not in (None, "paper") else ""
    return "; ".join(command + scale for command in (data.command, data.analysis) if command)


def not_analysed(data: ItemData) -> Figure:
    """A picture that says how the finished runs are analysed; or what to run first, where there are none."""
    if not data.results.done:
        return placeholder(
            data, "This picture needs trained networks and an analysis of them. The paper prints no numbers."
        )
    return placeholder(data, f"The runs are there, their analysis is not yet: {commands(data)}; make collect figures")


def placeholder(data: ItemData, text: str) -> Figure:
    """A picture that says in words why there is nothing to see yet."""
    figure, axes = plt.subplots(figsize=(6, 2.2), layout="constrained")
    axes.axis("off")
    axes.text(0.5, 0.5, textwrap.fill(text, 70), ha="center", va="center", fontsize=9.5, color="0.25")
    return titled(figure, data)
