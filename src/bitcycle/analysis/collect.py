"""`make collect`: one row for each finished run in results/summary/runs.csv, its curve in results/summary/curves, and what was
analysed of it in results/summary/analyses.

Summaries are committed, run folders are not; everything that this repository reports is computed from that file. A row that is
gathered again replaces the older one of the same run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from bitcycle.analysis.curves import CURVES, write_curve
from bitcycle.csv_files import read_csv, write_csv
from bitcycle.measurement.artifacts import ANALYSES, copy_results
from bitcycle.training.run_folder import RunFolder, read_object

SUMMARY = Path("results/summary/runs.csv")
RUNS = Path("results/runs")
PLACES = ("data_root", "results_root")
"""Settings that say where things lie on one machine, and nothing of the run."""
KEY = ("scale", "hash", "seed")
COLUMNS = (
    *("scale", "model", "dataset", "quantizer", "schedule", "q_min", "q_max", "cycles", "seed", "hash", "total_steps"),
    *("metric", "final", "best", "best_step", "mean_of_last", "final_at_q_max", "best_at_q_max"),
    *("gbitops", "gbitops_to_best", "relative_to_static", "energy_j", "latency_s", "hardware", "convention"),
    *("parameters", "train_samples", "seconds", "steps_per_second"),
    *("processor", "threads", "torch", "python", "commit", "finished", "settings"),
)


def collect(root: Path, summary: Path) -> list[dict[str, Any]]:
    """Add the finished runs below `root` to the file `summary`, curves and analyses beside it, and return all its rows."""
    return collect_folders([RunFolder(path.parent) for path in sorted(root.rglob("summary.json"))], summary)


def collect_folders(folders: Iterable[RunFolder], summary: Path) -> list[dict[str, Any]]:
    """The same for some run folders."""
    rows = {tuple(str(row[key]) for key in KEY): row for row in read_summary(summary)}
    for folder in folders:
        if folder.state() != "done" or not folder.config.exists():
            print(f"left out, as it is not finished or not whole: {folder.path}", file=sys.stderr)
        else:
            row = summary_row(folder)
            rows[tuple(str(row[key]) for key in KEY)] = row
            write_curve(folder, summary.parent / CURVES)
            copy_results(folder, row, summary.parent / ANALYSES)
    ordered = sorted(rows.values(), key=lambda row: [str(row[name]) for name in COLUMNS[:9]])
    write_csv(summary, COLUMNS, ordered)
    return ordered


def read_summary(summary: Path) -> list[dict[str, Any]]:
    """The rows of a summary file, as text; none if there is no file."""
    return list(read_csv(summary, missing_ok=True))


def summary_row(folder: RunFolder) -> dict[str, Any]:
    """One finished run as a row of `COLUMNS`."""
    summary, environment = folder.read_summary(), read_object(folder.environment)
    config: Any = OmegaConf.to_container(OmegaConf.load(folder.config))
    schedule, hardware, cost = config["schedule"], config["hardware"], summary["cost"]
    values = {
        **summary,
        "q_min": summary.get("found", {}).get("q_min", schedule.get("q_min")),
        "q_max": schedule.get("q_max"),
        "cycles": schedule.get("cycles"),
        "mean_of_last": summary["mean_of_last"]["mean"],
        "final_at_q_max": summary["at_q_max"]["final"],
        "best_at_q_max": summary["at_q_max"]["best"],
        **{name: cost["total"][name] for name in ("gbitops", "relative_to_static", "energy_j", "latency_s")},
        "gbitops_to_best": cost["to_best"]["gbitops"],
        "hardware": hardware["name"],
        "convention": hardware["convention"],
        "threads": environment.get("threads"),
        "torch": environment.get("packages", {}).get("torch"),
        "python": environment.get("python"),
        "commit": environment.get("commit"),
        "settings": json.dumps({k: v for k, v in config.items() if k not in PLACES}, sort_keys=True),
    }
    return {name: values.get(name) for name in COLUMNS}


def main() -> None:
    """Collect from the folder given on the command line, or from results/runs."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else RUNS
    if len(sys.argv) > 1 and not root.is_dir():
        sys.exit(f"{root}: no such folder. Remedy: give one that contains run folders, such as {RUNS}")
    print(f"{SUMMARY}: {len(collect(root, SUMMARY))} runs")


if __name__ == "__main__":
    main()
