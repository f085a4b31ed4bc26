"""`make figures`: every figure and table of the five papers from results/summary, and the gallery results/index.html.

Nothing is trained and nothing is downloaded. Items without runs show what the paper prints, and the command that trains them.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Optional

from rich.console import Console
from rich.progress import track

from bitcycle.analysis.claims import Finding, check_claims
from bitcycle.analysis.collect import SUMMARY, read_summary
from bitcycle.analysis.compare import Comparison, Line, as_html, as_markdown, compare, table_rows
from bitcycle.analysis.items import PUBLISHED, SWEEPS, Item, read_claims, read_items, read_published
from bitcycle.analysis.results import Results, Run, find_results, read_runs
from bitcycle.figure import better, cpt, fractrain, hlhlp, partial
from bitcycle.figure.gallery import Entry, write_gallery
from bitcycle.figure.style import ItemData, save, status_line
from bitcycle.resources import resource_root
from bitcycle.sweep.item import Sweep, read_sweep
from bitcycle.sweep.manifest import MANIFEST, read_manifest

MODULES: dict[str, ModuleType] = {
    "better": better,
    "cpt": cpt,
    "partial": partial,
    "fractrain": fractrain,
    "hlhlp": hlhlp,
}
RESULTS = Path("results")
FIGURES = Path("figures")
GALLERY = Path("index.html")
ANALYSE = "python -m bitcycle.measurement.after_sweep"


@dataclass(frozen=True)
class Places:
    """Where everything is read and written, below a folder.

    Attributes:
        root: the repository.
        target: folder of what is written, as results of the repository.
        summary: the file of finished runs; None: results/summary/runs.csv of the repository.
    """

    root: Path
    target: Path
    summary: Optional[Path] = None
    papers: Sequence[str] = field(default=tuple(MODULES))

    @property
    def runs(self) -> Path:
        """The file of finished runs."""
        return self.summary or self.root / SUMMARY


def make_all(places: Places) -> list[Entry]:
    """Write every item and the gallery; returns the entries of the gallery."""
    runs = read_runs(read_summary(places.runs), places.runs)
    items = [item for item in read_items(places.root / PUBLISHED) if item.paper in places.papers]
    found: dict[str, ItemData] = {}
    entries = []
    for item in track(items, "items", console=Console(stderr=True)):
        found[item.id] = gather(item, runs, places)
        entries.append(make_item(found[item.id], places.target / FIGURES))
    claims = read_claims(places.root / PUBLISHED)
    findings = check_claims(
        [claim for claim in claims if claim.item in found], {key: data.results for key, data in found.items()}
    )
    _write_findings(findings, places.target / "summary" / "claims.csv")
    write_gallery(places.target / GALLERY, entries, findings)
    return entries


def gather(item: Item, runs: Sequence[Run], places: Places) -> ItemData:
    """Everything that is known of an item."""
    file = item.sweep_file(places.root / SWEEPS)
    sweep = read_sweep(file) if file else Sweep()
    published = places.root / PUBLISHED
    return ItemData(
        item,
        find_results(read_manifest(manifest_of(file, places.root)), runs) if file else Results(),
        read_published(item, published),
        read_published(item, published, "_digitized"),
        item.command(places.root / SWEEPS),
        places.root / "conf",
        sweep.note,
        f"{ANALYSE} {file.parent.name}/{file.stem}" if file and sweep.analyses else "",
    )


def manifest_of(sweep: Path, root: Path) -> Path:
    """The manifest of a sweep file."""
    return root / MANIFEST / sweep.parent.name / f"{sweep.stem}.csv"


def comparison_of(item: Item) -> Comparison:
    """How the numbers of an item are found in our runs."""
    module = MODULES[item.paper]
    found = module.COMPARISONS.get(item.name, module.COMPARISON)
    assert isinstance(found, Comparison)
    return found


def make_item(data: ItemData, folder: Path) -> Entry:
    """Write the picture of an item, if it has one, and the table of its numbers; returns its entry in the gallery."""
    item, path = data.item, folder / data.item.paper / data.item.name
    figures = MODULES[item.paper].FIGURES
    pictures = save(figures[item.name](data), path) if item.name in figures else []
    lines = compare([*data.published, *data.digitized], data.results, comparison_of(item))
    files = [*pictures, *write_tables(lines, path, data)]
    return Entry(data, lines, pictures[0] if pictures else None, tuple(files))


def write_tables(lines: Sequence[Line], path: Path, data: ItemData) -> Iterator[Path]:
    """The table of an item as CSV, Markdown and HTML; nothing where there are no numbers."""
    if not lines:
        return
    headings, rows = table_rows(lines)
    title = f"{data.item.id}: {data.item.title}"
    state = status_line(data) or "computed without training"
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([headings, *rows])
    table = as_html(headings, rows)
    texts = {
        ".csv": stream.getvalue(),
        ".md": f"# {title}\n\n{state}\n\n{as_markdown(headings, rows)}",
        ".html": f"<!doctype html>\n<meta charset='utf-8'>\n<title>{title}</title>\n<h1>{title}</h1>\n<p>{state}</p>\n{table}",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in texts.items():
        file = path.with_name(path.name + suffix)
        file.write_text(text)
        yield file


def _write_findings(findings: Sequence[Finding], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("claim", "verdict", "scale", "measured", "published", "reason"))
        for found in findings:
            writer.writerow(
                (found.claim.id, found.verdict, found.scale, found.measured, found.claim.effect, found.reason)
            )


def main() -> None:
    """Make everything in this repository; papers named on the command line alone, without the gallery of the others."""
    papers = tuple(sys.argv[1:]) or tuple(MODULES)
    entries = make_all(Places(resource_root(), RESULTS, SUMMARY, papers=papers))
    drawn = sum(entry.picture is not None for entry in entries)
    with_runs = sum(bool(entry.data.results.done) for entry in entries)
    print(f"{RESULTS / GALLERY}: {len(entries)} items, {drawn} pictures, {with_runs} with runs of ours")


if __name__ == "__main__":
    main()
