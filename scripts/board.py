"""Excerpts of the boards' pages for README.md, docs/formats.md and results/notes/board.md."""

from __future__ import annotations

import re
from pathlib import Path

from bitcycle.files import markdown_table, read_csv

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "results" / "figures" / "board" / "methods.md"


def board() -> str:
    """The board's plot with scale, number of runs and caption, taken from its page."""
    picture = re.search(r"^!\[.*\]\((.*)\)\n\n(.*)$", PAGE.read_text(), re.MULTILINE)
    if picture is None:
        return "There is no plot yet: less than half of the board has been trained."
    status = PAGE.read_text().splitlines()[2].partition(" ")[2]
    what = "Accuracy against training cost of all methods of the five papers"
    file = (PAGE.parent / picture[1]).relative_to(ROOT)
    return f"![{what}]({file})\n\n{what}, on one network: {status}. {picture[2]}"


def board_list(name: str) -> str:
    """A board's settings with at least three seeds, grouped by the 95 % interval of their difference to static 8 bits."""
    found: dict[str, list[str]] = {"better": [], "worse": [], "indistinguishable": []}
    for row in read_csv(PAGE.with_name(f"{name}.csv"), missing_ok=True):
        gap = next((value for column, value in row.items() if column.startswith("difference to static 8 bits")), "")
        between = row["95 % interval of the difference"]
        if not between or int(row["n"].partition(" ")[0]) < 3:
            continue
        low, high = (float(end) for end in between.split(" to "))
        verdict = "better" if low > 0 else "worse" if high < 0 else "indistinguishable"
        cost = row["cost relative to static 8 bits"]
        found[verdict].append(f"{row['method']} ({gap}, {between}; cost {cost}, n = {row['n']})")
    return "\n".join(f"- **{name}**: {'; '.join(methods) or 'none'}." for name, methods in found.items())


def recipes_board() -> str:
    """The arms of the board of 4-bit recipes with their gaps to float, then the claims of the recipes' sources with verdicts."""
    rows = read_csv(PAGE.with_name("four_bit.csv"), missing_ok=True)
    arms, claims = ([row for row in rows if row.get(name)] for name in ("arm", "claim"))
    if not arms:
        return "No run of this board is recorded yet: nothing is known about the benefit of an ingredient or schedule."
    shown = "arm", "steps", "bits per byte", "n", "gap to float", "95 % interval", "cost relative to float"
    judged = "claim", "source", "verdict", "with minus without, bits per byte", "95 % interval", "n", "remark"
    tables = [
        markdown_table(names, [[row[name] for name in names] for row in found])
        for names, found in ((shown, arms), (judged, claims))
    ]
    return f"{arms[0]['scale']} scale; n is the number of seeds.\n\n{tables[0]}\n\n{tables[1]}"
