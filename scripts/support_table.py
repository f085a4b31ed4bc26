"""The table of supported networks in docs/own-models.md, from the record of scripts/support_matrix.py."""

from pathlib import Path

from bitcycle.files import markdown_table, read_csv

RECORD = Path(__file__).parent.parent / "results" / "summary" / "support.csv"


def support_table() -> str:
    """Each recorded network with its shares and its deviation from the reference."""
    lines = [
        (
            *(row["library"], f"`{row['network']}`", row["products"]),
            *(f"{100 * float(row[name]):.0f} %" for name in ("share", "out_of_reach")),
            row["deviation"],
        )
        for row in read_csv(RECORD)
    ]
    titles = ("library", "network", "quantized products", "quantized", "out of reach", "deviation")
    return markdown_table(titles, lines)
