"""Write the generated parts of README.md, docs and notes: schedules, quantizers, speed, results, verdicts, deviations."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from accelerator_table import accelerator_table, hardware_table
from bitcycle.benchmark.table import recorded
from bitcycle.files import markdown_table, read_csv, read_json
from bitcycle.hardware import Operation, ProductShape, TensorCore, Workload
from bitcycle.hardware.latency import RATES
from bitcycle.precision import Precision
from bitcycle.quantizer import QUANTIZERS, ROLES, NoQuantizer, QuantizerOptions, with_formats
from bitcycle.quantizer.base import bits_in_words
from bitcycle.quantizer.block import SCALE_BITS
from bitcycle.quantizer.mx import BLOCK, FORMATS
from bitcycle.reproduction.analysis.cells import read_runs
from bitcycle.reproduction.analysis.claim_functions import relative_cost
from bitcycle.reproduction.analysis.collect import SUMMARY
from bitcycle.reproduction.analysis.labels import savings_group
from bitcycle.schedule import SCHEDULES, SUITE, Static, schedule
from board import board, board_list, fewer_bits_table, gains_table, recipes_board
from claim_tables import (
    claims_table,
    decided_list,
    excluded_list,
    history_list,
    judged_anew,
    untested_table,
    verdicts_table,
    withdrawn_line,
)
from deviations import spread_table
from evaluation_error import evaluation_table
from experiments import EXPERIMENTS, experiment, mean_in_words
from gpu_steps import gpu_steps_table
from hlhlp_phases import by_setting, draw_phases
from hours import hours_table
from pictures import draw_formats, draw_suite, values_of
from support_table import support_table

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
COSTS = ROOT / "results" / "published_costs.md"
SHOWN = ("float32", "static 8", "CR 3-8", "RTH 3-8")
"""Settings in the table of results, named as by `bits_of`."""
STEP_GOAL = 1.6
"""Largest time of a step of a 4-bit recipe relative to float32 that we aim at."""
DOCTOR = ROOT / "results" / "doctor.json"
GRIDS = ROOT / "docs" / "pictures" / "formats.png"
PICTURE = ROOT / "results" / "pictures" / "schedules.png"


def schedules_table() -> str:
    """The ten schedules of Better Schedules, cheapest first."""
    bound = {name: schedule(name, q_min=3, q_max=8, cycles=8, total_steps=64_000) for name in SUITE}
    lines = []
    for name in sorted(SUITE, key=lambda name: (relative_cost(bound[name]), name)):
        what = SCHEDULES[name].summary.split(" (group")[0]
        cost = relative_cost(bound[name])
        lines.append((f"`{name}`", what, savings_group(name), f"{cost:.3f}", f"{100 * (1 - cost):.1f} %"))
    return markdown_table(("schedule", "description", "group", "cost", "saving"), lines)


def quantizers_table() -> str:
    """Every quantizer with its supported bits and float layers."""
    lines = []
    for name, preset in QUANTIZERS.items():
        if preset.kind is NoQuantizer:
            continue
        options = preset()
        bits = [bits_in_words(offered) if (offered := options.bits(role)) else "float" for role in ROLES]
        floats = ", ".join(options.float_rule(["the model's rule"])) or "none"
        lines.append((f"`{name}`", preset.summary, *bits, floats))
    titles = ("quantizer", "description", "weights", "activations", "gradients", "float layers")
    return markdown_table(titles, lines)


def formats_table() -> str:
    """Every MX element: bits including its share of the scale, smallest and largest values, and number of values."""
    lines = []
    for name, element in FORMATS.items():
        values = values_of(element)
        bits = element.bits + SCALE_BITS / BLOCK
        lines.append((f"`{name}`", f"{bits:g}", f"{values[1]:.3g}", f"{values[-1]:g}", 2 * len(values) - 1))
    titles = ("format", "bits, including its share of the scale", "smallest", "largest", "values")
    return markdown_table(titles, lines)


def format_costs_table() -> str:
    """Costs between mxfp4 and mxfp8 in percent of static mxfp8, for a fully quantized network."""
    devices = {device: TensorCore(device=device) for device in RATES}
    rows = {"static mxfp4": Static(q_max=4), "static mxfp4, gradients mxfp8": Static(q_max=4, gradient=8)}
    rows["static mxfp6, gradients mxfp8"] = Static(q_max=6, gradient=8)
    rows |= {name: SCHEDULES[name](q_min=4) for name in SUITE}
    rows |= {f"{name}, gradients too": SCHEDULES[name](q_min=4, gradient_min=4) for name in ("RTH", "CR")}
    levels = ["nvfp4", "mxfp6", "mxfp8"]
    rows["late_switch from nvfp4 to mxfp8"] = SCHEDULES["late_switch"](formats=["nvfp4", "mxfp8"])
    for name in ("RTH", "CR"):
        rows[f"{name} over {', '.join(levels)}, gradients too"] = SCHEDULES[name](
            formats=levels, gradient_formats=levels
        )
    rows["mxfp4_backward"] = SCHEDULES["mxfp4_backward"]()
    lines = []
    for title, options in rows.items():
        bound = options.bind(64_000)
        quantizer = with_formats(QUANTIZERS["mxfp4_backward" if title == "mxfp4_backward" else "mx"](), bound)
        workload = one_product(quantizer)
        costs = [device.cost(workload, bound.histogram, EIGHT) for device in devices.values()]
        parts = [costs[0].relative_to_static, *(cost.latency_relative_to_static or 0 for cost in costs)]
        lines.append((title, *(f"{100 * part:.0f}" for part in parts)))
    return markdown_table(["schedule", "bit operations", *devices], lines)


EIGHT = Precision(8, 8, 8)


def one_product(options: QuantizerOptions) -> Workload:
    """A network with a single quantized product and all three passes."""
    operation = Operation(
        *("product", "linear", 1, ProductShape(1, 1, 1), 1, 1, 1, 1, True, None, True),
        storage=tuple(options.storage_bits(role) for role in ROLES),
        backward_at_gradient_bits=getattr(options, "backward_bits", "forward") == "gradient",
    )
    return Workload((operation,))


def results_table() -> str:
    """Recorded runs by data, network and length: mean and standard deviation over seeds of four settings, and run counts."""
    rows = read_csv(ROOT / SUMMARY, missing_ok=True)
    if not rows:
        return "No runs are recorded yet."
    groups: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for row, run in zip(rows, read_runs(rows, ROOT / SUMMARY)):
        length = f"{run.group.steps} of {run.group.batch}, {run.setting('training.learning_rate.initial'):g}"
        groups[f"{run.group.data}, {run.group.model}", run.group.scale, length, run.group.metric].append(row)
    titles = ("data, network", "scale", "steps, batch, learning rate", "metric", *SHOWN, "settings", "runs")
    lines, others = [], 0
    for name, group in groups.items():
        cells = [finals_of([row for row in group if bits_of(row) == shown]) for shown in SHOWN]
        if any(cells):
            lines.append((*name, *cells, len({row["hash"] for row in group}), len(group)))
        else:
            others += len(group)
    machines = sorted({f"{row['processor']}, threads: {row['threads']}, torch {row['torch']}" for row in rows})
    more = f" {others} further runs have lengths at which none of the four settings was run." if others else ""
    note = f"Measured on {'; '.join(machines)}. A range covers several settings of that name.{more}"
    return f"{markdown_table(titles, lines)}\n\n{note}"


def finals_of(rows: Sequence[Mapping[str, str]]) -> str:
    """Mean, standard deviation and n of the last evaluations of one setting; for several settings, the range of means."""
    seeds: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        seeds[row["hash"]].append(float(row["final"]))
    means = [statistics.fmean(finals) for finals in seeds.values()]
    if len(means) > 1:
        return f"{min(means):.2f} to {max(means):.2f}"
    for finals in seeds.values():
        return mean_in_words(finals)
    return ""


def bits_of(row: dict[str, str]) -> str:
    """Schedule and bits of a recorded run in words."""
    if row["quantizer"] == "none":
        return "float32"
    schedule = json.loads(row["settings"])["schedule"]
    if "target" in schedule:
        return f"{row['schedule']} cp {schedule['target']:g} %"
    bits = row["q_max"] if row["schedule"] == "static" else f"{row['q_min']}-{row['q_max']}"
    quantizer = "" if row["quantizer"] == "sbm" else f"{row['quantizer']} "
    bits += f"/{schedule['gradient']}" if schedule.get("gradient") not in (None, 8) else ""
    cycles = "" if schedule.get("cycles", 8) == 8 else f", {schedule['cycles']} cycles"
    return f"{quantizer}{row['schedule']} {bits}{cycles}"


def costs_line() -> str:
    """The summary line of the report on published costs."""
    return next(line for line in COSTS.read_text().splitlines() if "printed cost numbers" in line)


def deviations() -> str:
    """Standard deviation between seeds and detectable differences for all recorded runs."""
    return spread_table(read_runs(read_csv(ROOT / SUMMARY, missing_ok=True), ROOT / SUMMARY))


def recipe_times() -> str:
    """The time of a step of each format and recipe relative to float32, and whether it meets the goal."""
    lines = []
    for path in sorted((ROOT / "results" / "benchmark").glob("*.json")):
        record = read_json(path)
        for variant, times in record.get("networks", {}).get("llama", {"variants": {}})["variants"].items():
            if variant != "float":
                met = "met" if times["ratio"] <= STEP_GOAL else "missed"
                lines.append((record["environment"]["processor"], variant, f"{times['ratio']:.2f}", met))
    return markdown_table(
        ("processor, one thread", "formats", "step relative to float32", f"goal of {STEP_GOAL}"), lines
    )


def pilot_table() -> str:
    """The pilot runs used to choose the regime."""
    titles = (
        *("network", "images, or pieces of 35 words", "steps", "schedule, seed"),
        *("training accuracy", "test accuracy or perplexity"),
    )
    lines = []
    for row in read_csv((ROOT / SUMMARY).with_name("pilot.csv")):
        steps = row["steps"] if row["done"] == row["steps"] else f"stopped at {row['done']} of {row['steps']}"
        network = f"{row['network']}, width {row['width']}"
        run = f"{row['schedule']}, {row['seed']}" + (f": finds {row['found_q_min']} bits" if row["found_q_min"] else "")
        test = row["test_accuracy"] or f"perplexity {float(row['test_perplexity']):.2f}"
        lines.append((network, row["samples"].replace("None", "all"), steps, run, row["training_accuracy"], test))
    return markdown_table(titles, lines)


def fidelity_table() -> str:
    """Divergence of our training from that of the released code."""
    titles = (
        *("network and method", "released code", "steps"),
        *("largest difference in loss", "in weights", "losses equal for"),
    )
    lines = []
    for row in read_csv((ROOT / SUMMARY).with_name("fidelity.csv")):
        code = f"{row['repository']} at {row['commit']}"
        differences = [f"{float(row[name]):.1e}" for name in ("loss_difference", "weight_difference")]
        lines.append((row["what"], code, row["steps"], *differences, f"{row['equal_until']} steps"))
    return markdown_table(titles, lines)


def fuzz_table() -> str:
    """Runs that `make fuzz` killed and resumed, by task, schedule and quantizer."""
    rows = read_csv((ROOT / SUMMARY).with_name("fuzz.csv"))
    tables = []
    for group in ("task", "schedule", "quantizer"):
        lines = []
        for name in [*sorted({row[group] for row in rows}), "all"]:
            found = [row for row in rows if name in (row[group], "all")]
            kills, resumed = (sum(int(row[key]) for row in found) for key in ("kills", "resumed"))
            unequal = sum(row["outcome"] != "equal" for row in found)
            lines.append((name, len(found), kills, resumed, unequal))
        tables.append(markdown_table((group, "runs", "kills", "with a checkpoint", "unequal"), lines))
    return "\n\n".join(tables)


def null_families_line() -> str:
    """False decisions in simulated families without any effect."""
    (row,) = read_csv((ROOT / SUMMARY).with_name("null_families.csv"))
    return (
        f"Of {int(row['families']):,} families of {row['claims']} claims with {row['seeds']} seeds and {row['looks']} looks, "
        f"{row['deciding']} decided something: {row['percent']} % (95 % interval {row['low']} to {row['high']} %)."
    )


def hlhlp_phases_table() -> str:
    """Perplexities of HLHLp's phases by setting, from the runs of hlhlp-phases.md."""
    titles = ("network, setting", "seeds", "rate of phase 2, 3", "float", "2 bits", "8 bits", "2 bits", "as in table 6")
    rows = read_csv((ROOT / SUMMARY).with_name("hlhlp_phases.csv"))
    lines = []
    for setting, seeds in by_setting(rows).items():
        first, second, third, fourth = (statistics.fmean(values) for values in zip(*seeds.values()))
        held = [second > first, third < second, fourth > third, fourth < second, third < first]
        rates = {row["phase"]: row["learning_rate"] for row in rows if row["setting"] == setting}
        values = (f"{value:.1f}" for value in (first, second, third, fourth))
        lines.append(
            (setting or "as before", len(seeds), f"{rates['2']}, {rates['3']}", *values, f"{sum(held)} of {len(held)}")
        )
    return markdown_table(titles, lines)


