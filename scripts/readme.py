"""Write the generated parts of README.md anew: picture and table of schedules, tables of quantizers, speed and first results."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from bitcycle.analysis.collect import SUMMARY, read_summary
from bitcycle.benchmark.table import recorded
from bitcycle.figure.schedules import draw_suite, group_of, relative_cost
from bitcycle.help import first_comment
from bitcycle.quantizer import QUANTIZERS, ROLES, NoQuantizer
from bitcycle.schedule import SUITE, schedule

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
COSTS = ROOT / "results" / "published_costs.md"
PICTURE = ROOT / "results" / "pictures" / "schedules.png"


def schedules_table() -> str:
    """The suite of Better Schedules, cheapest first."""
    bound = {name: schedule(name, q_min=3, q_max=8, cycles=8, total_steps=64_000) for name in SUITE}
    lines = ["| schedule | what it does | group | cost | saving |", "|---|---|---|---|---|"]
    for name in sorted(SUITE, key=lambda name: (relative_cost(bound[name]), name)):
        what = first_comment(ROOT / "conf" / "schedule" / f"{name}.yaml").split(" (group")[0]
        cost = relative_cost(bound[name])
        lines.append(f"| `{name}` | {what} | {group_of(name)} | {cost:.3f} | {100 * (1 - cost):.1f} % |")
    return "\n".join(lines)


def quantizers_table() -> str:
    """Every quantizer with the bits that it offers and the layers that it leaves float."""
    lines = [
        "| quantizer | what it does | weights | activations | gradients | float layers |",
        "|---|---|---|---|---|---|",
    ]
    for name, kind in QUANTIZERS.items():
        if kind is NoQuantizer:
            continue
        options = kind()
        what = first_comment(ROOT / "conf" / "quantizer" / f"{name}.yaml")
        bits = " | ".join(bits_in_words(options.bits(role)) for role in ROLES)
        floats = ", ".join(options.float_rule(["the model's rule"])) or "none"
        lines.append(f"| `{name}` | {what} | {bits} | {floats} |")
    return "\n".join(lines)


def bits_in_words(bits: range) -> str:
    """A range of bits: 2, 2 to 8, or float."""
    if not bits:
        return "float"
    return str(bits[0]) if len(bits) == 1 else f"{bits[0]} to {bits[-1]}"


def results_table() -> str:
    """All recorded runs, each with its scale and hardware; n = 1 for each row."""
    rows = read_summary(ROOT / SUMMARY)
    if not rows:
        return "No runs are recorded yet."
    lines = [
        "| run | scale | steps | final | best | cost of static q_max | GBitOps | on |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        run = f"{row['model']} / {row['dataset']} / {bits_of(row)} / seed {row['seed']}"
        accuracy = f"{float(row['final']):.2f} % | {float(row['best']):.2f} %"
        cost = f"{float(row['relative_to_static']):.3f} | {float(row['gbitops']):.3g}"
        machine = f"{row['processor']}, {row['threads']} threads, torch {row['torch']}"
        lines.append(f"| {run} | {row['scale']} | {row['total_steps']} | {accuracy} | {cost} | {machine} |")
    return "\n".join(lines)


def bits_of(row: dict[str, str]) -> str:
    """Schedule and bits of a recorded run in words."""
    if row["quantizer"] == "none":
        return "float32"
    schedule = json.loads(row["settings"])["schedule"]
    if "target" in schedule:
        return f"{row['schedule']} cp {schedule['target']:g} %"
    bits = row["q_max"] if row["schedule"] == "static" else f"{row['q_min']}-{row['q_max']}"
    return f"{row['schedule']} {bits}"


def costs_line() -> str:
    """The summary of the comparison with published costs, as its report says it."""
    return next(line for line in COSTS.read_text().splitlines() if "printed cost numbers" in line)


GENERATED: dict[str, Callable[[], str]] = {
    "schedules": schedules_table,
    "quantizers": quantizers_table,
    "costs": costs_line,
    "results": results_table,
    "benchmark": recorded,
}


def fill(text: str) -> str:
    """`text` with every generated part made anew."""
    for name, make in GENERATED.items():
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        if not re.search(pattern, text, re.DOTALL):
            sys.exit(f"README.md has no part 'generated: {name}'")
        text = re.sub(pattern, lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", text, flags=re.DOTALL)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    README.write_text(fill(README.read_text()))
    print(f"{README}, {draw_suite(PICTURE)}")
