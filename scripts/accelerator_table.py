"""The table of settings that ran on the pretended accelerator, from the record of tests/accelerator/record.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bitcycle.files import markdown_table, read_csv

RECORD = Path(__file__).parent.parent / "results" / "summary" / "accelerator.csv"


def accelerator_table() -> str:
    """Each recorded run: whether it finished and resumed exactly, and what its steady steps waited for; pairs by quantizer."""
    rows = read_csv(RECORD)
    lines = [
        (
            row["case"],
            row["error"] or "yes",
            "yes" if row["same"] == "True" else "no",
            row["steady"],
            row["waits"] or ("none" if int(row["steady"]) else "no steady step in this run"),
        )
        for row in rows
        if row["steady"]
    ]
    resumed = markdown_table(("run", "trains and evaluates", "resumes exactly", "steady steps", "waits in them"), lines)
    return f"{resumed}\n\n{_pairs([row for row in rows if not row['steady']])}"


def _pairs(rows: Sequence[Mapping[str, str]]) -> str:
    """What each quantizer was combined with in the runs that were not resumed."""
    met: dict[str, list[set[str]]] = {}
    for row in rows:
        quantizer, *others = row["case"].split(", ")
        columns = met.setdefault(quantizer, [set() for _ in range(4)])
        for column, value in zip(columns, others):
            column.add(value)
    lines = [(quantizer, *(", ".join(sorted(column)) for column in columns)) for quantizer, columns in met.items()]
    wrong = [f"{row['case']}: {row['error']}" for row in rows if row["error"]]
    words = f"Trained and evaluated there, without a resume: {len(rows)} small runs, {'; '.join(wrong) or 'none with an error'}."
    return f"{words}\n\n{markdown_table(('quantizer', 'schedules', 'networks', 'compute', 'formats'), lines)}"
