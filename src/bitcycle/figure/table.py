"""The tables of an item: what the paper prints, ours beside it where network, data and scale are the paper's, and our own runs.

Nothing of ours stands in a row about another network, other data or another scale: such runs have a table of their own, which
names network, data, scale and steps in each row and each training once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from bitcycle.analysis import labels
from bitcycle.analysis.aggregation import Cell, Results, Value
from bitcycle.analysis.contrast import Selector, agreeing, fact, select
from bitcycle.analysis.items import Published
from bitcycle.analysis.statistics import Estimate
from bitcycle.figure.data import ItemData, Panel, by_length, differences, our_network, panels_of
from bitcycle.schedule import SUITE

MACS_PER_GBITOP = 1e9 / 32**2
"""Effective MACs of FracTrain: bit operations of a float MAC count 32 x 32."""
LABELS = ("group", "model", "dataset", "method", "schedule", "fw_bits", "bw_bits", "setting")
METRICS = {"top5_accuracy": "test_accuracy_top5", "wer": "test_wer"}
"""Published metrics that are not the main one of a run: their names in our evaluations."""
COLUMNS = {
    "training_speed": ("steps_per_second", 1.0),
    "identified_lower_bound": ("q_min", 1.0),
    "parameters": ("parameters", 1e-6),
    "energy": ("energy_j", 1e-3),
}
"""Published metrics: columns of runs.csv, and their factor."""
MAIN = (
    "test_accuracy",
    "validation_accuracy",
    "top1_accuracy",
    "perplexity",
    "test_perplexity",
    "cer",
    "hr_at_10",
    "map",
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
    match: labels.Match = labels.matches
    cost: str = "gbitops"
    named: Callable[[Cell], str] = labels.method_of
    phase: Callable[[Published], Optional[int]] = lambda row: None
    base: Optional[Selector] = None
    measures: Mapping[str, Callable[[Cell], str]] = field(default_factory=dict)


class Table(NamedTuple):
    """Rows of text, heading -> cell, below a caption."""

    caption: str
    records: Sequence[Mapping[str, str]]

    @property
    def headings(self) -> list[str]:
        """Of the columns."""
        return list(self.records[0]) if self.records else []

    @property
    def rows(self) -> list[list[str]]:
        """The cells."""
        return [list(record.values()) for record in self.records]

    @classmethod
    def without_empty(cls, caption: str, records: Sequence[Mapping[str, str]], always: Collection[str]) -> Table:
        """A table of those columns that say something, and of some that always stand."""
        kept = [name for name in records[0] if name in always or any(one[name] for one in records)] if records else []
        return cls(caption, [{name: record[name] for name in kept} for record in records])


def tables_of(data: ItemData, spec: Spec) -> list[Table]:
    """The tables of an item that have rows: the published numbers, and our runs."""
    found = [published_table([*data.published, *data.digitized], data.results, spec), our_table(data, spec)]
    return [table for table in found if table.records]


# What the paper prints


def published_table(rows: Sequence[Published], results: Results, spec: Spec) -> Table:
    """Every published number with its deviation; ours beside it where network, data and scale are the paper's."""
    rows = [row for row in rows if row["metric"] != "none_stated"]
    ours = [ours_of(row, results, spec) for row in rows]
    matched = any(value is not None for value in ours)
    records = []
    for row, value in zip(rows, ours):
        named = {name.replace("_", " "): row[name] for name in LABELS}
        numbers = {
            "metric": row["metric"],
            "unit": row["unit"],
            "published": printed(row),
            "published deviation": row["std"],
        }
        records.append({**named, **numbers, **beside(row, value)})
    caption = "Published numbers" + (" and ours at the paper's setting" if matched else "")
    return Table.without_empty(caption, records, {"metric", "unit", "published", *(BESIDE if matched else ())})


def ours_of(row: Published, results: Results, spec: Spec) -> Value | None:
    """Our value of a published number; None unless network, data and scale are the paper's and a single cell is meant."""
    if results.scale != "paper" or row["relation"].startswith("range_"):
        return None
    alike = [cell for cell in results.done if not cell.stand_ins]
    cell = labels.only([cell for cell in alike if spec.match(row, cell)])
    return None if cell is None else measure(row, cell, Results("paper", tuple(alike)), spec)


def printed(row: Published) -> str:
    """A published number as printed, and what is meant where the print contradicts itself."""
    text = row["printed"] or (number(float(row["value"])) if row["value"] else "")
    meant = row["corrected_value"]
    return RELATIONS.get(row["relation"], "") + text + (f" (meant: {meant})" if meant else "")


BESIDE = ("ours", "deviation", "n", "difference")


def beside(row: Published, value: Value | None) -> dict[str, str]:
    """Ours, its deviation, number of seeds, and the difference to the published number."""
    if value is None:
        return dict.fromkeys(BESIDE, "")
    text = row["corrected_value"] or row["value"]
    gap = value.mean - float(text) if text and row["relation"] in ("=", "~") else None
    return dict(zip(BESIDE, (number(value.mean), number(value.std), str(value.n), signed(gap))))


