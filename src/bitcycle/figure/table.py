"""The tables of an item: what the paper prints, ours beside it where network, data and scale are the paper's, and our own runs.

Nothing of ours stands in a row about another network, other data or another scale: such runs have a table of their own, which
names network, data, scale and steps in each row and each training once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from bitcycle.analysis.aggregation import Cell, Results, Value
from bitcycle.analysis.contrast import Selector
from bitcycle.analysis.items import Published
from bitcycle.analysis.labels import (
    Match,
    backward_bits,
    dataset_of,
    forward_bits,
    highest,
    matches,
    method_of,
    model_of,
    only,
    schedule_of,
)
from bitcycle.analysis.statistics import Estimate
from bitcycle.figure.data import ItemData, Panel, by_length, differences, our_network, panels_of
from bitcycle.schedule import SUITE

MACS_PER_GBITOP = 1e9 / 32**2
"""Effective MACs of FracTrain: bit operations of a float MAC count 32 x 32."""
LABELS = ("group", "model", "dataset", "method", "schedule", "fw_bits", "bw_bits", "setting")
METRICS = {"top5_accuracy": "test_accuracy_top5", "wer": "test_wer"}
"""Published metrics that are not the main one of a run: their names in our evaluations."""
MAIN = (
    *(
        "test_accuracy",
        "validation_accuracy",
        "top1_accuracy",
        "perplexity",
        "test_perplexity",
        "cer",
        "hr_at_10",
        "map",
    ),
)
RELATIONS = {
    "range_min": "from ",
    "range_max": "to ",
    "~": "about ",
    "<=": "at most ",
    ">": "more than ",
    "<": "below ",
}


@dataclass(frozen=True)
class Spec:
    """How the numbers of one item are found in our runs.

    Attributes:
        column: of runs.csv that holds the metric as the paper reports it: final or best.
        match: whether a published number is about a cell.
        cost: of runs.csv: gbitops, or gbitops_to_best.
        named: the method of a cell of ours in the words of the paper.
        phase: at the end of which phase, from 1 on, a published number was measured; None: at the end of the run.
        base: which of our cells the others are compared with.
        measures: further numbers of our cells: heading -> text.
    """

    column: str = "final"
    match: Match = matches
    cost: str = "gbitops"
    named: Callable[[Cell], str] = method_of
    phase: Callable[[Published], Optional[int]] = lambda row: None
    base: Optional[Selector] = None
    measures: Mapping[str, Callable[[Cell], str]] = field(default_factory=dict)


class Table(NamedTuple):
    """Headings and rows of text below a caption."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables_of(data: ItemData, spec: Spec) -> list[Table]:
    """The tables of an item that have rows: the published numbers, and our runs."""
    found = [published_table([*data.published, *data.digitized], data.results, spec), our_table(data, spec)]
    return [table for table in found if table.rows]


# What the paper prints


def published_table(rows: Sequence[Published], results: Results, spec: Spec) -> Table:
    """Every published number with its deviation; ours beside it where network, data and scale are the paper's."""
    rows = [row for row in rows if row["metric"] != "none_stated"]
    ours = [ours_of(row, results, spec) for row in rows]
    labels = [name for name in LABELS if any(row[name] for row in rows)]
    spread, matched = any(row["std"] for row in rows), any(value is not None for value in ours)
    headings = [*(name.replace("_", " ") for name in labels), "metric", "unit", "published"]
    headings += ["published deviation"] * spread + ["ours", "deviation", "n", "difference"] * matched
    body = []
    for row, value in zip(rows, ours):
        cells = [*(row[name] for name in labels), row["metric"], row["unit"], printed(row), *[row["std"]] * spread]
        body.append([*cells, *(beside(row, value) if matched else ())])
    return Table("Published numbers" + (" and ours at the paper's setting" if matched else ""), headings, body)


def ours_of(row: Published, results: Results, spec: Spec) -> Value | None:
    """Our value of a published number; None unless network, data and scale are the paper's and a single cell is meant."""
    if results.scale != "paper" or row["relation"].startswith("range_"):
        return None
    alike = [cell for cell in results.done if not cell.stand_ins]
    cell = only([cell for cell in alike if spec.match(row, cell)])
    return None if cell is None else measure(row, cell, Results("paper", tuple(alike)), spec)


def printed(row: Published) -> str:
    """A published number as printed, and what is meant where the print contradicts itself."""
    text = row["printed"] or (number(float(row["value"])) if row["value"] else "")
    meant = row["corrected_value"]
    return RELATIONS.get(row["relation"], "") + text + (f" (meant: {meant})" if meant else "")


