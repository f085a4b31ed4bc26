"""Collect the pilot runs that a regime was chosen from: `python scripts/pilot.py RUNS [RUNS ...]` adds to
results/summary/pilot.csv.

The training accuracy is the mean over the last 100 steps, with crops and flips; for aborted runs the number of steps is
given.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from bitcycle.files import read_csv, read_object, read_records, write_csv

KEY = ("network", "width", "data", "samples", "steps", "schedule", "seed")
PILOT = Path(__file__).parent.parent / "results" / "summary" / "pilot.csv"


def row_of(folder: Path) -> dict[str, Any] | None:
    """Network, data, length, and accuracy or perplexity of one run; None before its first evaluation."""
    records = read_records(folder / "metrics.jsonl")
    training = [record for record in records if record["kind"] == "train"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    if not evaluations:
        return None
    config: Any = OmegaConf.load(folder / "config.yaml")
    last = training[-2:]
    found = read_object(folder / "summary.json").get("found", {})
    rate = ""
    if config.model.name in ("llama", "lstm", "lstm2"):
        layers = f" of {config.model.layers} layers" * (config.model.name == "llama")
        rate = f"{layers} at rate {config.training.learning_rate.initial:g}"
    return {
        "network": config.model.name + rate,
        "width": config.model.get("width", config.model.get("hidden", 16)),
        "data": config.dataset.name,
        "samples": config.dataset.train_samples,
        "steps": training[-1]["step"] if found else config.training.steps,
        "done": training[-1]["step"],
        "schedule": config.schedule.name,
        "seed": config.seed,
        "training_accuracy": round(sum(record["accuracy"] for record in last) / len(last), 2),
        "test_accuracy": evaluations[-1].get("test_accuracy", ""),
        "test_perplexity": evaluations[-1].get("test_perplexity", ""),
        "found_q_min": found.get("q_min", ""),
    }


def main(roots: list[str]) -> None:
    """Add one row for each run below the roots; it replaces an older row of the same run."""
    known = {tuple(row[name] for name in KEY): row for row in read_csv(PILOT)}
    folders = sorted(path.parent for root in roots for path in Path(root).rglob("metrics.jsonl"))
    found = [{name: str(value) for name, value in row.items()} for folder in folders if (row := row_of(folder))]
    rows = list((known | {tuple(row[name] for name in KEY): row for row in found}).values())
    write_csv(PILOT, list(rows[0]), sorted(rows, key=lambda row: list(row.values())))


if __name__ == "__main__":
    main(sys.argv[1:])
