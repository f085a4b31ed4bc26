"""The board of 4-bit recipes: the gap to float in bits per byte against training cost, and the claims of the recipes' sources.

Baselines of equal cost are static MXFP8 and float with fewer steps. Claims about single ingredients are tested by the rule of all
claims, as a frozen family of their own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from bitcycle.picture.layout import panels
from bitcycle.reproduction.analysis.cells import Cell
from bitcycle.reproduction.analysis.contrast import contrast
from bitcycle.reproduction.analysis.facts import fact
from bitcycle.reproduction.analysis.labels import schedule_of
from bitcycle.reproduction.analysis.metrics import estimate_of
from bitcycle.reproduction.analysis.statistics import Estimate
from bitcycle.reproduction.figure.board import claims_of_board
from bitcycle.reproduction.figure.data import ItemData, cost_against, panels_of
from bitcycle.reproduction.figure.plots import draw_points, label_axes, point
from bitcycle.reproduction.figure.style import Drawing, Style
from bitcycle.reproduction.figure.table import Table, interval, number, signed

STATIC = {("fp8", 8): "FP8", ("mx", 8): "MXFP8", ("mx", 4): "MXFP4", ("nvfp4", 4): "NVFP4"}
BASELINES = ("MXFP8", "float")
"""Arms that are also trained for fewer steps."""
RECIPES = {"nvfp4_pretraining": "NVFP4 recipe", "mxfp4_backward": "MXFP4 recipe"}
INGREDIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "quantizer.float_share": ("float layers", {"nvfp4_pretraining": 0.15}),
    "quantizer.hadamard": ("Hadamard", {"nvfp4_pretraining": ["wgrad"], "mxfp4_backward": ["dgrad", "wgrad"]}),
    "quantizer.square_weights": ("square scales", {"nvfp4_pretraining": True}),
    "quantizer.stochastic": ("stochastic rounding", {"nvfp4_pretraining": True, "mxfp4_backward": True}),
    "quantizer.stochastic_operands": ("stochastic operands", {"mxfp4_backward": True}),
    "quantizer.headroom": ("headroom", {"mxfp4_backward": True}),
}
"""Option -> its name, and its value in each recipe that has it. An arm without several has the name of the first."""
SHARE = 0.18
"""Share of the run after the late switch of the recipe."""
COLOURS = {"nvfp4_pretraining": "#0072b2", "mxfp4_backward": "#d55e00", "RTH": "#009e73", "CR": "#009e73"}
"""Of a cyclic schedule or of a recipe; static formats are grey."""
LINEAR = 0.1
"""Gap in bits per byte beyond which the axis is logarithmic."""
TICKS = (-0.05, 0, 0.05, 0.1, 0.2, 0.5)
PUBLISHED_GAPS = [
    {
        "source": "arXiv 2509.25149, abstract",
        "model": "12-billion-parameter model, 10 trillion tokens",
        "published": "NVFP4 recipe against FP8: MMLU-pro 62.58 % and 62.62 %",
    },
    {
        "source": "arXiv 2502.20586, abstract",
        "model": "GPT models of up to 6.7 billion parameters",
        "published": "MXFP4 recipe against BF16: near-lossless",
    },
]
"""What the sources report: of other models, at another scale and in another metric."""


class Arm(NamedTuple):
    """An arm of the board."""

    name: str
    cell: Cell
    cost: float  # bit operations relative to float
    value: Estimate  # bits per byte
    gap: Estimate | None  # minus float, paired by seed; None for float itself


def arm_name(cell: Cell, longest: int) -> str:
    """An arm in words; `longest` is the number of steps of a full run."""
    quantizer, schedule = str(cell.setting("quantizer")), schedule_of(cell)
    if quantizer not in RECIPES:
        steps = fact(cell, "steps")
        name = "float" if quantizer == "none" else STATIC[quantizer, int(cell.setting("schedule.q_max"))]
        return name if steps == longest else f"{name}, {100 * steps / longest:.0f} % of the steps"
    if schedule in ("RTH", "CR"):
        return f"{schedule} over formats" + (", gradients too" if cell.setting("schedule.gradient_formats") else "")
    missing = [
        name
        for option, (name, values) in INGREDIENTS.items()
        if quantizer in values and cell.setting(option) != values[quantizer]
    ]
    words = RECIPES[quantizer] + (f" without {missing[0]}" if missing else "")
    if schedule == "static":
        return f"{words} without late switch"
    share = float(cell.setting("schedule.share", SHARE)) if schedule == "late_switch" else SHARE
    return words if share == SHARE else f"{words}, last {100 * share:.0f} % float"


def arms_of(data: ItemData) -> list[Arm]:
    """All arms with runs, cheapest first; empty without runs of float."""
    cells = [cell for panel in panels_of(data) for cell in panel.cells]
    of_float = [cell for cell in cells if cell.runs and cell.setting("quantizer") == "none"]
    if not of_float:
        return []
    base = max(of_float, key=lambda cell: fact(cell, "steps"))
    column, longest, found = data.spec.column, fact(base, "steps"), []
    for cell in cells:
        cost, value = cost_against(cell, base), estimate_of(cell, column)
        if cost is not None and value is not None:
            gap = None if cell is base else contrast([cell], [base], (), (column, column)).estimate(data.pool)
            found.append(Arm(arm_name(cell, longest), cell, cost, value, gap))
    return sorted(found, key=lambda arm: (arm.cost, arm.name))


def colour_of(arm: Arm) -> str:
    """The colour of an arm's cyclic schedule or recipe."""
    return COLOURS.get(schedule_of(arm.cell), COLOURS.get(str(arm.cell.setting("quantizer")), "0.35"))


