"""`make figures`: every figure and table of the five papers from results/summary, and the page results/index.html.

Nothing is trained or downloaded, and unchanged pictures are not redrawn. Items without runs show the published numbers and the
command that trains their runs.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import matplotlib
from rich.console import Console
from rich.progress import track

from bitcycle.cache import cached
from bitcycle.door import parser_of
from bitcycle.files import digest_of, read_csv, resource_root, write_csv
from bitcycle.picture.layout import render, write_files
from bitcycle.reproduction.analysis import history
from bitcycle.reproduction.analysis.cells import distinct_runs, read_runs
from bitcycle.reproduction.analysis.claims import read_claims
from bitcycle.reproduction.analysis.collect import SUMMARY, curve_name
from bitcycle.reproduction.analysis.contrast import Pool
from bitcycle.reproduction.analysis.frozen import read_families
from bitcycle.reproduction.analysis.items import PUBLISHED, SWEEP_FOLDER, Item, read_items
from bitcycle.reproduction.analysis.verdict import ClaimResult, judge, write_claims
from bitcycle.reproduction.figure import plots
from bitcycle.reproduction.figure.board import board_verdicts
from bitcycle.reproduction.figure.data import ItemData, gather
from bitcycle.reproduction.figure.page import Entry, Picture, write_pages
from bitcycle.reproduction.figure.style import Drawing
from bitcycle.reproduction.figure.table import as_records
from bitcycle.reproduction.measurement.artifacts import ANALYSES, run_name
from bitcycle.sweep.registry import read_sweep

RESULTS = Path("results")
FIGURES = Path("figures")


def make_all(root: Path, target: Path, summary: Path) -> list[Entry]:
    """Write figures and tables of every item of a repository and the results pages to `target`, using the runs in the file
    `summary`; returns the entries of the pages."""
    busy = [(row["begin"], row["end"]) for row in read_csv(summary.with_name("busy.csv"), missing_ok=True)]
    pool = Pool(read_runs(read_csv(summary, missing_ok=True), summary), busy)
    items = read_items(root / PUBLISHED) + board_items(root / SWEEP_FOLDER)
    tracked = track(items, "items", console=Console(stderr=True))
    entries = [make_item(gather(item, pool, root), target / FIGURES) for item in tracked]
    found = {entry.data.item.id: entry.data.results for entry in entries}
    claims = judge(read_claims(root / PUBLISHED), found, pool, read_families(root / PUBLISHED))
    write_claims(claims, target / "summary" / "claims.csv")
    history.update(target / "summary" / "claims_history.csv", target / "summary" / "claims.csv")
    shown = [row for row in claims if row.estimate is not None and (row.decided or row.leaning)]
    inputs = [vars(row) for row in shown]
    intervals = write_picture("claims", inputs, target / "pictures" / "claims", lambda: plots.forest(shown))
    write_pages(target, entries, claims, intervals, restated(entries))
    return entries


def restated(entries: Iterable[Entry]) -> dict[str, list[tuple[ClaimResult, Path]]]:
    """Claim of a paper -> the verdicts on the claims of boards that test it in another regime and have runs, with the pages of
    these boards."""
    found: dict[str, list[tuple[ClaimResult, Path]]] = {}
    for entry in entries:
        for claim, row in board_verdicts(entry.data) if entry.data.item.paper == "board" else ():
            for name in claim.restates if row.estimate is not None else ():
                found.setdefault(name, []).append((row, entry.files[-1]))
    return found


def board_items(sweeps: Path) -> list[Item]:
    """The boards, which compare accuracy and cost of all methods and belong to no paper."""
    named = ((file.stem, read_sweep(file)) for file in sorted((sweeps / "board").glob("*.yaml")))
    titles = ((name, sweep.title.partition(": ")[2] or sweep.title) for name, sweep in named)
    return [Item("board", name, "board", title, f"board/{name}") for name, title in titles]


def make_item(data: ItemData, folder: Path) -> Entry:
    """Write the picture of an item, if it has one, and its tables as CSV; returns its entry."""
    item, path = data.item, folder / data.item.paper / data.item.name
    picture = None
    if data.spec.pictures:
        picture = write_picture(item.id, inputs_of(data.drawn), path, lambda: draw_item(data.drawn))
    tables = resolve_name(f"{__package__}.{data.spec.tables}")(data)
    records, table, page = as_records(tables), *(path.with_name(f"{path.name}.{ending}") for ending in ("csv", "md"))
    if records:
        write_csv(table, list(dict.fromkeys(name for record in records for name in record)), records)
    files = (*(picture.files if picture else ()), *([table] if records else ()), page)  # written by `write_pages`
    return Entry(data, tables, picture, files)


# Pictures


def draw_item(data: ItemData) -> Drawing | None:
    """Draw the first picture in an item's description whose runs exist; None if there is none. The title, of one line, says
    whether they are a proxy for the paper's."""
    descriptions = ({**picture} for picture in data.spec.pictures)
    drawings = (resolve_name(f"{__package__}.{picture.pop('kind')}")(data, **picture) for picture in descriptions)
    drawing = next((drawing for drawing in drawings if drawing is not None), None)
    if drawing is not None:
        proxy = ", proxy" if any(cell.is_proxy for cell in data.results.shown) else ""
        ours = f" ({data.results.scales} scale{proxy})" if data.results.done else ""
        text = f"{data.item.id}: {data.item.title}{ours or (' (published)' if data.results.cells else '')}"
        drawing.figure.suptitle(text, fontsize=min(10.0, drawing.figure.get_figwidth() * 118 / len(text)))
        if data.beside:
            drawing = drawing._replace(caption=f"{drawing.caption} Also shown: runs of {', '.join(data.spec.beside)}.")
    return drawing