def measure(row: Published, cell: Cell, results: Results, spec: Spec) -> Value | None:
    """Our value of a published metric in a cell."""
    metric = row["metric"]
    if metric in MAIN:
        phase = spec.phase(row)
        value = cell.value(spec.column) if phase is None else cell.at_end_of_phase(phase)
        return value.scaled(0.01) if value and not row["unit"] and phase is None else value
    if metric in METRICS:
        return cell.final(METRICS[metric])
    columns = {**COLUMNS, "gbitops": (spec.cost, 1.0), "effective_macs": (spec.cost, MACS_PER_GBITOP)}
    if metric in ("energy", "latency") and cell.runs[0].row.get("hardware") not in ("bitfusion", "zc706", "all"):
        return None
    if metric == "latency":
        columns["latency"] = ("latency_s", 1 / {"min": 60, "hour": 3600}.get(row["unit"], 1))
    if metric in columns:
        column, factor = columns[metric]
        value = cell.value(column)
        return value.scaled(factor) if value else None
    base = baseline(row, cell, results)
    return None if base is None else against(row, cell, base, spec)


def baseline(row: Published, cell: Cell, results: Results) -> Cell | None:
    """The cell that a difference or saving refers to, as the row says: float, a static precision, or the best static one."""
    text = row["baseline"]
    alike = agreeing(cell, results.done, ("model", "data", "model.aggregation", "dataset.part"))
    method = "Full Precision" if re.match(r"float|full.precision", text, re.IGNORECASE) else text
    if method in ("Full Precision", "fine-tuning"):
        return labels.only(select(alike, {"method": method}))
    found = re.search(r"FW-?(\d+)/BW-?(\d+)", text)
    forward, backward = found.groups() if found else fact(cell, "bounds").split("/")
    static = select(alike, {"fw": forward, "bw": backward})
    if text.startswith("strongest"):
        strong = select(static, {"method": ["SBM", "DoReFa", "WAGEUBN"]})
        values = [(value.mean, other) for other in strong if (value := other.value("best"))]
        return max(values, key=lambda pair: pair[0], default=(0, None))[1]
    return labels.only(select(static, {"method": "SBM"}))


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
    shown = panels_of(data)
    parts = [part for panel in shown for part in by_length(panel)]
    records = [record for part in parts for record in our_records(part, data.results.scale or "", spec)]
    proxies = sorted({name for panel in shown for name in panel.proxy_for})
    words = f", proxies for {'; '.join(proxies)}" if proxies else ""
    return Table.without_empty(f"Our runs{words}; each training once", records, spec.measures)


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


def setting_words(cell: Cell) -> str:
    """What tells a cell of ours apart from others of its schedule; settings that it does not have are dashes."""
    known = defaultdict(lambda: "-", cell.runs[0].settings.get("schedule", {}))
    words = [SETTINGS.get(labels.schedule_of(cell), "").format_map(known)]
    special = {"quantizer": "sbm", "dataset.part": "all", "model.aggregation": None}
    found = {key: cell.setting(key, usual) for key, usual in special.items()}
    words += [str(value).replace("_", " ") for key, value in found.items() if value != special[key]]
    return ", ".join(filter(None, words))


def our_records(panel: Panel, scale: str, spec: Spec) -> Iterator[dict[str, str]]:
    """The rows of one panel."""
    base, gaps = panel.first(spec.base), {}
    if base:
        gaps = differences(panel, base, spec.column)
    for index, cell in enumerate(panel.cells):
        row, (network, _, rest) = cell.runs[0].row, our_network(cell).partition(", ")
        value, gap, cost = cell.value(spec.column), gaps.get(index), cell.value("relative_to_static")
        yield {
            "network": network,
            "data": rest,
            "scale": f"{scale}, proxy" if panel.proxy_for else scale,
            "steps": row["total_steps"],
            "method": spec.named(cell),
            "schedule": labels.schedule_of(cell),
            "forward bits": labels.forward_bits(cell),
            "gradient bits": labels.backward_bits(cell),
            "setting": setting_words(cell),
            "metric": row["metric"],
            "ours": number(value.mean if value else None),
            "deviation": number(value.std if value else None),
            "n": str(value.n) if value else "",
            "difference to baseline": "baseline" if cell is base else signed(gap.mean if gap else None),
            "95 % interval": interval(gap, signed),
            "cost relative to static": number(cost.mean if cost else None),
            **{name: measure(cell) for name, measure in spec.measures.items()},
        }


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


def as_markdown(table: Table) -> str:
    """A table in Markdown."""
    lines = [table.headings, ["---"] * len(table.headings), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def as_records(tables: Sequence[Table]) -> list[dict[str, str]]:
    """All rows of some tables, each named by its table: what the downloaded file holds."""
    names = ["published" if table.caption.startswith("Published") else "ours" for table in tables]
    return [{"source": name, **record} for name, table in zip(names, tables) for record in table.records]
