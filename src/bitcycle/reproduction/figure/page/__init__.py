"""The results pages, rendered from templates: index.html, which can be read offline, README.md, and a page for each item."""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import jinja2
import yaml
from PIL import Image

from bitcycle.dataset import DATASETS
from bitcycle.reproduction.analysis.items import PAPERS, PUBLISHED
from bitcycle.reproduction.analysis.metrics import EVALUATED
from bitcycle.reproduction.analysis.verdict import COMPUTED, DECIDED, EXPLORATORY, UNDECIDED, VERDICTS, ClaimResult
from bitcycle.reproduction.figure.data import ItemData, status_line
from bitcycle.reproduction.figure.table import Table, as_markdown, number, signed

HERE = Path(__file__).parent
LISTINGS: dict[str, str] = yaml.safe_load((HERE / "listings.yaml").read_text(encoding="utf-8"))
FILTERED = ("paper", "verdict", "published_size", "scope")
BESIDE = ("published", "ours", "difference", "n")
BOARD = "Board: accuracy against training cost of all methods, which no paper compares"


@dataclass(frozen=True)
class Picture:
    """A picture: its files, PNG first, its caption and its alternative text."""

    files: Sequence[Path]
    caption: str
    alt: str

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        with Image.open(self.files[0]) as image:
            return image.size


@dataclass(frozen=True)
class Entry:
    """An item on the results page: its data, tables, picture and files, the last of which is its own page."""

    data: ItemData
    tables: Sequence[Table]
    picture: Optional[Picture]
    files: tuple[Path, ...]

    @property
    def status(self) -> str:
        """The kind of the item and the state of its runs."""
        kind = self.data.item.kind.replace("-", " ").capitalize()
        return f"{kind}. {status_line(self.data) or 'Computed from the code, no training'}"

    @property
    def listing(self) -> str:
        """Its listing, if any: an algorithm, or the datasets of this repository (hlhlp, appendix C)."""
        if self.data.item.id == "hlhlp/appC":
            return "\n".join(f"dataset={name:20} {preset.summary}" for name, preset in DATASETS.items())
        return LISTINGS.get(self.data.item.id, "")

    @property
    def links(self) -> list[tuple[str, Path]]:
        """Names and paths of its files."""
        data, item = self.data, self.data.item
        found = [(file.suffix[1:].upper(), file) for file in self.files]
        found += [("sweep file", data.file)] if data.file else []
        published = data.root / PUBLISHED / f"{item.paper}_{item.name}.csv"
        return found + ([("published numbers", published)] if data.published else [])


