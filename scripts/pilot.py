"""Gather the runs with which a regime was chosen: `python scripts/pilot.py RUNS [RUNS ...]` writes results/summary/pilot.csv.

The training accuracy is the mean over the last 100 steps, with crops and flips; runs that were given up say how far they came.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

PILOT = Path(__file__).parent.parent / "results" / "summary" / "pilot.csv"


def row_of(folder: Path) -> dict[str, Any] | None:
    """Network, data, length and accuracies of one run; None before its first evaluation."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training = [record for record in records if record["kind"] == "train"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    if not evaluations:
        return None
    config: Any = OmegaConf.load(folder / "config.yaml")
    last = training[-2:]
    return {
        "network": config.model.name,
        "width": config.model.get("width", 16),
        "data": config.dataset.name,
        "images": config.dataset.train_samples,
        "steps": config.training.steps,
        "done": training[-1]["step"],
        "schedule": config.schedule.name,
        "seed": config.seed,
        "training_accuracy": round(sum(record["accuracy"] for record in last) / len(last), 2),
        "test_accuracy": evaluations[-1]["test_accuracy"],
    }


def main(roots: list[str]) -> None:
    """Write one row for each run below the roots."""
    folders = sorted(path.parent for root in roots for path in Path(root).rglob("metrics.jsonl"))
    rows = [row for folder in folders if (row := row_of(folder))]
    with PILOT.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: [str(value) for value in row.values()]))


if __name__ == "__main__":
    main(sys.argv[1:])
