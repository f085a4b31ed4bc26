"""Compare every cost number published in the papers with the cost models.

    python scripts/published_costs.py [FOLDER]          default: results/published

Reads the published numbers from the CSV files in FOLDER and writes results/published_costs.csv and .md: each number
with ours, residual and tolerance; then those that cannot be derived, with the reason. Trains nothing.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from bitcycle.files import markdown_table, read_csv, write_csv
from published_formulas import DERIVATIONS, MORE_THAN, READ, Derived, Number, recomputed

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "results" / "published"
RESULT = ROOT / "results" / "published_costs"

METRICS = {
    "gbitops": ("gbitops", 1),
    "delta_gbitops": ("gbitops_saving_pct", -1),
    "latency": ("latency", 1),
    "delta_latency": ("latency_saving_pct", -1),
    "energy": ("energy_kJ", 1),
    "effective_macs": ("effective_macs", 1),
    "computation_saving": ("computation_saving_pct", 1),
    "computation_saving_factor": ("computation_saving_factor", 1),
    "latency_saving": ("latency_saving_pct", 1),
    "energy_saving": ("energy_saving_pct", 1),
    "training_cost": ("bitops_1e13", 1),
    "training_cost_reduction": ("bitops_saving_pct", 1),
    "training_cost_reduction_factor": ("bitops_saving_factor", 1),
}
"""Metric in the CSV files -> its name here, and the sign that turns a change into a saving. Other metrics are not
costs."""

PAPERS = {"cpt": "CPT", "fractrain": "FracTrain", "better": "Better Schedules"}
IN_THE_TEXT = {
    "cpt/fig1": "text 3.2",
    "fractrain/sec4.6-fpga": "text 4.6",
    "better/fig4": "text 4.2",
    "better/fig6": "text 4.3",
    "better/fig7": "text 4.4",
}
COLUMNS = ("paper", "table", "model", "dataset", "method", "fw", "bw", "metric")


@dataclass(frozen=True)
class Comparison:
    """A published number and ours; instead of ours, a string may give the reason why there is none."""

    number: Number
    ours: Derived | str

    @property
    def residual(self) -> float:
        """Our number divided by the published number, minus 1."""
        assert isinstance(self.ours, Derived)
        return self.ours.ours / self.number.published - 1

    @property
    def within(self) -> bool:
        """Whether the residual is within the tolerance."""
        assert isinstance(self.ours, Derived)
        return self.residual > 0 if self.ours.tolerance == MORE_THAN else abs(self.residual) <= self.ours.tolerance

    def row(self) -> dict[str, str]:
        """The comparison as cells of text."""
        row = {column: getattr(self.number, column) for column in COLUMNS} | {
            "published": f"{self.number.published:.6g}"
        }
        if isinstance(self.ours, str):
            return row | dict.fromkeys(("ours", "residual %", "tolerance %", "within"), "") | {"note": self.ours}
        tolerance = "" if self.ours.tolerance == MORE_THAN else f"{100 * self.ours.tolerance:.3g}"
        return row | {
            "ours": f"{self.ours.ours:.6g}",
            "residual %": f"{100 * self.residual:+.2f}",
            "tolerance %": tolerance,
            "within": "yes" if self.within else "no",
            "note": self.ours.note,
        }


def read_numbers(folder: Path) -> list[tuple[str, Number]]:
    """All published cost numbers in a folder of CSV files, each with its table or figure."""
    rows = [row for path in sorted(folder.glob("*_*.csv")) for row in read_csv(path)]
    return [(row["id"], _number(row)) for row in rows if row["metric"] in METRICS and row["value"]]


def _number(row: dict[str, str]) -> Number:
    metric, sign = METRICS[row["metric"]]
    if metric == "latency":
        metric = "latency_min" if row["unit"] == "min" else "latency_h"
    item = row["id"]
    paper, _, place = item.partition("/")
    return Number(
        paper=PAPERS[paper],
        table=IN_THE_TEXT.get(item, place.removeprefix("table")),
        model=row["model"],
        dataset=row["dataset"],
        method=row["schedule"] if paper == "better" else row["method"],
        fw=_forward_bits(row),
        bw=row["bw_bits"],
        metric="gbitops_saving_pct" if item == "cpt/fig1" else metric,
        published=sign * float(row["corrected_value"] or row["value"]),
        schedule=row["schedule"],
        relation=row["relation"],
        note=row["baseline"],
    )


def _forward_bits(row: dict[str, str]) -> str:
    """Forward bits as printed; if the network chooses them, its target compute percentage."""
    if row["fw_bits"] == "dynamic":
        return row["schedule"].replace("cp ", "cp=")
    return row["fw_bits"] or "-".join(dict.fromkeys(filter(None, (row["q_min"], row["q_max"]))))


def compare(folder: Path = FOLDER) -> list[Comparison]:
    """Compare every published number, and numbers derived from two of them, with ours."""
    entries = read_numbers(folder)
    book = [number for _, number in entries]
    items = {(number.paper, number.table): item for item, number in entries}
    entries += [(items[number.paper, number.table], number) for number in recomputed(book)]
    return [Comparison(number, DERIVATIONS[item](number, book)) for item, number in entries]


def summary(comparisons: list[Comparison]) -> str:
    """The result in one line."""
    derived = [c for c in comparisons if isinstance(c.ours, Derived)]
    printed = [c for c in derived if c.number.relation != READ]
    read = [c for c in derived if c.number.relation == READ]
    residuals = [abs(c.residual) for c in printed if isinstance(c.ours, Derived) and c.ours.tolerance != MORE_THAN]
    return (
        f"{sum(c.within for c in printed)} of {len(printed)} printed cost numbers that can be derived are within tolerance "
        f"(median residual {100 * statistics.median(residuals):.2f} %), and {sum(c.within for c in read)} of {len(read)} read "
        f"from figures; {len(comparisons) - len(derived)} cannot be derived"
    )


def write(comparisons: list[Comparison]) -> None:
    """Write the comparison as CSV and as Markdown."""
    rows = [comparison.row() for comparison in comparisons]
    write_csv(RESULT.with_suffix(".csv"), list(rows[0]), rows)
    RESULT.with_suffix(".md").write_text(markdown(comparisons))


def markdown(comparisons: list[Comparison]) -> str:
    """The comparison as Markdown."""
    derived = [comparison for comparison in comparisons if isinstance(comparison.ours, Derived)]
    missing = [comparison for comparison in comparisons if isinstance(comparison.ours, str)]
    return "\n".join(
        [
            "# Published cost numbers beside ours",
            "",
            "Written by `python scripts/published_costs.py`; nothing was trained. The other two papers print no costs, and the",
            "figures of Better Schedules have none beyond those in its text.",
            "",
            f"{summary(comparisons)}.",
            "",
            markdown_table(list(derived[0].row()), [list(comparison.row().values()) for comparison in derived]),
            "",
            "## Not within tolerance",
            "",
            *(f"* {describe(comparison)}" for comparison in derived if not comparison.within),
            "",
            "## Cannot be derived",
            "",
            markdown_table(("paper", "where", "numbers", "why"), _reasons(missing)),
            "",
        ]
    )


def describe(comparison: Comparison) -> str:
    """A comparison in a sentence."""
    row = comparison.row()
    where = " ".join(filter(None, (row[column] for column in COLUMNS)))
    return f"{where}: published {row['published']}, ours {row['ours']} ({row['residual %']} %); {row['note']}"


def _reasons(missing: list[Comparison]) -> Iterator[tuple[str, str, str, str]]:
    """One row for each table and reason, with the numbers that it explains."""
    key = [((c.number.paper, c.number.table, str(c.ours)), c) for c in missing]
    for (paper, table, reason), group in groupby(sorted(key, key=lambda entry: entry[0]), key=lambda entry: entry[0]):
        numbers = ", ".join(f"{comparison.number.published:g}" for _, comparison in group)
        yield paper, table, numbers, reason


if __name__ == "__main__":
    result = compare(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
    write(result)
    print(summary(result))
