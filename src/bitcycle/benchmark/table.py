"""Tables of a recorded benchmark, for the terminal and for README.md."""

import json
from pathlib import Path
from typing import Any

from bitcycle.files import markdown_table

FOLDER = Path(__file__).parents[3] / "results" / "benchmark"
WORSE = 0.15
"""Relative increase of a ratio above which `make bench-check` fails."""


def slower(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """A line for each network and variant whose ratio to float32 exceeds the recorded one by more than `WORSE`; both
    arguments are the `networks` of a record. The lower quartile of `found` is compared, because load on the machine slows
    down individual rounds, and a slower program all of them."""
    lines = []
    for name, network in found.items():
        for variant, values in network["variants"].items():
            before = expected[name]["variants"].get(variant, {"ratio": float("inf")})["ratio"]
            if values["ratio_low"] > before * (1 + WORSE):
                lines.append(f"{name}, {variant}: {values['ratio']:.2f} times float32, recorded {before:.2f}")
    return lines


def tables(record: dict[str, Any]) -> str:
    """All tables of the record, with the conditions of the measurement."""
    parts = [conditions(record)]
    parts += [networks_table(record)] if "networks" in record else []
    parts += [quantizers_table(record)] if "quantizers" in record else []
    parts += rates(record)
    parts += [contention_table(record["contention"])] if "contention" in record else []
    return "\n\n".join(parts)


def conditions(record: dict[str, Any]) -> str:
    """Hardware, versions, date, clock and load of the machine."""
    environment, load = record["environment"], record["load_average"]
    instructions = environment.get("instructions", "").replace("avx", "AVX").replace("vnni", "VNNI")
    busy = f"load average {load['before'][0]:.1f} before, {load['after'][0]:.1f} after"
    return (
        f"{environment['processor']}{f', {instructions}' if instructions else ''}, threads: {environment['threads']},"
        f" torch {environment['packages']['torch']},"
        f" {record['date'][:10]}, {record['rounds']} rounds, {record['clock']} time, {busy}."
    )


def networks_table(record: dict[str, Any]) -> str:
    """Table of step times, their ratio to float with quartiles, and peak memory relative to float."""
    variants = list(dict.fromkeys(name for found in record["networks"].values() for name in found["variants"]))
    others = [variant for variant in variants if variant != "float"]
    lines = []
    for name, found in record["networks"].items():
        times = found["variants"]
        cells = [_cell(times[variant]) if variant in times else "" for variant in others]
        reference = f"{times['float']['ms']:.0f} ms, {times['float']['peak_mib']:.0f} MiB"
        lines.append((f"`{name}`, {found['samples']}", reference, *cells))
    return markdown_table(["network, samples per step", "float", *others], lines)


def _cell(values: dict[str, float]) -> str:
    return f"{_ratio(values)}, memory {values['peak_ratio']:.2f}"


def _ratio(values: dict[str, float]) -> str:
    spread = f" ({values['ratio_low']:.2f}-{values['ratio_high']:.2f})" if "ratio_low" in values else ""
    return f"{values['ratio']:.2f}{spread}"


def quantizers_table(record: dict[str, Any]) -> str:
    """Table of quantizer times as multiples of the time to read and write a tensor once."""
    roles = record["quantizers"]["roles"]
    names = list(dict.fromkeys(name for role in roles.values() for name in role["quantizers"]))
    titles = [f"{role}, limit {found['limit_ms']:.2f} ms" for role, found in roles.items()]
    lines = []
    for name in names:
        found = (role["quantizers"].get(name) for role in roles.values())
        cells = ("" if one is None else f"{one['of_limit']:.1f}" for one in found)
        lines.append((f"`{name}`", *cells))
    return markdown_table(["quantizer", *titles], lines)


def contention_table(found: dict[str, Any]) -> str:
    """Table of the time of a step beside other work, relative to one alone."""
    cores, runs = found["cores"], found["runs_at_once"]
    busy = f"beside {cores} busy processes on {cores} cores, times alone (fair share: 2)"
    together = f"{runs} runs at once, times alone (fair share: {runs})"
    alone = "a step alone, wall time with the threads that the command chooses"
    spinning = "with OpenMP's own waiting, times alone (what the command's choice costs is 1 minus this)"
    header = ["network", alone, spinning, busy, together, "cores that other programs used beside the step alone"]
    rows = []
    for name, times in found["networks"].items():
        others = f"{times['others']:.1f}" if "others" in times else ""
        ratios = (_ratio(times[how]) if how in times else "" for how in ("spinning", "busy", "at_once"))
        rows.append((f"`{name}`", f"{times['alone']['ms']:.0f} ms", *ratios, others))
    return markdown_table(header, rows)


def rates(record: dict[str, Any]) -> list[str]:
    """Throughput of images and runs."""
    found = []
    if "images_per_second" in record:
        found.append(f"Data pipeline alone: {record['images_per_second']:,} images/s.")
    if "runs_per_hour" in record:
        hourly = record["runs_per_hour"]["at_a_time"]
        each = ", ".join(f"{rate:.0f} with {number} in parallel" for number, rate in hourly.items())
        found.append(f"Runs of 200 small steps per hour: {each}.")
    if "sweep" in record:
        sweep = record["sweep"]
        found.append(f"A whole sweep of such runs, {sweep['at_a_time']} in parallel: {sweep['an_hour']:.0f} per hour.")
    return found


def recorded() -> str:
    """Tables of all records in results/benchmark, without the quantizers."""
    records = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    if not records:
        return "No benchmark has been recorded."
    shown = ({name: part for name, part in record.items() if name != "quantizers"} for record in records)
    return "\n\n".join(map(tables, shown))