def inputs_of(data: ItemData) -> list[Any]:
    """Everything that the picture of an item depends on, except code."""
    runs, every, pool = [], distinct_runs(data.results.shown), data.pool
    for run in every:
        files = [run.curves / curve_name(run.row)]
        files += sorted((run.curves.parent / ANALYSES).glob(f"{run_name(run.row)}-*.csv"))
        runs.append([dict(run.row), digest_of(files)])
    shown = (*data.results.cells, *data.results.shown)
    cells = [[cell.paper, [run.training for run in cell.runs]] for cell in shown]
    noise = sorted({pool.deviation(run, data.spec.column) for run in every}, key=str)
    over_time = any(picture.get("time") for picture in data.spec.pictures)
    shared = [pool.shared_machine(run) for run in every] if over_time else []
    numbers = list(data.published), list(data.digitized)
    return [data.item.title, data.results.scale, cells, runs, *numbers, noise, shared, data.sweep.analyses]


def write_picture(name: str, inputs: list[Any], path: Path, draw: Callable[[], Drawing | None]) -> Picture | None:
    """Write a picture to `path` with the suffixes .png and .svg, drawing it only if inputs or code have changed. If `draw`
    returns None there is no picture, and stale files are removed."""

    def rendered() -> tuple[str, dict[str, bytes]]:
        drawing = draw()
        return (drawing.caption, render(drawing.figure)) if drawing else ("", {})

    identity = json.dumps([matplotlib.__version__, name, inputs], sort_keys=True, default=str)
    caption, content = cached("picture", identity, rendered)
    files = write_files(path, content)
    return Picture(files, caption, f"{name}. {caption}") if content else None


def main() -> None:
    """Make all results of this repository."""
    parser_of("figures").parse_args()
    entries = make_all(resource_root(), RESULTS, SUMMARY)
    drawn = sum(entry.picture is not None for entry in entries)
    with_runs = sum(bool(entry.data.results.done) for entry in entries)
    print(f"{RESULTS / 'index.html'}: {len(entries)} items, {drawn} pictures, {with_runs} with runs of ours")


if __name__ == "__main__":
    main()
