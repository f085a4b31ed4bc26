"""Collect runs of HLHLp for a comparison of its settings by the phases' own perplexities: `python scripts/hlhlp_phases.py RUNS
[RUNS ...]` writes results/summary/hlhlp_phases.csv with one row for each phase of every finished run below the folders.

A setting is described by the values in which its runs differ from `REFERENCE`, what HLHLp's settings were before the comparison.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from bitcycle.files import read_object, read_records, write_csv

PHASES = Path(__file__).parent.parent / "results" / "summary" / "hlhlp_phases.csv"
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


if __name__ == "__main__":
    main(sys.argv[1:])
