"""The results page, the README of the results and the page of each item, from templates; no network is needed to read them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Optional

import jinja2
import yaml
from PIL import Image

from bitcycle.analysis.items import PAPERS, PUBLISHED
from bitcycle.analysis.verdict import ClaimResult
from bitcycle.configuration import first_comment
from bitcycle.figure.data import ItemData, status_line
from bitcycle.figure.table import Table, as_markdown, number, signed

HERE = Path(__file__).parent
LINKS = {
    "better": "https://arxiv.org/abs/2403.02243",
    "cpt": "https://arxiv.org/abs/2101.09868",
    "partial": "https://openreview.net/forum?id=H6ZWlQrPGS2",
    "fractrain": "https://arxiv.org/abs/2012.13113",
}
"""Where the papers are; HLHLp has no free copy that we know of."""


BOARD = "Board: accuracy against training cost of all methods, which no paper compares"


@dataclass(frozen=True)
class Picture:
    """A picture: its files, PNG first, what stands below it and what it says to those who do not see it."""

    files: Sequence[Path]
    caption: str
    alt: str


class Entry(NamedTuple):
    """One item of the page: what is known, its tables, its picture, all its files."""

    data: ItemData
    tables: Sequence[Table]
    picture: Optional[Picture]
    files: tuple[Path, ...]


@cache
def environment() -> jinja2.Environment:
    """The templates."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=lambda name: bool(name) and ".html" in str(name),
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    made.filters["markdown"] = as_markdown
    made.filters["is_number"] = lambda text: bool(re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", text))
    return made


@cache
def listings() -> dict[str, str]:
    """Item -> its algorithm as this code has it."""
    return dict(yaml.safe_load((HERE / "listings.yaml").read_text()))


def listing_of(data: ItemData) -> str:
    """The listing of an item, if it has one: an algorithm, or the data sets of this repository (hlhlp, appendix C)."""
    if data.item.id == "hlhlp/appC":
        files = sorted((data.root / "conf" / "dataset").glob("*.yaml"))
        return "\n".join(f"dataset={file.stem:20} {first_comment(file)}" for file in files)
    return listings().get(data.item.id, "")


# Claims


def claim_words(row: ClaimResult) -> dict[str, Any]:
    """A row of claims.csv with the words that are shown."""
    kind, words = row.verdict.replace(" ", "-"), row.verdict
    if row.verdict == "computed" and row.holds is not None:
        kind, words = ("holds", "computed: holds") if row.holds else ("fails", "computed: fails")
    elif row.verdict in ("supported", "contradicted") and not row.decided:
        kind, words = f"{kind} leaning", f"leaning: {row.verdict}"
    elif row.leaning:
        kind, words = f"{row.leaning} leaning", f"leaning: {row.leaning}"
    return {
        **asdict(row),
        "kind": kind,
        "verdict_words": words,
        "estimate_words": estimate(row),
        "details": details(row),
    }


def estimate(row: ClaimResult) -> str:
    """The estimate of a claim with its interval and unit."""
    if row.estimate is None:
        return ""
    interval = "" if row.low is None or row.high is None else f" [{signed(row.low)}, {signed(row.high)}]"
    return f"{signed(row.estimate)}{interval} {row.unit}".strip()


def details(row: ClaimResult) -> str:
    """Scope, rule, probabilities, numbers of seeds and trainings, and the reason, in sentences."""
    level = f"{100 * row.level:.0f} % interval" if row.level else ""
    counts = ", ".join(
        words
        for value, words in (
            (row.n, f"n = {row.n}"),
            (row.trainings, f"{row.trainings} distinct trainings"),
            (row.p_raw, f"p = {number(row.p_raw)}"),
            (row.p_corrected, f"corrected p = {number(row.p_corrected)}"),
            (row.margin, f"margin {number(row.margin)}"),
            (row.seeds_needed, f"{row.seeds_needed} seeds would decide an effect of the published size"),
        )
        if value is not None
    )
    parts = [row.scope[:1].upper() + row.scope[1:], row.rule, ", ".join(filter(None, (level, counts)))]
    parts += [f"Published: {row.published_effect}" if row.published_effect else "", row.reason]
    return ". ".join(part.rstrip(". ") for part in parts if part) + "."


def counts_of(claims: Sequence[dict[str, Any]]) -> list[tuple[str, str, int]]:
    """(words, kind, number of rows) of each verdict."""
    found = Counter((row["verdict_words"], row["kind"]) for row in claims)
    return [(words, kind, count) for (words, kind), count in sorted(found.items())]


# Context of the templates


def write_pages(
    folder: Path,
    entries: Sequence[Entry],
    claims: Sequence[ClaimResult],
    forest: Picture | None = None,
) -> None:
    """Write index.html, README.md and the page of each item below a folder.

    Args:
        folder: results.
        entries: the items.
        claims: rows of claims.csv.
        forest: the picture of the intervals of claims.
    """
    rows = [claim_words(row) for row in claims]
    sections: list[dict[str, Any]] = []
    for key in dict.fromkeys(entry.data.item.paper for entry in entries):
        items = [item_context(entry, rows, folder) for entry in entries if entry.data.item.paper == key]
        sections.append({"key": key, "title": PAPERS.get(key, BOARD), "link": LINKS.get(key, ""), "items": items})
    order = list(dict.fromkeys(row["claim_id"] for row in rows))
    context = {
        "summary": summary_of(entries, rows),
        "notes": sorted(path.name for path in (folder / "notes").glob("*.md")),
        "claims": sorted(rows, key=lambda row: order.index(row["claim_id"])),
        "counts": counts_of(rows),
        "filters": [(name, sorted({row[name] for row in rows} - {""})) for name in ("paper", "verdict", "scope")],
        "forest": picture_context(forest, folder) if forest else None,
        "sections": sorted(sections, key=lambda section: section["key"] != "board"),
        "style": (HERE / "page.css").read_text(),
        "script": (HERE / "page.js").read_text(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("index.html", "README.md"):
        (folder / name).write_text(environment().get_template(f"{name}.j2").render(context))
    for section in sections:
        for item in section["items"]:
            path = folder / item["page"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(environment().get_template("item.md.j2").render(item=item))


def summary_of(entries: Sequence[Entry], rows: Sequence[dict[str, Any]]) -> str:
    """What there is of the papers, in one sentence."""
    entries = [entry for entry in entries if entry.data.item.paper in PAPERS]
    trainings = {(run.row["scale"], run.row["hash"], run.row["seed"]) for e in entries for run in e.data.results.runs}
    ran = sum(bool(entry.data.results.done) for entry in entries)
    scales = sorted({str(entry.data.results.scale) for entry in entries if entry.data.results.done})
    words = f" ({', '.join(scales)} scale)" if scales else ""
    claims = len({row["claim_id"] for row in rows})
    return (
        f"{len(entries)} figures, tables and listings, {ran} with runs of ours{words}: {len(trainings)} distinct trainings. "
        f"{claims} claims."
    )


def item_context(entry: Entry, rows: Sequence[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What the templates show of an item."""
    data, item = entry.data, entry.data.item
    claims = [{**row} for row in rows if row["item"] == item.id]
    seen: set[str] = set()
    for row in claims:
        row["first"] = row["claim_id"] not in seen
        seen.add(row["claim_id"])
    done, cells = len(data.results.done), len(data.results.cells)
    links = [(file.suffix[1:].upper(), relative(file, folder)) for file in entry.files]
    links += [("sweep file", relative(data.file, folder))] if data.file else []
    published = data.root / PUBLISHED / f"{item.paper}_{item.name}.csv"
    links += [("published numbers", relative(published, folder))] if data.published else []
    return {
        **asdict(item),
        "id": item.id,
        "kind": item.kind.replace("-", " ").capitalize(),
        "status": status_line(data) or "Computed from the code, no training",
        "short": f"{done} of {cells} cells" if cells else "",
        "picture": {**picture_context(entry.picture, folder), "file": entry.picture.files[0].name}
        if entry.picture
        else None,
        "listing": listing_of(data),
        "claims": claims,
        "tables": entry.tables,
        "commands": data.commands,
        "note": data.sweep.note.strip(),
        "links": links,
        "page": f"figures/{item.paper}/{item.name}.md",
    }


def picture_context(picture: Picture, folder: Path) -> dict[str, Any]:
    """What the templates show of a picture."""
    with Image.open(picture.files[0]) as image:
        width, height = image.size
    source, full = (relative(picture.files[place], folder) for place in (0, -1))
    words = {"alt": picture.alt, "caption": picture.caption}
    return {"full": full, "src": source, "width": width, "height": height, **words}


def relative(file: Path, folder: Path) -> str:
    """The path of a file from a folder, below it or elsewhere."""
    return Path(os.path.relpath(file, folder)).as_posix()
