"""`make figures`: every figure and table of the five papers from results/summary, and the page results/index.html.

Nothing is trained and nothing is downloaded. A picture is drawn again only where what it shows, or the code that draws it, has
changed. Items without runs show what the paper prints, and the command that trains them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import matplotlib
from rich.console import Console
from rich.progress import track

from bitcycle.analysis.aggregation import read_runs
from bitcycle.analysis.claims import read_claims
from bitcycle.analysis.collect import SUMMARY, curve_name, read_summary
from bitcycle.analysis.contrast import Pool
from bitcycle.analysis.items import PUBLISHED, SWEEPS, Item, read_items
from bitcycle.analysis.verdict import judge, write_claims
from bitcycle.figure import board, landscape, plots, schematic
from bitcycle.figure.data import ItemData, gather
from bitcycle.figure.page import Entry, Picture, write_pages
from bitcycle.figure.run import bits_and_loss, bits_of_blocks, range_tests
from bitcycle.figure.style import Drawing, save
from bitcycle.figure.table import as_records, tables_of
from bitcycle.files import digest_of, write_csv
from bitcycle.measurement.artifacts import ANALYSES, run_name
from bitcycle.resources import resource_root
from bitcycle.sweep.registry import read_sweep

RESULTS = Path("results")
FIGURES = Path("figures")
DRAWN = ".drawn.json"
"""What was drawn from which inputs, beside the pictures; not committed."""
ROOMS = ("analysis", "figure", "measurement", "schedule")
"""Packages whose code draws."""


KINDS: dict[str, Callable[..., Optional[Drawing]]] = {
    function.__name__: function
    for function in (
        *(plots.tradeoff, plots.points_by_setting, plots.curves, plots.splits, board.draw_board),
        *(landscape.contours, landscape.planes, landscape.measured),
        *(range_tests, bits_and_loss, bits_of_blocks),
        *(schematic.diagram, schematic.suite_picture, schematic.cosine_picture, schematic.static_and_cyclic),
    )
}
"""Kind of picture -> what draws it, from the item and the options of papers/PAPER.yaml; `look` is the fact of `plots.looks`."""


def draw_item(data: ItemData) -> Drawing | None:
    """The picture of an item: the first of those that its paper's file names which has its runs; None without any."""
    several = ({**picture} for picture in data.spec.pictures)
    drawings = (KINDS[picture.pop("kind")](data, **picture) for picture in several)
    return next((drawing for drawing in drawings if drawing is not None), None)


def make_all(root: Path, target: Path, summary: Path) -> list[Entry]:
    """Write every item of a repository with the runs of the file `summary`, and the pages, below `target`; returns the entries of
    the page."""
    pool = Pool(read_runs(read_summary(summary), summary))
    items = read_items(root / PUBLISHED) + board_items(root / SWEEPS)
    with Drawn(target / FIGURES / DRAWN) as drawn:
        several = track(items, "items", console=Console(stderr=True))
        entries = [make_item(gather(item, pool, root), target / FIGURES, drawn) for item in several]
        found = {entry.data.item.id: entry.data.results for entry in entries}
        claims = judge(read_claims(root / PUBLISHED), found, pool)
        write_claims(claims, target / "summary" / "claims.csv")
        shown = [row for row in claims if row.estimate is not None and (row.decided or row.leaning)]
        inputs = [vars(row) for row in shown]
        intervals = drawn.picture("claims", inputs, target / "pictures" / "claims", lambda: plots.forest(shown))
    write_pages(target, entries, claims, intervals)
    return entries


def board_items(sweeps: Path) -> list[Item]:
    """The boards: accuracy against cost of all methods, which no paper has."""
    named = ((file.stem, read_sweep(file)) for file in sorted((sweeps / "board").glob("*.yaml")))
    titles = ((name, sweep.title.partition(": ")[2] or sweep.title, sweep.runs) for name, sweep in named)
    return [Item("board", name, "board", title, f"board/{name}", runs) for name, title, runs in titles]