def beside(row: Published, value: Value | None) -> list[str]:
    """Ours, its deviation, number of seeds, and the difference to the published number."""
    if value is None:
        return [""] * 4
    text = row["corrected_value"] or row["value"]
    gap = value.mean - float(text) if text and row["relation"] in ("=", "~") else None
    return [number(value.mean), number(value.std), str(value.n), signed(gap)]


def measure(row: Published, cell: Cell, results: Results, spec: Spec) -> Value | None:
    """Our value of a published metric in a cell."""
    metric, cost = row["metric"], cell.value(spec.cost)
    if metric in MAIN:
        phase = spec.phase(row)
        value = cell.value(spec.column) if phase is None else cell.at_end_of_phase(phase)
        return value.scaled(0.01) if value and not row["unit"] and phase is None else value
    if metric in METRICS:
        return cell.final(METRICS[metric])
    columns = {"training_speed": "steps_per_second", "identified_lower_bound": "q_min", "gbitops": spec.cost}
    if metric in columns:
        return cell.value(columns[metric])
    if metric == "effective_macs":
        return cost.scaled(MACS_PER_GBITOP) if cost else None
    if metric == "parameters":
        parameters = cell.value("parameters")
        return parameters.scaled(1e-6) if parameters else None
    if metric in ("energy", "latency"):
        return on_hardware(row, cell)
    base = baseline(row, cell, results)
    return None if base is None else against(row, cell, base, spec)


def on_hardware(row: Published, cell: Cell) -> Value | None:
    """Energy (kJ) or latency of a run that was costed on the paper's hardware."""
    if cell.runs[0].row.get("hardware") not in ("bitfusion", "zc706", "all"):
        return None
    factor = 1e-3 if row["metric"] == "energy" else 1 / {"min": 60, "hour": 3600}.get(row["unit"], 1)
    value = cell.value("energy_j" if row["metric"] == "energy" else "latency_s")
    return value.scaled(factor) if value else None


def baseline(row: Published, cell: Cell, results: Results) -> Cell | None:
    """The cell that a difference or saving refers to, as the row says: float, a static precision, or the best static one."""
    text, where = row["baseline"], (model_of(cell), dataset_of(cell))
    keys = ("model.aggregation", "dataset.part")
    alike = [other for other in results.done if (model_of(other), dataset_of(other)) == where]
    alike = [other for other in alike if all(other.setting(key) == cell.setting(key) for key in keys)]
    method = "Full Precision" if re.match(r"float|full.precision", text, re.IGNORECASE) else text
    if method in ("Full Precision", "fine-tuning"):
        return only([other for other in alike if method_of(other) == method])
    found = re.search(r"FW-?(\d+)/BW-?(\d+)", text)
    bits = found.groups() if found else (str(highest(forward_bits(cell))), str(highest(backward_bits(cell))))
    static = [other for other in alike if (forward_bits(other), backward_bits(other)) == bits]
    if text.startswith("strongest"):
        static = [other for other in static if method_of(other) in ("SBM", "DoReFa", "WAGEUBN")]
        values = [(value.mean, other) for other in static if (value := other.value("best"))]
        return max(values, key=lambda pair: pair[0], default=(0, None))[1]
    return only([other for other in static if method_of(other) == "SBM"])


def against(row: Published, cell: Cell, base: Cell, spec: Spec) -> Value | None:
    """A difference, seed by seed, or a saving of a cell against its baseline."""
    metric = row["metric"]
    if metric == "accuracy_drop_vs_static":
        return base.less(cell, spec.column)
    if metric.startswith("delta_") and metric.removeprefix("delta_") in (*MAIN, "map"):
        return cell.less(base, spec.column)
    if metric == "slowdown":
        return ratio(base.value("steps_per_second"), cell.value("steps_per_second"))
    saved = ratio(cell.value(spec.cost), base.value(spec.cost))
    if saved is None or metric not in ("delta_gbitops", "computation_saving", "training_cost_reduction"):
        return None
    percent = 100 * (saved.mean - 1)
    return Value(percent if metric == "delta_gbitops" else -percent, saved.scaled(100).std, saved.n)


def ratio(one: Value | None, other: Value | None) -> Value | None:
    """A quotient of means; its spread is that of the dividend over the mean of the divisor."""
    if one is None or other is None or other.mean == 0:
        return None
    return Value(one.mean / other.mean, None if one.std is None else one.std / other.mean, min(one.n, other.n))


# Our runs


