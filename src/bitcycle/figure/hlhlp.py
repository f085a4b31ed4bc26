"""The items of HLHLp: tables of four phases, and pictures of loss surfaces that need an analysis which is not here yet."""

from __future__ import annotations

import re
from collections.abc import Callable

from matplotlib.figure import Figure

from bitcycle.analysis.claims_hlhlp import ABLATIONS, LEVELS, bits_of, hlhlp_method, levels_of
from bitcycle.analysis.compare import Comparison
from bitcycle.analysis.items import Published
from bitcycle.analysis.labels import dataset_of, model_of, same
from bitcycle.analysis.results import Cell
from bitcycle.figure.schematic import algorithm, data_sets
from bitcycle.figure.style import COLOURS, ItemData, legend, panels, placeholder, published_bars, titled

SURFACE = "needs test error or loss around trained networks, which this repository does not measure yet"


def surface(data: ItemData) -> Figure:
    """Figure 1 and appendix H: surfaces around the minima."""
    return placeholder(data, SURFACE)


def printed(data: ItemData) -> Figure:
    """What the text says of an appendix that is not part of it."""
    return published_bars(data)


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
    """Table 6: the last step of a variant."""
    found = re.match(r"\((\w)\) step 4", row["group"])
    return found is not None and bits_of(cell) == ABLATIONS[found[1]]


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
        part.set_title(name)
    axes[0].set_ylabel("test perplexity")
    legend(figure, axes)
    return titled(figure, data, "the appendix is not part of the paper's text")


FIGURES: dict[str, Callable[[ItemData], Figure]] = {
    "fig1": surface,
    "appB": algorithm,
    "appC": data_sets,
    "appD": printed,
    "appE": quantizers,
    "appF": printed,
    "appH": surface,
}
COMPARISON = Comparison("final", same_cell, describe=_described)
COMPARISONS = {
    "table5": Comparison("final", same_speech, describe=_described),
    "table6": Comparison("final", same_ablation, describe=_described),
}
