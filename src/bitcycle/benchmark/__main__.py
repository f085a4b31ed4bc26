"""`make bench`: measure time and memory of steps, quantizers, data and runs, print tables, and record them in
results/benchmark."""

import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bitcycle.benchmark.contention import measure_contention
from bitcycle.benchmark.measure import clock_name
from bitcycle.benchmark.networks import measure_networks, networks
from bitcycle.benchmark.table import FOLDER, WORSE, slower, tables
from bitcycle.benchmark.throughput import (
    images_per_second,
    measure_quantizers,
    runs_per_hour,
    sweep_runs_per_hour,
    write,
)
from bitcycle.device import choose_device
from bitcycle.door import parser_of
from bitcycle.files import read_object
from bitcycle.training.environment import describe_environment, instruction_set, keep_freed_memory, processor

PARTS = ("networks", "quantizers", "data", "runs", "contention")
QUICK = ("resnet20", "lstm")
CHECKED = ("resnet8_16", "resnet20", "lstm2_200", "gcn_cora")


def arguments(words: Sequence[str] | None = None) -> Namespace:
    """Parse the command line."""
    parser = parser_of("bench", __doc__)
    parser.add_argument("--networks", nargs="+", choices=list(networks(False)), help="networks; default: all")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure; default: all")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps per variant")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; 1 measures processor time")
    parser.add_argument("--device", default="auto", help="as training.device; default: an accelerator if there is one")
    parser.add_argument(
        "--quick", action="store_true", help=f"{' and '.join(QUICK)}, 3 rounds, no runs; takes a minute"
    )
    where = "JSON file; default: results/benchmark/HARDWARE.json, or none if only a part is measured"
    parser.add_argument("--output", type=Path, help=where)
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"compare {', '.join(CHECKED)} with this hardware's record; fail if a ratio is {100 * WORSE:.0f} %% worse",
    )
    chosen = parser.parse_args(words)
    if chosen.check:
        chosen.parts, chosen.networks, chosen.rounds = ["networks"], chosen.networks or list(CHECKED), 5
    if chosen.quick:
        chosen.rounds, chosen.networks = 3, chosen.networks or list(QUICK)
        chosen.parts = [part for part in chosen.parts if part not in ("runs", "contention")]
    return chosen


def measure(chosen: Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure the chosen parts and return the record; `keep` receives the partial record after each network."""
    device = choose_device(chosen.device)
    torch.set_num_threads(chosen.threads)
    keep_freed_memory()
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {**describe_environment(device), "instructions": instruction_set()},
        "clock": clock_name(device),
        "rounds": chosen.rounds,
        "load_average": dict.fromkeys(("before", "after"), os.getloadavg()),
    }
    if "networks" in chosen.parts:
        record["networks"] = {}
        names = chosen.networks or list(networks(device.type != "cpu"))
        for name, found in measure_networks(names, chosen.rounds, device):
            record["networks"][name] = found
            ratios = (f"{variant} {values['ratio']:.2f}" for variant, values in found["variants"].items())
            print(f"{name}: {', '.join(ratios)}", flush=True)
            keep(record)
    if "quantizers" in chosen.parts:
        record["quantizers"] = measure_quantizers(chosen.rounds, device)
    if "data" in chosen.parts:
        record["images_per_second"] = round(images_per_second(device))
    if "runs" in chosen.parts:
        record["runs_per_hour"] = runs_per_hour((1, 2, 4))
        record["sweep"] = sweep_runs_per_hour()
    if "contention" in chosen.parts and device.type == "cpu":
        record["contention"] = measure_contention()
    record["load_average"]["after"] = os.getloadavg()
    return record


def check(chosen: Namespace, path: Path) -> int:
    """Compare with the record; return 1 if something is slower, 2 if this hardware has no record of these networks."""
    expected: dict[str, Any] = {}
    for record in sorted(path.parent.glob(f"{path.stem}*.json")):
        expected |= read_object(record).get("networks", {})
    chosen.networks = [name for name in chosen.networks if name in expected]
    if not chosen.networks:
        remedy = f"first record this hardware with make bench BENCH=--threads={chosen.threads}"
        print(f"{path} {'has none of these networks' if path.exists() else 'is missing'}: {remedy}")
        return 2
    worse = slower(measure(chosen, lambda record: None)["networks"], expected)
    print("\n".join(worse) or f"no ratio to float32 is {WORSE:.0%} worse than recorded")
    return 1 if worse else 0


def main() -> None:
    """Run the benchmark."""
    chosen = arguments()
    device = choose_device(chosen.device)
    name = f"{processor(device)} {instruction_set() if device.type == 'cpu' else ''} {chosen.threads} threads"
    hardware = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    recorded = FOLDER / f"{hardware}.json"
    if chosen.check:
        sys.exit(check(chosen, recorded))
    partial = chosen.quick or chosen.networks or set(chosen.parts) < set(PARTS)
    path = chosen.output or (None if partial else recorded)

    def keep(record: dict[str, Any]) -> None:
        if path is not None:
            write(path, record)

    record = measure(chosen, keep)
    keep(record)
    where = path or "Not saved, since a part would replace the whole record; use --output FILE to save it."
    print(f"\n{tables(record)}\n\n{where}")


if __name__ == "__main__":
    main()