def make_item(data: ItemData, folder: Path, drawn: Drawn) -> Entry:
    """Write the picture of an item, if it has one, and its tables as CSV; returns its entry in the page."""
    item, path = data.item, folder / data.item.paper / data.item.name
    picture = None
    if data.spec.pictures:
        picture = drawn.picture(item.id, inputs_of(data), path, lambda: titled(draw_item(data), data))
    tables = board.tables(data) if item.paper == "board" else tables_of(data)
    records, table, page = as_records(tables), *(path.with_name(f"{path.name}.{ending}") for ending in ("csv", "md"))
    if records:
        write_csv(table, list(dict.fromkeys(name for record in records for name in record)), records)
    files = (*(picture.files if picture else ()), *([table] if records else ()), page)  # `write_pages` writes that one
    return Entry(data, tables, picture, files)


def titled(drawing: Drawing | None, data: ItemData) -> Drawing | None:
    """A picture with a title of one line: the item, the scale of what is drawn, and whether it stands in for the paper's."""
    if drawing is not None:
        proxy = ", proxy" if any(cell.stand_ins for cell in data.results.done) else ""
        ours = f" ({data.results.scale} scale{proxy})" if data.complete_enough else ""
        text = f"{data.item.id}: {data.item.title}{ours or (' (published)' if data.results.cells else '')}"
        drawing.figure.suptitle(text, fontsize=min(10.0, drawing.figure.get_figwidth() * 118 / len(text)))
    return drawing


# What is drawn already


def inputs_of(data: ItemData) -> list[Any]:
    """All that the picture of an item is drawn from."""
    runs = []
    for run in data.results.runs:
        files = [run.curves / curve_name(run.row)]
        files += sorted((run.curves.parent / ANALYSES).glob(f"{run_name(run.row)}-*.csv"))
        runs.append([dict(run.row), digest_of(files)])
    cells = [[cell.paper, [run.training for run in cell.runs]] for cell in data.results.cells]
    noise = sorted({data.pool.deviation(run, "final") for run in data.results.runs}, key=str)
    return [data.item.title, data.results.scale, cells, runs, list(data.published), list(data.digitized), noise]


class Drawn:
    """The pictures that are drawn already, with digests of what they were drawn from and of their files."""

    def __init__(self, path: Path) -> None:
        package = Path(__file__).parent.parent
        every = sorted(file for room in ROOMS for file in (package / room).rglob("*"))
        self.code = matplotlib.__version__ + digest_of(file for file in every if file.suffix in (".py", ".yaml"))
        self.path = path
        self.known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def __enter__(self) -> Drawn:
        return self

    def __exit__(self, *error: object) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.known, indent=0, sort_keys=True) + "\n")

    def picture(self, name: str, inputs: list[Any], path: Path, draw: Callable[[], Drawing | None]) -> Picture | None:
        """The picture of `path` without ending: drawn, unless it is there and all that it is drawn from is the same.

        None where `draw` has nothing to draw; stale files are removed then.
        """
        text = json.dumps([self.code, inputs], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        files = [path.with_name(path.name + suffix) for suffix in (".png", ".svg")]
        known = self.known.get(name, {})
        if known.get("inputs") != digest or known.get("files") != digest_of(files):
            if made := draw():
                save(made.figure, path)
            else:
                for file in files:
                    file.unlink(missing_ok=True)
            known = {"inputs": digest, "files": digest_of(files), "caption": made.caption if made else None}
            self.known[name] = known
        caption = known["caption"]
        return None if caption is None else Picture(files, caption, f"{name}. {caption}")


def main() -> None:
    """Make everything in this repository."""
    entries = make_all(resource_root(), RESULTS, SUMMARY)
    drawn = sum(entry.picture is not None for entry in entries)
    with_runs = sum(bool(entry.data.results.done) for entry in entries)
    print(f"{RESULTS / 'index.html'}: {len(entries)} items, {drawn} pictures, {with_runs} with runs of ours")


if __name__ == "__main__":
    main()