def height(arm: Arm) -> float:
    """The mean gap of an arm to float."""
    return arm.gap.mean if arm.gap else 0.0


def draw_rows(axes: Axes, gaps: Sequence[tuple[Arm, Estimate]]) -> None:
    """A row for each arm, cheapest first: its name, its cost relative to float, and its gap."""
    for row, (arm, gap) in enumerate(gaps):
        low, high = gap.interval() or (gap.mean, gap.mean)
        style: dict[str, Any] = {"color": colour_of(arm), "markersize": 5.5, "elinewidth": 1, "capsize": 2}
        filled = colour_of(arm) if gap.interval() else "white"
        axes.errorbar(
            gap.mean, row, xerr=[[gap.mean - low], [high - gap.mean]], fmt="o", markerfacecolor=filled, **style
        )
    axes.set_yticks(range(len(gaps)), [f"{arm.name}   {arm.cost:.2f}" for arm, _ in gaps], fontsize=7)
    for label, (arm, _) in zip(axes.get_yticklabels(), gaps, strict=True):
        label.set_color(colour_of(arm))
    axes.invert_yaxis()
    axes.set_xscale("symlog", linthresh=LINEAR)
    axes.set_xticks(TICKS, map(str, TICKS))
    axes.axvline(0, color="black", linewidth=1)


def draw_recipes(data: ItemData) -> Drawing | None:
    """Draw the gap of every arm to float against its cost, with the baselines of equal cost, and again as named rows."""
    arms = arms_of(data)
    gaps = [(arm, arm.gap) for arm in arms if arm.gap]
    if not gaps:
        return None
    figure, (left, right) = panels(2, width=5.6, height=5.0)
    for arm, gap in gaps:
        draw_points(left, Style("", colour_of(arm)), [point(arm.cost, gap)])
    for name in BASELINES:
        curve = [(arm.cost, height(arm)) for arm in arms if arm.name.startswith(name)]
        left.plot(*zip(*curve), color="0.35", linestyle="--", linewidth=1)
    left.axhline(0, color="black", linewidth=1)
    left.set_yscale("symlog", linthresh=LINEAR)
    left.set_yticks(TICKS, map(str, TICKS))
    draw_rows(right, gaps)
    cost, gap_name = "bit operations of training relative to float", "bits per byte above float"
    label_axes(left, f"{panels_of(data)[0].name}, {data.results.scale} scale: a proxy", cost, gap_name, 70)
    label_axes(right, "the same by name, with the cost relative to float", gap_name, columns=70)
    return Drawing(
        figure,
        "Gap to float on the test text, paired by seed, with 95 % intervals (hollow: one seed, or no"
        f" known deviation); logarithmic beyond {LINEAR}. Grey: static formats; blue: NVFP4 recipe; orange: MXFP4 recipe; green:"
        " cyclic schedules. Dashed: static MXFP8 and float with fewer steps, the baselines of about equal cost, joined by a line."
        f" {data.results.trials}.",
    )


def tables(data: ItemData) -> list[Table]:
    """The arms, the claims of the recipes' sources, and what the sources report; empty if there are no runs."""
    arms = arms_of(data)
    if not arms:
        return []
    rows = [
        {
            "arm": arm.name,
            "scale": data.results.scale or "",
            "steps": f"{fact(arm.cell, 'steps'):,}",
            "bits per byte": number(arm.value.mean),
            "n": str(arm.value.n),
            "gap to float": signed(arm.gap.mean if arm.gap else None),
            "95 % interval": interval(arm.gap, signed),
            "cost relative to float": number(arm.cost),
        }
        for arm in arms
    ]
    return [
        Table("Arms, cheapest first", rows),
        *claims_of_board(data, "with minus without, bits per byte"),
        Table("Published, of other models at another scale, not comparable with the numbers above", PUBLISHED_GAPS),
    ]
