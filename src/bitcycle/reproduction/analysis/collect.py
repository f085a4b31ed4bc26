"""`make collect`: copy finished runs to results/summary: their rows in runs.csv, their curves, and the results of their analyses.

The summary is committed, run folders are not; all reported results are computed from it. A row replaces an older one of the same
run. A curve, SCALE-HASH-SEED.json.gz, holds what figures need besides the row: evaluations, training loss, bits and cost over
steps, phases, the levels of a range test, and the bits chosen by gates. Equal runs give identical files.
"""

import gzip
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bitcycle.door import parser_of
from bitcycle.errors import UNREADABLE, RunError
from bitcycle.files import RUNS, locked, read_csv, read_object, read_records, write_bytes, write_csv
from bitcycle.picture.curve import AT_Q_MAX, curve_of
from bitcycle.reproduction.measurement.artifacts import ANALYSES, IDENTITY, copy_results, run_name
from bitcycle.settings import SettingError
from bitcycle.sweep.table import PLACES
from bitcycle.training.run_folder import RunFolder

SUMMARY = Path("results/summary/runs.csv")
AT_TOP = {f"{name}{AT_Q_MAX}": name for name in ("final", "best")}
COLUMNS = (
    *("scale", "model", "dataset", "quantizer", "schedule", "q_min", "q_max", "cycles", "seed", "hash", "total_steps"),
    *("metric", "unit", "higher_is_better", "final", "best", "best_step", "mean_of_last", *AT_TOP),
    *("gbitops", "gbitops_to_best", "relative_to_static", "energy_j", "latency_s", "hardware", "convention"),
    *("parameters", "train_samples", "remark", "seconds", "steps_per_second"),
    *("processor", "threads", "torch", "python", "commit", "started", "finished", "settings"),
)
CURVES = "curves"
"""Folder of the curves, next to runs.csv."""


def collect(root: Path, summary: Path) -> list[dict[str, str]]:
    """Add the finished runs below `root` to the file `summary`, with curves and analyses next to it; returns all its rows. Raises
    RunError as `collect_folders`."""
    return collect_folders([RunFolder(path.parent) for path in sorted(root.rglob("summary.json"))], summary)


def collect_folders(folders: Iterable[RunFolder], summary: Path) -> list[dict[str, str]]:
    """The same for given run folders. Processes that add to the same file wait for each other. Raises RunError, when all others
    are added, if records of finished runs cannot be read; what was collected of these runs earlier is kept."""
    damaged = []
    with locked(summary):
        rows = {identity(row): row for row in read_csv(summary, missing_ok=True)}
        for folder in folders:
            if folder.state() != "done" or not folder.config.exists():
                print(f"skipping {folder.path}: not finished, or incomplete", file=sys.stderr)
                continue
            try:
                row = summary_row(folder)
                known = rows.get(identity(row), row)
                if row["finished"] < known["finished"]:
                    print(f"skipping {folder.path}: it finished before the recorded run of this name", file=sys.stderr)
                    continue
                write_curve(folder, summary.parent / CURVES)
            except RunError as error:
                damaged.append(str(error))
                continue
            except UNREADABLE as error:  # records that another version wrote, or that the disk refuses
                damaged.append(f"{folder.path}: its records cannot be read ({type(error).__name__}: {error})")
                continue
            rows[identity(row)] = row
            copy_results(folder, row, summary.parent / ANALYSES)
        ordered = sorted(rows.values(), key=lambda row: [row[name] for name in COLUMNS[:9]])
        write_csv(summary, COLUMNS, ordered)
    if damaged:
        number = "1 finished run was" if len(damaged) == 1 else f"{len(damaged)} finished runs were"
        remedy = "where a file cannot be restored, delete the run's folder and run its command again"
        raise RunError("\n  ".join([f"{number} not collected, all others were; {remedy}:", *damaged]))
    return ordered


