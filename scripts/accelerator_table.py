"""The table of settings that ran on the pretended accelerator, from the record of tests/accelerator/record.py."""

from pathlib import Path

from bitcycle.files import markdown_table, read_csv

RECORD = Path(__file__).parent.parent / "results" / "summary" / "accelerator.csv"


def accelerator_table() -> str:
    """Each recorded run: whether it finished and resumed exactly, and what its steady steps waited for."""
    lines = [
        (
            row["case"],
            "yes" if not row["error"] else row["error"],
            "yes" if row["same"] == "True" else "no",
            row["steady"],
            row["waits"] or ("none" if int(row["steady"]) else "no steady step in this run"),
        )
        for row in read_csv(RECORD)
    ]
    return markdown_table(("run", "trains and evaluates", "resumes exactly", "steady steps", "waits in them"), lines)