def environment(folder: Path) -> jinja2.Environment:
    """The template environment; links are relative to `folder`."""
    escaped = jinja2.select_autoescape(["html.j2"])
    loader = jinja2.FileSystemLoader(HERE)
    made = jinja2.Environment(loader=loader, autoescape=escaped, trim_blocks=True, keep_trailing_newline=True)
    made.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    made.filters["markdown"] = as_markdown
    made.filters["is_number"] = lambda text: bool(re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", text))
    made.filters["relative"] = lambda file: Path(os.path.relpath(file, folder)).as_posix()
    return made


# Claims


def claim_words(row: ClaimResult) -> dict[str, Any]:
    """A row of claims.csv with its displayed texts."""
    kind, words = row.verdict.replace(" ", "-"), row.verdict
    if row.verdict == "computed" and row.holds is not None:
        kind, words = ("holds", "computed: holds") if row.holds else ("fails", "computed: fails")
    elif row.leaning and not row.decided:
        of = "exploratory, " if row.verdict == EXPLORATORY else ""
        kind, words = f"{row.leaning} leaning", f"{of}leaning: {row.leaning}"
    size = {None: "", True: "inside", False: "excluded"}[row.published_inside]
    texts = {"kind": kind, "verdict_words": words, "estimate_words": estimate(row), "details": details(row)}
    return {**asdict(row), **texts, "published_size": size}


def _state(row: ClaimResult) -> int:
    """The rank of a verdict in the table: decided, computed, leaning, undecided, exploratory, and those without a test."""
    order = dict.fromkeys((*DECIDED, COMPUTED, "leaning", UNDECIDED, *VERDICTS))
    word = "leaning" if row.verdict == UNDECIDED and row.leaning else row.verdict
    return max(len(DECIDED) - 1, list(order).index(word))


def estimate(row: ClaimResult) -> str:
    """Format the estimate of a claim with its interval and unit."""
    if row.estimate is None:
        return ""
    interval = "" if row.low is None or row.high is None else f" [{signed(row.low)}, {signed(row.high)}]"
    return f"{signed(row.estimate)}{interval} {row.unit}".strip()


def details(row: ClaimResult) -> str:
    """Scope, rule, metric, numbers of seeds and runs, p-values, published effect, reason and note, in sentences."""
    verb = "are enough to decide" if (row.seeds_needed or 0) <= (row.n or 0) else "would decide"
    numbers = (
        (row.level, f"{100 * (row.level or 0):.0f} % interval"),
        (row.n, f"n = {row.n}"),
        (row.trainings, f"{row.trainings} distinct trainings"),
        (row.p_raw, f"p = {row.p_raw or 0:.3g}"),
        (row.p_corrected, f"corrected p = {row.p_corrected or 0:.3g}"),
        (row.margin, f"margin {number(row.margin)}"),
        (
            row.power,
            f"power {row.power or 0:.2f} at the published effect{' with the deviation found' * bool(row.family)}",
        ),
        (row.seeds_needed, f"{row.seeds_needed} seeds {verb} an effect of the published size"),
    )
    counts = ", ".join(words for value, words in numbers if value is not None)
    published = f"Published: {row.published_effect}" if row.published_effect else ""
    if row.published_inside is not None:
        published += " (inside of the interval)" if row.published_inside else " (excluded by the interval)"
    metric = row.metric.removeprefix(EVALUATED).replace("best", "best evaluation").replace("_", " ")
    compared = "" if metric in ("", "final") else f"Compared: {metric}"
    note = f"Note: {row.note}" if row.note else ""
    parts = [row.scope[:1].upper() + row.scope[1:], row.rule, compared, counts, published, row.reason, note]
    return ". ".join(part.rstrip(". ") for part in parts if part) + "."


# Rendering


Elsewhere = Mapping[str, Sequence[tuple[ClaimResult, Path]]]
"""Claim of a paper -> verdicts on claims of boards that test it in another regime, with the pages of these boards."""


def write_pages(
    folder: Path,
    entries: Sequence[Entry],
    claims: Sequence[ClaimResult],
    forest: Picture | None = None,
    restated: Elsewhere | None = None,
) -> None:
    """Write index.html, README.md and the page of each item to a folder; `forest` is the plot of claim intervals."""
    restated = restated or {}
    order = {name: place for place, name in enumerate(dict.fromkeys(row.claim_id for row in claims))}
    ranked = sorted(claims, key=lambda row: (_state(row), order[row.claim_id]))
    elsewhere = {name: [{**claim_words(row), "page": page} for row, page in found] for name, found in restated.items()}
    rows = [{**claim_words(row), "elsewhere": elsewhere.get(row.claim_id, [])} for row in ranked]
    papers: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.data.item.paper != "board"):
        papers.setdefault(entry.data.item.paper, []).append(entry)
    context = {
        "summary": f"{summary_of(entries, len(order))} {decided_words(claims, restated)}",
        "notes": sorted(path.name for path in (folder / "notes").glob("*.md")),
        "claims": rows,
        "counts": sorted(Counter((row["verdict_words"], row["kind"]) for row in rows).items()),
        "filters": {name: sorted({row[name] for row in rows} - {""}) for name in FILTERED},
        "forest": forest,
        "beside": beside_published(entries),
        "at_paper_scale": most_at_paper_scale(entries),
        "papers": papers,
        "about": {**PAPERS, "board": {"title": BOARD}},
        "style": (HERE / "page.css").read_text(encoding="utf-8"),
        "script": (HERE / "page.js").read_text(encoding="utf-8"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    templates = environment(folder)
    for name in ("index.html", "README.md"):
        (folder / name).write_text(templates.get_template(f"{name}.j2").render(context), encoding="utf-8")
    for entry in entries:
        entry.files[-1].parent.mkdir(parents=True, exist_ok=True)
        page = environment(entry.files[-1].parent).get_template("item.md.j2")
        entry.files[-1].write_text(page.render(entry=entry, claims=rows), encoding="utf-8")


def beside_published(entries: Sequence[Entry]) -> Table:
    """The published numbers of all items that have one of ours at the paper's setting, each once; no rows if there are none."""
    shown = ("model", "dataset", "method", "fw bits", "metric", *BESIDE, "our data")
    records = [
        {"item": entry.data.item.id, **{name: record.get(name, "") for name in shown}}
        for entry in entries
        for table in entry.tables
        for record in table.records
        if record.get("published") and record.get("ours")
    ]
    return Table.without_empty("Ours at the papers' length (data as labelled)", records, ("item", *BESIDE))


def most_at_paper_scale(entries: Sequence[Entry]) -> Entry | None:
    """The first of the items with a picture and most trainings at paper scale beside other scales; None if there are none."""

    def trainings(entry: Entry) -> int:
        found = entry.data.results.at("paper") if entry.picture and entry.data.results.scale != "paper" else None
        return len(found.runs) if found else 0

    return max(filter(trainings, entries), key=trainings, default=None)


def decided_words(claims: Sequence[ClaimResult], restated: Elsewhere) -> str:
    """How many claims are decided or computed, and how many others are so on a board only, in one sentence."""
    settled = (*DECIDED, COMPUTED)
    own = {row.claim_id for row in claims if row.verdict in settled}
    more = {name for name, found in restated.items() if any(row.verdict in settled for row, _ in found)} - own
    words = f"{len(own)} of them are decided or computed"
    return f"{words}, {len(more)} more in the regime of a board." if more else f"{words}."


def summary_of(entries: Sequence[Entry], claims: int) -> str:
    """Numbers of items, runs and claims, in one sentence."""
    entries = [entry for entry in entries if entry.data.item.paper in PAPERS]
    done = [entry.data.results for entry in entries if entry.data.results.done]
    parts = [part for results in done for part in results.parts]
    trainings = {(run.row["scale"], *run.training) for part in parts for run in part.runs}
    scales = sorted({str(part.scale) for part in parts})
    words = f" ({', '.join(scales)} scale)" if scales else ""
    counts = f"{len(done)} with runs of ours{words}: {len(trainings)} distinct trainings. {claims} claims."
    return f"{len(entries)} figures, tables and listings, {counts}"
