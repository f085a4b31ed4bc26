"""Excerpts of the boards' pages for README.md, docs/formats.md and results/notes/board.md."""

from __future__ import annotations

import re
from pathlib import Path

from bitcycle.files import markdown_table, read_csv

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "results" / "figures" / "board" / "all_images.md"


def board() -> str:
    """The board's plot with network, data, steps, seeds and what static 8 bits reaches, from its page and table."""
    picture = re.search(r"^!\[.*\]\((.*)\)\n\n(.*)$", PAGE.read_text(), re.MULTILINE)
    rows = read_csv(PAGE.with_suffix(".csv"), missing_ok=True)
    static = next((row for row in rows if row["method"] == "static 8 bits"), None)
    if picture is None or static is None:
        return "There is no plot yet: less than a quarter of the board has been trained."
    file = (PAGE.parent / picture[1]).relative_to(ROOT)
    what = f"{static['network and data']}, all 50,000 training images, {static['steps']} steps, n = {static['n']}"
    reached = (
        f"{static['scale']} scale, a proxy for 32x32; static 8 bits reaches {static['result']} % of the test images"
    )
    return f"![Accuracy against training cost]({file})\n\n{what} ({reached}). {picture[2]}"


def board_list(name: str) -> str:
    """A board's settings that share at least three seeds with static 8 bits, grouped by the 95 % interval of the difference."""
    found: dict[str, list[str]] = {"better": [], "worse": [], "indistinguishable": []}
    for row in read_csv(PAGE.with_name(f"{name}.csv"), missing_ok=True):
        gap = next((value for column, value in row.items() if column.startswith("difference to static 8 bits")), "")
        between = row["95 % interval of the difference"]
        pairs = row["n of the difference"]
        if not between or int(pairs) < 3:
            continue
        low, high = (float(end) for end in between.split(" to "))
        verdict = "better" if low > 0 else "worse" if high < 0 else "indistinguishable"
        cost = row["cost relative to static 8 bits"]
        found[verdict].append(f"{row['method']} ({gap}, {between}; cost {cost}, n = {pairs})")
    return "\n".join(f"- **{name}**: {'; '.join(methods) or 'none'}." for name, methods in found.items())


def gains_table() -> str:
    """What schedules gain over static 8 bits of equal cost, by the training accuracy of static 8 bits."""
    rows = read_csv(PAGE.with_name("gain.csv"), missing_ok=True)
    known = [row for row in rows if row.get("training accuracy of static 8 bits")]
    if not known:
        return "No run of this board is recorded yet."
    shown = (
        "training accuracy of static 8 bits",
        "network and data",
        "steps",
        "schedule",
        "price of fewer steps",
        "gain",
    )
    columns = *shown, "95 % interval", "n"
    known.sort(key=lambda row: (float(row[shown[0]]), row["schedule"]))
    return markdown_table(columns, [[row[name] for name in columns] for row in known])


def fewer_bits_table() -> str:
    """Schedules and static precisions of few bits by cost, then the verdicts on what they were compared for."""
    rows = read_csv(PAGE.with_name("fewer_bits.csv"), missing_ok=True)
    arms, claims = ([row for row in rows if row.get(name)] for name in ("method", "claim"))
    if not arms:
        return "No run of this board is recorded yet."
    shown = "method", "cost relative to static 8 bits", "result", "95 % interval", "n"
    header = "method", "cost relative to static 8 bits", "test accuracy", "95 % interval", "n"
    table = markdown_table(header, [[row[name] for name in shown] for row in arms])
    gap = "difference, test accuracy (%)"
    judged = [
        f"- {row['claim']}: {row['verdict']}, {row[gap]} points ({row['95 % interval']}), n = {row['n']}."
        for row in claims
    ]
    where = f"{arms[0]['network and data']}, all 50,000 images, {arms[-1]['steps']} steps, {arms[0]['scale']} scale"
    return "\n".join([f"{where}:\n", table, "", *judged])


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
