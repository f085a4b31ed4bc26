"""HLHLp's phases beside the four perplexities of its table 6, for several settings: results/summary/hlhlp_phases.csv."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from bitcycle.picture.layout import legend, panels
from bitcycle.reproduction.figure.style import Drawing

Row = Mapping[str, str]
PAPER, OURS, GUESSING = "black", "#0072b2", "#d55e00"
NAMES = ("float (H)", "2 bits (L)", "8 bits (H)", "2 bits (L)")
"""The phases, as the paper names them; the third is float with quantizers that have no 8 bits."""
TOP = 60.0
"""The largest ratio of perplexities inside a panel; larger ones are written at its upper edge."""
REFERENCE = "measured step ratio, alpha = 0.01, latent weights"
"""The title of the setting without a description."""


def by_setting(rows: Sequence[Row]) -> dict[str, dict[str, list[float]]]:
    """Setting -> seed -> test perplexities at the ends of the phases, in order; settings sorted, the reference first."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in sorted(rows, key=lambda row: (row["setting"], row["seed"], int(row["phase"]))):
        found.setdefault(row["setting"], {}).setdefault(row["seed"], []).append(float(row["test_perplexity"]))
    return found


def phases_beside_the_paper(rows: Sequence[Row], published: Sequence[float]) -> Drawing | None:
    """One panel per setting: the perplexity at the end of each phase relative to that of the float phase, of each seed and of the
    paper, and the level of guessing; None without runs."""
    if not rows:
        return None
    found = by_setting(rows)
    figure, axes = panels(len(found), columns=4, width=3.1, height=2.1)
    guessing = float(rows[0]["chance"])
    for part, (setting, seeds) in zip(axes, found.items()):
        _draw_setting(part, list(seeds.values()), published, guessing)
        part.set_title(_title(setting), fontsize=7.5)
    figure.supylabel("test perplexity / that of the float phase", fontsize=9)
    legend(figure, axes)
    first = rows[0]
    steps = " + ".join(
        row["steps"] for row in rows if row["setting"] == first["setting"] and row["seed"] == first["seed"]
    )
    count = sorted({len(seeds) for seeds in found.values()})
    seeds_in_words = "1 seed" if count == [1] else f"{' or '.join(map(str, count))} seeds"
    figure.suptitle("HLHLp's phases beside the paper's four numbers (table 6), proxy", fontsize=10)
    words = (
        f"Proxy: GRU (or as stated) with {first['hidden']} cells, {first['data']} (vocabulary of {first['vocabulary']}, "
        f"{first['samples']} samples), {steps} steps, {seeds_in_words}; the paper's: GRU with 300 cells, Penn "
        "Treebank, 50 + 30 + 30 + 30 epochs. A panel's title gives its difference from the first panel; ratios above "
        f"{TOP:g} are written."
    )
    return Drawing(figure, words)


def _draw_setting(axes: Axes, seeds: Sequence[Sequence[float]], published: Sequence[float], guessing: float) -> None:
    places = range(len(NAMES))
    for values in seeds:
        relative = [value / values[0] for value in values]
        for place, value in enumerate(relative):
            if value > TOP:
                axes.annotate(f"{value:.2g}", (place, TOP), (4, -3), textcoords="offset points", fontsize=7, color=OURS)
        axes.plot(
            places,
            [min(value, TOP) for value in relative],
            "o-",
            color=OURS,
            markersize=4,
            linewidth=1.2,
            label="ours, proxy (each seed)",
        )
    axes.plot(
        places, [value / published[0] for value in published], "D--", color=PAPER, markersize=4, label="the paper"
    )
    axes.axhline(guessing / seeds[0][0], color=GUESSING, linewidth=1, label="guessing")
    axes.set_yscale("log")
    axes.set_ylim(0.85, 1.1 * TOP)
    axes.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.set_xticks(places, NAMES, fontsize=7)


def _title(setting: str) -> str:
    """The description of a setting in lines of two overrides, without the names of groups."""
    if not setting:
        return REFERENCE.replace(", latent", ",\nlatent")
    words = [
        word.removeprefix("schedule.").removeprefix("quantizer.").removeprefix("training.") for word in setting.split()
    ]
    return "\n".join(" ".join(words[start : start + 2]) for start in range(0, len(words), 2))