def doctor_table() -> str:
    """What `bitcycle doctor` found on one machine."""
    record = read_json(DOCTOR)
    command = " ".join(f"{key}={value}" for key, value in record["settings"].items())
    rows = [(each["state"], each["topic"], each["text"] + _remedy(each["remedy"])) for each in record["findings"]]
    cpu = next(each["text"] for each in record["findings"] if each["topic"] == "cpu")
    where = f"on a machine without GPU ({cpu}), beside other programs"
    label = f"`bitcycle doctor {command}` {where}; exit code {record['exit_code']}."
    return f"{label}\n\n{markdown_table(('state', 'topic', 'finding'), rows)}"


def _remedy(text: str) -> str:
    return f"<br>→ {text}" if text else ""


GENERATED: dict[str, Callable[[], str]] = {
    **{f"{name} list": partial(board_list, name) for name in ("all_images", "methods", "underfitting", "formats")},
    "board": board,
    "gains": gains_table,
    "fewer bits": fewer_bits_table,
    "schedules": schedules_table,
    "quantizers": quantizers_table,
    "formats": formats_table,
    "format costs": format_costs_table,
    "recipes": recipes_board,
    "recipe times": recipe_times,
    "costs": costs_line,
    "evaluation": evaluation_table,
    "support": support_table,
    "accelerator": accelerator_table,
    "hardware": hardware_table,
    "gpu steps": gpu_steps_table,
    "results": results_table,
    "verdicts": verdicts_table,
    "benchmark": recorded,
    "deviations": deviations,
    **{name: partial(experiment, name) for name in EXPERIMENTS},
    "pilot": pilot_table,
    "hours": hours_table,
    "fidelity": fidelity_table,
    "fuzz": fuzz_table,
    "null families": null_families_line,
    "hlhlp phases": hlhlp_phases_table,
    "doctor": doctor_table,
    "tested": claims_table,
    "untested": untested_table,
    "excluded": excluded_list,
    "decided": decided_list,
    "judged anew": judged_anew,
    "withdrawn": withdrawn_line,
    "history": history_list,
}
DOCUMENTS = {
    README: ("schedules", "board", "verdicts", "withdrawn"),
    ROOT / "docs" / "choosing-a-schedule.md": ("gains", "fewer bits"),
    ROOT / "docs" / "schedules.md": ("schedules",),
    ROOT / "docs" / "quantizers.md": ("quantizers",),
    ROOT / "docs" / "doctor.md": ("doctor",),
    ROOT / "docs" / "formats.md": ("recipes", "recipe times", "formats", "format costs"),
    ROOT / "docs" / "cost-models.md": ("costs",),
    ROOT / "docs" / "own-models.md": ("evaluation", "support"),
    ROOT / "docs" / "results.md": ("verdicts", "null families", "results"),
    ROOT / "docs" / "speed.md": ("benchmark",),
    ROOT / "docs" / "accelerators.md": ("hardware", "gpu steps", "accelerator"),
    ROOT / "results" / "notes" / "claim-history.md": ("judged anew", "history"),
    ROOT / "results" / "notes" / "board.md": ("all_images list", "methods list", "underfitting list", "formats list"),
    ROOT / "results" / "notes" / "mini-scale.md": ("deviations",),
    ROOT / "results" / "notes" / "fidelity.md": ("fidelity",),
    ROOT / "results" / "notes" / "fuzz.md": ("fuzz",),
    ROOT / "results" / "notes" / "hlhlp-phases.md": ("hlhlp phases",),
    ROOT / "results" / "notes" / "plan.md": ("pilot", "hours"),
    ROOT / "results" / "notes" / "verdicts.md": (
        "decided",
        "tested",
        "untested",
        "excluded",
        *EXPERIMENTS,
    ),
}
"""Document -> its generated parts."""


def fill(document: Path) -> str:
    """The text of a document with its generated parts regenerated."""
    text = document.read_text()
    for name in DOCUMENTS[document]:
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        if not re.search(pattern, text, re.DOTALL):
            sys.exit(f"{document.name} has no part 'generated: {name}'")
        made = GENERATED[name]()
        text = re.sub(pattern, lambda match, made=made: f"{match[1]}{made}\n{match[2]}", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(fill(document))
    print(f"{', '.join(map(str, DOCUMENTS))}, {draw_suite(PICTURE)}, {draw_formats(GRIDS)}, {draw_phases()}")
