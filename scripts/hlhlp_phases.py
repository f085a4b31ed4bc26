"""Collect runs of HLHLp for a comparison of its settings by the phases' own perplexities: `python scripts/hlhlp_phases.py RUNS
[RUNS ...]` writes results/summary/hlhlp_phases.csv with one row for each phase of every finished run below the folders.

A setting is described by the values in which its runs differ from `REFERENCE`, what HLHLp's settings were before the comparison.
`make readme` draws them beside the four perplexities of the paper's table 6.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from bitcycle.files import read_csv, read_object, read_records, write_csv
from bitcycle.picture.layout import legend, panels, save

RESULTS = Path(__file__).parent.parent / "results"
PHASES = RESULTS / "summary" / "hlhlp_phases.csv"
REFERENCE: dict[str, Any] = {
    "model.name": "gru_hlhlp",
    "quantizer.name": "uniform_l2",
    "quantizer.granularity": "layer",
    "quantizer.update": "stage",
    "quantizer.activation_levels": "l2",
    "schedule.carry": "latent",
    "schedule.alpha": 0.01,
    "schedule.ratio": None,
    "training.clip_norm": 1.0,
}
"""Setting -> its value in the reference; a setting that a quantizer does not have does not count."""


def described(config: Any) -> str:
    """The settings in which a run differs from the reference, as overrides; empty for the reference."""
    chosen = {key: OmegaConf.select(config, key, default="absent") for key in REFERENCE}
    return " ".join(
        f"{key.removesuffix('.name')}={'null' if value is None else f'{value:g}' if isinstance(value, float) else value}"
        for key, value in chosen.items()
        if value not in ("absent", REFERENCE[key])
    )


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """One row for each phase of a finished run; none of an unfinished one."""
    if not (folder / "summary.json").exists():
        return []
    summary, records = read_object(folder / "summary.json"), read_records(folder / "metrics.jsonl")
    config = OmegaConf.load(folder / "config.yaml")
    validation = {r["step"]: r["validation_perplexity"] for r in records if r["kind"] == "evaluation"}
    return [
        {
            "setting": described(config),
            "model": config.model.name,
            "hidden": config.model.hidden,
            "data": config.dataset.name,
            "vocabulary": config.dataset.vocabulary,
            "samples": config.dataset.train_samples,
            "seed": config.seed,
            "phase": phase["phase"],
            "precision": "/".join(map(str, phase["precision"])),
            "steps": phase["steps"],
            "learning_rate": f"{phase['learning_rate']:.4g}",
            "validation_perplexity": round(validation[phase["first_step"] + phase["steps"]], 2),
            "test_perplexity": round(phase["final"], 2),
            "chance": config.dataset.vocabulary,
        }
        for phase in summary["phases"]
    ]


def main(roots: list[str]) -> None:
    """Write the rows of all runs below the roots, sorted by setting, seed and phase."""
    folders = sorted(path.parent for root in roots for path in Path(root).rglob("metrics.jsonl"))
    rows = [row for folder in folders for row in rows_of(folder)]
    if not rows:
        sys.exit(f"no finished run below {' '.join(roots)}: train some first, see results/notes/hlhlp-phases.md")
    rows.sort(key=lambda row: (row["setting"], row["seed"], row["phase"]))
    write_csv(PHASES, list(rows[0]), rows)


# The picture

Row = Mapping[str, str]
PAPER, OURS, GUESSING = "black", "#0072b2", "#d55e00"
NAMES = ("float (H)", "2 bits (L)", "8 bits (H)", "2 bits (L)")
"""The phases, as the paper names them; the third is float with quantizers that have no 8 bits."""
TOP = 60.0
"""The largest ratio of perplexities inside a panel; larger ones are written at its upper edge."""
REFERENCE_TITLE = "measured step ratio, alpha = 0.01, latent weights"
"""The title of the setting without a description."""


def by_setting(rows: Sequence[Row]) -> dict[str, dict[str, list[float]]]:
    """Setting -> seed -> test perplexities at the ends of the phases, in order; settings sorted, the reference first."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in sorted(rows, key=lambda row: (row["setting"], row["seed"], int(row["phase"]))):
        found.setdefault(row["setting"], {}).setdefault(row["seed"], []).append(float(row["test_perplexity"]))
    return found


def phases_beside_the_paper(rows: Sequence[Row], published: Sequence[float]) -> Figure:
    """One panel per setting: the perplexity at the end of each phase relative to that of the float phase, of each seed and of the
    paper, and the level of guessing."""
    found = by_setting(rows)
    figure, axes = panels(len(found), columns=4, width=3.1, height=2.1)
    guessing = float(rows[0]["chance"])
    for part, (setting, seeds) in zip(axes, found.items()):
        _draw_setting(part, list(seeds.values()), published, guessing)
        part.set_title(_title(setting), fontsize=7.5)
    figure.supylabel("test perplexity / that of the float phase", fontsize=9)
    legend(figure, axes)
    figure.suptitle("HLHLp's phases beside the paper's four numbers (table 6), proxy", fontsize=10)
    return figure


def _draw_setting(axes: Axes, seeds: Sequence[Sequence[float]], published: Sequence[float], guessing: float) -> None:
    places = range(len(NAMES))
    for values in seeds:
        relative = [value / values[0] for value in values]
        for place, value in enumerate(relative):
            if value > TOP:
                axes.annotate(f"{value:.2g}", (place, TOP), (4, -3), textcoords="offset points", fontsize=7, color=OURS)
        style = {"color": OURS, "markersize": 4, "linewidth": 1.2, "label": "ours, proxy (each seed)"}
        axes.plot(places, [min(value, TOP) for value in relative], "o-", **style)
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
        return REFERENCE_TITLE.replace(", latent", ",\nlatent")
    words = [
        word.removeprefix("schedule.").removeprefix("quantizer.").removeprefix("training.") for word in setting.split()
    ]
    return "\n".join(" ".join(words[start : start + 2]) for start in range(0, len(words), 2))


def draw_phases() -> Path:
    """Draw the recorded rows beside the paper's table 6, as PNG and SVG files; returns the PNG file."""
    table = read_csv(RESULTS / "published" / "hlhlp_table6.csv")
    published = [float(row["value"]) for row in table if row["group"].startswith("(A)")]
    return save(phases_beside_the_paper(read_csv(PHASES), published), RESULTS / "pictures" / "hlhlp_phases")[0]


if __name__ == "__main__":
    main(sys.argv[1:])
