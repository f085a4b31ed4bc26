"""The items of HLHLp: tables of four phases, loss surfaces in planes and contours, sharpness, and robustness."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from bitcycle.analysis.claims_hlhlp import ABLATIONS, LEVELS, bits_of, hlhlp_method, levels_of, network_name, planes
from bitcycle.analysis.compare import Comparison
from bitcycle.analysis.items import Published
from bitcycle.analysis.labels import dataset_of, model_of, same
from bitcycle.analysis.landscape import CLEAN, results_of, sharpness
from bitcycle.analysis.results import Cell, Results, Value
from bitcycle.figure.landscape import described, draw_contours, draw_plane, first_of
from bitcycle.figure.schematic import algorithm, data_sets
from bitcycle.figure.style import COLOURS, ItemData, legend, not_analysed, panels, published_bars, titled
from bitcycle.measurement.artifacts import Result


def surface(data: ItemData) -> Figure:
    """Figure 1: test error in the planes through three networks."""
    found = planes(data.results, "test")
    if not found:
        return not_analysed(data)
    figure = plt.figure(figsize=(5.2 * len(found), 5.4), layout="constrained")
    _draw_planes(figure, found, "error_percent", "test error (%)")
    return titled(figure, data, f"{described(found[0][0])}; quantized weights as plain numbers")


def flatness(data: ItemData) -> Figure:
    """Appendix H: training loss in the same planes, epsilon-sharpness, and filter-normalised contours."""
    found, bars = planes(data.results, "train"), _sharpness_of(data.results)
    maps = [
        (name, shown)
        for name, cell, phase in networks(data.results)
        if (shown := first_of(results_of(cell, "surface", phase)))
    ]
    if not found and not bars and not maps:
        return not_analysed(data)
    rows = [bool(found), bool(maps), bool(bars)]
    heights = [height for height, there in zip((4.6, 2.9, 2.0), rows) if there]
    figure = plt.figure(figsize=(10.4, sum(heights) + 0.9), layout="constrained")
    parts = iter(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if found:
        _draw_planes(next(parts), found, "loss", "training loss")
    if maps:
        _draw_maps(next(parts), maps)
    if bars:
        _draw_bars(next(parts).subplots(), bars)
    words = [f"planes: {described(found[0][0])}"] if found else []
    words += [f"contours: {described(maps[0][1])}"] if maps else []
    return titled(figure, data, "; ".join(["the appendix is not part of the paper's text", *words]))


def networks(results: Results) -> list[tuple[str, Cell, int | None]]:
    """The networks of figure 1 and appendix H: name, cell, and the phase at whose end it stood."""
    phases: dict[str, tuple[int | None, ...]] = {"fine-tuning": (1, None), "HLHLp": (2, None)}
    every = [(cell, phase) for cell in results.done for phase in phases.get(hlhlp_method(cell), ())]
    return [(network_name(cell, phase), cell, phase) for cell, phase in every]


def _draw_planes(
    figure: Figure | SubFigure, found: Sequence[tuple[Result, list[str]]], column: str, label: str
) -> None:
    for index, (plane, names) in enumerate(found):
        axes = figure.add_subplot(1, len(found), index + 1, projection="3d")
        draw_plane(figure, axes, plane, names, column, label)
        axes.set_title(f"({'ab'[index % 2]}) {', '.join(names)}")


def _draw_maps(figure: Figure | SubFigure, maps: Sequence[tuple[str, Result]]) -> None:
    for axes, (name, shown) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
        draw_contours(axes, shown)
        axes.set_title(f"{name}, training loss")


def _sharpness_of(results: Results) -> dict[str, dict[str, Value]]:
    return {name: found for name, cell, phase in networks(results) if (found := sharpness(cell, phase))}


def _draw_bars(axes: Axes, bars: Mapping[str, Mapping[str, Value]]) -> None:
    """Epsilon-sharpness of each network, one bar for each size of the box."""
    sizes = sorted({size for found in bars.values() for size in found}, key=float)
    for index, size in enumerate(sizes):
        places = [place + 0.38 * (index - (len(sizes) - 1) / 2) for place in range(len(bars))]
        values = [found[size].mean if size in found else math.nan for found in bars.values()]
        drawn = axes.barh(places, values, height=0.36, label=f"eps = {float(size):g}", color=f"C{index}")
        axes.bar_label(drawn, fmt="%.3g", fontsize=7, padding=2)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("epsilon-sharpness (%), training loss")
    axes.legend(frameon=False, fontsize=7.5)


def robustness_bars(
    kind: str, column: str, label: str, named: Mapping[int | None, str]
) -> Callable[[ItemData], Figure]:
    """Appendices D and F: an error for each corruption or noise, of each network.

    Args:
        kind: corruption or noise.
        column: of the error.
        label: of its axis.
        named: phase at whose end a network of HLHLp stood -> its name.
    """

    def draw(data: ItemData) -> Figure:
        found: dict[str, dict[str, list[float]]] = {}
        for cell in data.results.done:
            for phase, name in named.items():
                words = name if hlhlp_method(cell) == "HLHLp" else hlhlp_method(cell)
                for result in results_of(cell, kind, phase):
                    groups = found.setdefault(words, {})
                    for row in result.rows:
                        groups.setdefault(row[kind], []).append(float(row[column]))
        if not found:
            return not_analysed(data) if data.results.done else published_bars(data)
        figure, (axes,) = panels(1, width=8, height=3.2)
        _draw_groups(axes, found)
        axes.set_ylabel(label)
        legend(figure, [axes])
        numbers = [
            f"{row['group'] or row['method']} {row['metric'].replace('_', ' ')} {row['printed']}"
            for row in data.published
        ]
        words = "mean over severities, ratios and seeds; published: "
        return titled(figure, data, words + "; ".join(numbers))

    return draw


def _draw_groups(axes: Axes, found: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    groups = list(dict.fromkeys(name for values in found.values() for name in values))
    width = 0.8 / len(found)
    for index, (words, values) in enumerate(found.items()):
        means = {name: statistics.fmean(numbers) for name, numbers in values.items()}
        changed = [value for name, value in means.items() if name != CLEAN]
        label = f"{words} (mean of all but none: {statistics.fmean(changed):.1f})" if changed else words
        places = [groups.index(name) + width * (index - (len(found) - 1) / 2) for name in means]
        axes.bar(places, list(means.values()), width=0.9 * width, label=label, color=f"C{index}")
    axes.set_xticks(range(len(groups)), [name.replace("_", "\n") for name in groups], fontsize=7.5)


def same_cell(row: Published, cell: Cell) -> bool:
    """Network, data and method agree, and the levels of the weights where the row names them."""
    if row["method"] not in ("float", "fine-tuning", "HLHLp") or row["metric"] == "residual_degradation_ratio":
        return False
    named = next((levels for levels in LEVELS if levels in (row["group"] + row["setting"]).lower()), "")
    return (
        same(row["model"], model_of(cell))
        and same(row["dataset"], dataset_of(cell))
        and row["method"] == hlhlp_method(cell)
        and (not named or "float" in row["method"] or named == levels_of(cell))
    )


def same_speech(row: Published, cell: Cell) -> bool:
    """Table 5: our recordings stand in for WSJ alone; nothing stands in for Aurora-4."""
    return row["dataset"] == "WSJ test" and row["method"] == hlhlp_method(cell)


def same_ablation(row: Published, cell: Cell) -> bool:
    """Table 6: a step of a variant that ends one of its phases."""
    return ablation_phase(row) is not None and bits_of(cell) == ABLATIONS[row["group"][1]]


def ablation_phase(row: Published) -> int | None:
    """Table 6: the phase that ends with a step. In D the first phase is as long as three of the four steps.

    >>> [ablation_phase({"group": f"({variant}) step {step}"}) for variant in "AD" for step in (1, 3, 4)]
    [1, 3, 4, None, 1, 2]
    """
    found = re.match(r"\((\w)\) step (\d)", row["group"])
    phase = int(found[2]) - 4 + len(ABLATIONS[found[1]]) if found else 0
    return phase if phase > 0 else None


def _described(cell: Cell) -> dict[str, str]:
    bits = ", ".join(map(str, bits_of(cell)))
    return {"method": hlhlp_method(cell), "setting": f"bits {bits}, {cell.setting('quantizer', '')}"}


def quantizers(data: ItemData) -> Figure:
    """Appendix E: test perplexity of fine-tuning and HLHLp with each quantizer."""
    if not data.results.done:
        return published_bars(data)
    names = list(dict.fromkeys(model_of(cell) for cell in data.results.done))
    words = list(dict.fromkeys(str(cell.setting("quantizer")) for cell in data.results.done))
    figure, axes = panels(len(names), columns=2, width=4)
    for name, part in zip(names, axes, strict=True):
        for cell in data.results.done:
            value, method = cell.value("final"), hlhlp_method(cell)
            if model_of(cell) == name and value is not None:
                place = words.index(str(cell.setting("quantizer"))) + (0.18 if method == "HLHLp" else -0.18)
                part.errorbar(
                    [place],
                    [value.mean],
                    yerr=[value.std or 0],
                    fmt="o",
                    color=COLOURS[method],
                    capsize=2,
                    label=method,
                )
        part.set_xticks(range(len(words)), words)
        part.set_xlim(-0.5, len(words) - 0.5)
        part.set_title(name)
    axes[0].set_ylabel("test perplexity")
    legend(figure, axes)
    return titled(figure, data, "the appendix is not part of the paper's text")


FIGURES: dict[str, Callable[[ItemData], Figure]] = {
    "fig1": surface,
    "appB": algorithm,
    "appC": data_sets,
    "appD": robustness_bars("corruption", "error_percent", "error (%)", {1: "HL", None: "HLHL"}),
    "appE": quantizers,
    "appF": robustness_bars("noise", "cer_percent", "character error rate (%)", {2: "HLp", None: "HLHLp"}),
    "appH": flatness,
}
COMPARISON = Comparison("final", same_cell, describe=_described)
COMPARISONS = {
    "table5": Comparison("final", same_speech, describe=_described),
    "table6": Comparison("final", same_ablation, describe=_described, phase=ablation_phase),
}
