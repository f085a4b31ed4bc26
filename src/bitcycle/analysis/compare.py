"""Published numbers beside ours: for each, what it is, ours with spread and number of seeds, and the difference."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Optional

from bitcycle.analysis.items import Published
from bitcycle.analysis.labels import Match, backward_bits, dataset_of, forward_bits, highest, method_of, model_of, only
from bitcycle.analysis.labels import matches as matches_names
from bitcycle.analysis.results import Cell, Results, Value

MACS_PER_GBITOP = 1e9 / 32**2
"""Effective MACs of FracTrain: bit operations of a float MAC count 32 x 32."""
UNITS = {"gbitops": "GBitOPs", "effective_macs": "MACs"}
LABELS = ("group", "model", "dataset", "method", "schedule", "fw_bits", "bw_bits", "setting")
METRICS = {
    "top5_accuracy": "test_accuracy_top5",
    "wer": "test_wer",
}
"""Published metrics that are not the main one of a run: their names in our evaluations."""
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


@dataclass(frozen=True)
class Line:
    """A published number beside ours.

    Attributes:
        labels: what it is about, by the columns of LABELS.
        metric, unit: of both numbers.
        relation: = or ~ (read from a picture), range_min, range_max, <=, >.
        published: as meant; None where only we have a number.
        printed: as printed.
        ours: None where there are no runs.
    """

    labels: dict[str, str]
    metric: str
    unit: str
    relation: str
    published: Optional[float]
    printed: str
    ours: Optional[Value]

    @property
    def difference(self) -> float | None:
        """Ours minus the published number."""
        if self.ours is None or self.published is None or self.relation not in ("=", "~"):
            return None
        return self.ours.mean - self.published


@dataclass(frozen=True)
class Comparison:
    """How the numbers of one item are found in our runs.

    Attributes:
        column: of runs.csv that holds the metric as the paper reports it: final or best.
        match: whether a published number is about a cell.
        cost: of runs.csv: gbitops, or gbitops_to_best.
        describe: more labels of a cell that has no published number, by the columns of LABELS.
        phase: at the end of which phase, from 1 on, a published number was measured; None: at the end of the run.
    """

    column: str
    match: Match = matches_names
    cost: str = "gbitops"
    describe: Optional[Callable[[Cell], dict[str, str]]] = None
    phase: Callable[[Published], Optional[int]] = lambda row: None


def compare(rows: Sequence[Published], results: Results, how: Comparison) -> list[Line]:
    """Every published number beside ours, then what we have beyond them."""
    lines, covered = [], set[int]()
    for row in rows:
        if row["metric"] == "none_stated":
            continue
        value, cell = _ours(row, results, how)
        if cell is not None and base_metric(row["metric"]) == row["metric"] in MAIN:
            covered.add(id(cell))
        number = row["corrected_value"] or row["value"]
        labels = {name: row[name] for name in LABELS}
        published = float(number) if number else None
        lines.append(
            Line(labels, row["metric"], row["unit"], row["relation"], published, row["printed"] or row["value"], value)
        )
    more = [cell for cell in results.done if id(cell) not in covered]
    return lines + [line for cell in more for line in _unpublished(cell, how)]


def base_metric(metric: str) -> str:
    """The metric that a difference is of.

    >>> base_metric("delta_test_accuracy"), base_metric("perplexity")
    ('test_accuracy', 'perplexity')
    """
    return metric.removeprefix("delta_")


def _ours(row: Published, results: Results, how: Comparison) -> tuple[Value | None, Cell | None]:
    if row["relation"].startswith("range_"):
        return None, None  # ends of a range over several cells: the claims check them
    cell = only([cell for cell in results.done if how.match(row, cell)])
    return (None, None) if cell is None else (measure(row, cell, results, how), cell)


def measure(row: Published, cell: Cell, results: Results, how: Comparison) -> Value | None:
    """Our value of a published metric in a cell."""
    metric = row["metric"]
    if metric in MAIN:
        phase = how.phase(row)
        return main_value(cell, how.column, row["unit"]) if phase is None else cell.at_end_of_phase(phase)
    if metric in METRICS:
        return cell.final(METRICS[metric])
    if metric in ("gbitops", "effective_macs"):
        cost = cell.value(how.cost)
        return cost.scaled(MACS_PER_GBITOP) if cost and metric == "effective_macs" else cost
    if metric == "parameters":
        found = cell.value("parameters")
        return found.scaled(1e-6) if found else None
    if metric in ("energy", "latency"):
        return _hardware(row, cell)
    if metric == "training_speed":
        return cell.value("steps_per_second")
    if metric == "identified_lower_bound":
        return cell.value("q_min")
    base = baseline(row, cell, results)
    return None if base is None else _against(row, cell, base, how)


def main_value(cell: Cell, column: str, unit: str = "%") -> Value | None:
    """The main metric of a cell; a rate without unit is a fraction."""
    value = cell.value(column)
    return value.scaled(0.01) if value and not unit else value


def _hardware(row: Published, cell: Cell) -> Value | None:
    if not cell.runs or cell.runs[0].row.get("hardware") not in ("bitfusion", "zc706", "all"):
        return None
    seconds = {"min": 60, "hour": 3600}.get(row["unit"], 1)
    value = cell.value("energy_j" if row["metric"] == "energy" else "latency_s")
    return value.scaled(1 / 1000 if row["metric"] == "energy" else 1 / seconds) if value else None


def baseline(row: Published, cell: Cell, results: Results) -> Cell | None:
    """The cell that a difference or saving refers to, as the row says: float, a static precision, or the best static one."""
    text = row["baseline"]
    alike = [
        other
        for other in results.done
        if (model_of(other), dataset_of(other)) == (model_of(cell), dataset_of(cell))
        and all(other.setting(key) == cell.setting(key) for key in ("model.aggregation", "dataset.part"))
    ]
    if re.match(r"float|full.precision", text, re.IGNORECASE):
        return only([other for other in alike if method_of(other) == "Full Precision"])
    if text == "fine-tuning":
        return only([other for other in alike if method_of(other) == "fine-tuning"])
    forward, backward = str(highest(forward_bits(cell))), str(highest(backward_bits(cell)))
    if named := re.search(r"FW-?(\d+)/BW-?(\d+)", text):
        forward, backward = named.groups()
    static = [o for o in alike if (forward_bits(o), backward_bits(o)) == (forward, backward)]
    if text.startswith("strongest"):
        static = [other for other in static if method_of(other) in ("SBM", "DoReFa", "WAGEUBN")]
        return max(static, key=lambda other: _mean(other.value("best")), default=None)
    return only([other for other in static if method_of(other) == "SBM"])


def _mean(value: Value | None) -> float:
    return value.mean if value else float("-inf")


def _against(row: Published, cell: Cell, base: Cell, how: Comparison) -> Value | None:
    """A difference or saving of a cell against its baseline."""
    metric, ours, theirs = row["metric"], cell.value(how.column), base.value(how.column)
    costs = cell.value(how.cost), base.value(how.cost)
    if metric == "accuracy_drop_vs_static" and ours and theirs:
        return theirs - ours
    if metric == "slowdown":
        speeds = cell.value("steps_per_second"), base.value("steps_per_second")
        return ratio(speeds[1], speeds[0])
    if metric.startswith("delta_") and base_metric(metric) in (*MAIN, "map", "test_accuracy") and ours and theirs:
        return ours - theirs
    saved = ratio(*costs)
    if saved is None:
        return None
    if metric == "delta_gbitops":
        return Value(100 * (saved.mean - 1), saved.scaled(100).std, saved.n)
    if metric in ("computation_saving", "training_cost_reduction"):
        return Value(100 * (1 - saved.mean), saved.scaled(100).std, saved.n)
    return None


def ratio(one: Value | None, other: Value | None) -> Value | None:
    """A quotient of means; its spread is that of the dividend over the mean of the divisor."""
    if one is None or other is None or other.mean == 0:
        return None
    return Value(one.mean / other.mean, None if one.std is None else one.std / other.mean, min(one.n, other.n))


def _unpublished(cell: Cell, how: Comparison) -> list[Line]:
    """Metric and cost of a cell for which the paper prints no number."""
    labels = {
        "group": "",
        "model": model_of(cell),
        "dataset": dataset_of(cell),
        "method": method_of(cell),
        "schedule": str(cell.setting("schedule", "static")),
        "fw_bits": forward_bits(cell),
        "bw_bits": backward_bits(cell),
        "setting": "",
        **(how.describe(cell) if how.describe else {}),
    }
    metric = str(cell.runs[0].row["metric"])
    found = [Line(labels, metric, "", "", None, "", cell.value(how.column))]
    cost = cell.value("relative_to_static")
    if cost is not None:
        found.append(Line(labels, "cost relative to static", "", "", None, "", cost))
    return found


# How lines are shown


def shown_columns(lines: Sequence[Line]) -> list[str]:
    """The labels that tell lines apart, or say something at all."""
    return [name for name in LABELS if any(line.labels[name] for line in lines)]


def number(value: float | None, like: float | None = None) -> str:
    """A number with the digits that it deserves.

    >>> number(92.2345), number(0.0012), number(2.67e8), number(None), number(-0.0)
    ('92.23', '0.0012', '2.67e+08', '', '0.00')
    """
    if value is None:
        return ""
    size = max(abs(value), abs(like or 0))
    if size >= 1e5 or 0 < size < 0.01:
        return f"{value:.3g}"
    return f"{value + 0.0:.3f}" if size < 1 and size != 0 else f"{value + 0.0:.2f}"


HEADINGS = ("published", "ours", "standard deviation", "n", "difference")


def cells_of(line: Line) -> tuple[str, str, str, str, str]:
    """Published number as printed, ours, its spread, its number of seeds, the difference."""
    marks = {
        "range_min": "from ",
        "range_max": "to ",
        "~": "about ",
        "<=": "at most ",
        ">": "more than ",
        "<": "below ",
    }
    printed = line.printed or number(line.published)
    if line.published is not None and _as_number(line.printed) not in (None, line.published):
        printed = f"{printed} (meant: {number(line.published)})"
    ours = line.ours
    return (
        marks.get(line.relation, "") + printed if printed else "",
        number(ours.mean if ours else None),
        number(ours.std if ours else None),
        str(ours.n) if ours else "",
        ("+" if (line.difference or 0) > 0 else "") + number(line.difference, line.published),
    )


def _as_number(text: str) -> float | None:
    try:
        return float(text.rstrip("%xM"))
    except ValueError:
        return None


def table_rows(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table of lines."""
    columns = shown_columns(lines)
    headings = [name.replace("_", " ") for name in (*columns, "metric", "unit")] + list(HEADINGS)
    rows = [[*(line.labels[name] for name in columns), line.metric, line.unit, *cells_of(line)] for line in lines]
    return headings, rows


def as_markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def as_html(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in HTML; numbers to the right."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in headings)
    body = "".join("<tr>" + "".join(_html_cell(cell) for cell in row) + "</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>\n"


def _html_cell(cell: str) -> str:
    numeric = ' class="number"' if re.match(r"[+-]?[\d.]+(e[+-]?\d+)?$", cell) else ""
    return f"<td{numeric}>{html.escape(cell)}</td>"