def our_table(data: ItemData, spec: Spec) -> Table:
    """Each setting of ours once: network, data, scale and steps, the metric over seeds, and the difference to our baseline."""
    shown, more = panels_of(data), list(spec.measures)
    rows = [
        row for panel in shown for part in by_length(panel) for row in our_rows(part, data.results.scale or "", spec)
    ]
    headings = ["network", "data", "scale", "steps", "method", "schedule", "forward bits", "gradient bits", "setting"]
    headings += [
        "metric",
        "ours",
        "deviation",
        "n",
        "difference to baseline",
        "95 % interval",
        "cost relative to static",
    ]
    headings += more
    kept = [index for index, name in enumerate(headings) if name in more or any(row[index] for row in rows)]
    body = [[row[index] for index in kept] for row in rows]
    proxies = sorted({name for panel in shown for name in panel.proxy_for})
    words = f", proxies for {'; '.join(proxies)}" if proxies else ""
    return Table(f"Our runs{words}; each training once", [headings[index] for index in kept], body)


SETTINGS = {
    **dict.fromkeys(SUITE, "{cycles} cycles"),
    **dict.fromkeys(("dfq", "fractrain"), "cp {target}"),
    **dict.fromkeys(("hlhlp", "hlhlhlp", "fine_tuning"), "bits {bits}"),
    "deficit": "window {start} to {end} ({unit}s)",
    "delayed": "starts at {start} of the run",
    "pfq": "epsilon {epsilon}, alpha {alpha}",
    "partial_pretrain": "{split} of the steps in full precision",
}
"""What tells cells of a schedule apart, besides their bits."""


class Known(dict[str, object]):
    """Settings; those that are not there are dashes."""

    def __missing__(self, key: str) -> str:
        return "-"


def setting_words(cell: Cell) -> str:
    """What tells a cell of ours apart from others of its schedule."""
    settings = cell.runs[0].settings
    words = [SETTINGS.get(schedule_of(cell), "").format_map(Known(settings.get("schedule", {})))]
    special = {"quantizer": "sbm", "dataset.part": "all", "model.aggregation": None}
    words += [
        str(found).replace("_", " ") for key, usual in special.items() if (found := cell.setting(key, usual)) != usual
    ]
    return ", ".join(filter(None, words))


def our_rows(panel: Panel, scale: str, spec: Spec) -> Iterator[list[str]]:
    """The rows of one panel."""
    base, proxy = panel.first(spec.base), f"{scale}, proxy" if panel.proxy_for else scale
    gaps = differences(panel, base, spec.column) if base else {}
    for index, cell in enumerate(panel.cells):
        row, (network, _, rest) = cell.runs[0].row, our_network(cell).partition(", ")
        value, gap, cost = cell.value(spec.column), gaps.get(index), cell.value("relative_to_static")
        where = [network, rest, proxy, row["total_steps"], spec.named(cell), schedule_of(cell)]
        what = [forward_bits(cell), backward_bits(cell), setting_words(cell), row["metric"]]
        found = [number(value.mean), number(value.std), str(value.n)] if value else ["", "", ""]
        compared = ["baseline" if cell is base else signed(gap.mean) if gap else "", interval(gap, signed)]
        yield [
            *where,
            *what,
            *found,
            *compared,
            number(cost.mean if cost else None),
            *(m(cell) for m in spec.measures.values()),
        ]


# How they are written


def number(value: float | None) -> str:
    """A number with the digits that it deserves.

    >>> number(92.2345), number(0.0012), number(2.67e8), number(None), number(-0.0)
    ('92.23', '0.0012', '2.67e+08', '', '0.00')
    """
    if value is None:
        return ""
    size = abs(value)
    if size >= 1e5 or 0 < size < 0.01:
        return f"{value:.3g}"
    return f"{value + 0.0:.3f}" if 0 < size < 1 else f"{value + 0.0:.2f}"


def signed(value: float | None) -> str:
    """A difference with its sign.

    >>> signed(1.5), signed(-0.25), signed(None)
    ('+1.50', '-0.250', '')
    """
    return ("+" if (value or 0) > 0 else "") + number(value)


def interval(value: Estimate | None, written: Callable[[float | None], str] = number) -> str:
    """The interval of an estimate in words; empty if it has none."""
    ends = None if value is None else value.interval()
    return "" if ends is None else f"{written(ends[0])} to {written(ends[1])}"


def as_markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def as_records(tables: Sequence[Table]) -> list[dict[str, str]]:
    """All rows of some tables, each named by its table: what the downloaded file holds."""
    names = ["published" if table.caption.startswith("Published") else "ours" for table in tables]
    return [{"source": name, **dict(zip(t.headings, row))} for name, t in zip(names, tables) for row in t.rows]