def identity(row: Mapping[str, str]) -> tuple[str, ...]:
    """Scale, hash and seed of a run, from its row in runs.csv."""
    return tuple(row[name] for name in IDENTITY)


def summary_row(folder: RunFolder, recounted: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The row of a finished run, as it is read from runs.csv; `recounted`: its summary with costs that are counted otherwise."""
    summary, environment = recounted or folder.read_summary(), read_object(folder.environment)
    config = folder.read_settings()
    schedule, hardware, cost = config["schedule"], summary["counting"], summary["cost"]
    values = {
        **summary,
        "q_min": summary.get("found", {}).get("q_min", schedule.get("q_min")),
        **{name: schedule.get(name) for name in ("q_max", "cycles")},
        "mean_of_last": summary["mean_of_last"]["mean"],
        **{column: summary["at_q_max"][name] for column, name in AT_TOP.items()},
        **{name: cost["total"][name] for name in ("gbitops", "relative_to_static", "energy_j", "latency_s")},
        "gbitops_to_best": cost["to_best"]["gbitops"],
        "hardware": hardware["name"],
        "convention": hardware["convention"],
        **{name: environment.get(name) for name in ("threads", "python", "commit", "remark", "started")},
        "torch": environment.get("packages", {}).get("torch"),
        "settings": json.dumps({k: v for k, v in config.items() if k not in PLACES}, sort_keys=True),
    }
    return {name: "" if (value := values.get(name)) is None else str(value) for name in COLUMNS}


def is_accuracy(row: Mapping[str, str]) -> bool:
    """Whether the main metric is a percentage of which more is better, so that 100 is its ceiling: as recorded with the run, or
    by its name for runs from before unit and direction were recorded."""
    if row.get("higher_is_better"):
        return row["unit"] == "%" and row["higher_is_better"] == "True"
    return row.get("metric", "").endswith("accuracy")


# Curves


def curve_name(row: Mapping[str, Any]) -> str:
    """The file name of a run's curve, from its row in runs.csv or its summary."""
    return f"{run_name(row)}.json.gz"


def write_curve(folder: RunFolder, target: Path) -> Path:
    """Write the curve of a finished run to the folder `target`; returns its path. Raises RunError if a record is damaged, or if
    the last evaluation is missing."""
    summary, records = folder.read_summary(), read_records(folder.metrics)
    # a run ends with an evaluation; without it the file was cut, although each of its lines is whole
    if not any(record["kind"] == "evaluation" and record["step"] == summary["total_steps"] for record in records):
        lost = f"the evaluation after the last step, {summary['total_steps']}, is not among them"
        raise RunError(f"{folder.metrics} has {len(records)} whole lines, and {lost}; restore the file")
    path = target / curve_name(summary)
    text = json.dumps(curve_of(records, summary), separators=(",", ":"), sort_keys=True)
    # without time and name in the header, so that equal curves are equal files
    write_bytes(path, gzip.compress(text.encode(), mtime=0))
    return path


def read_curve(folder: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    """Read the curve of a run, given its row in runs.csv; empty if there is none. The blocks of an allocation, which the file has
    in alphabetical order, get that of the network, by their numbers."""
    path = folder / curve_name(row)
    curve = dict(json.loads(gzip.decompress(path.read_bytes()))) if path.exists() else {}
    for step, blocks in curve.get("allocation", {}).items():
        curve["allocation"][step] = {name: blocks[name] for name in sorted(blocks, key=_numbered)}
    return curve


def _numbered(block: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", block)]


def main() -> None:
    """Collect the runs in the folder given on the command line, by default results/runs."""
    parser = parser_of("collect")
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="FOLDER", help=f"folder of the run folders; default: {RUNS}"
    )
    root = parser.parse_args().folder
    if root is not None and not root.is_dir():
        raise SettingError("folder", root, "no such folder", f"give one that contains run folders, such as {RUNS}")
    print(f"{SUMMARY}: {len(collect(root or RUNS, SUMMARY))} runs")


if __name__ == "__main__":
    main()
