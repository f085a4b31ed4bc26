"""`make figures`: every figure and table of the five papers from results/summary, and the page results/index.html.

Nothing is trained and nothing is downloaded. A picture is drawn again only where what it shows, or the code that draws it, has
changed. Items without runs show what the paper prints, and the command that trains them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional

from rich.console import Console
from rich.progress import track

from bitcycle.analysis.aggregation import read_runs
from bitcycle.analysis.claims import read_claims
from bitcycle.analysis.collect import SUMMARY, read_summary
from bitcycle.analysis.contrast import Pool
from bitcycle.analysis.items import PAPERS, PUBLISHED, SWEEPS, Item, read_items
from bitcycle.analysis.verdict import judge, write_claims
from bitcycle.figure import board, landscape, plots, run, schematic
from bitcycle.figure.data import ItemData, gather
from bitcycle.figure.drawn import Drawn, inputs_of
from bitcycle.figure.page import Entry, write_pages
from bitcycle.figure.style import Drawing
from bitcycle.figure.table import as_records, tables_of
from bitcycle.files import write_csv
from bitcycle.resources import resource_root
from bitcycle.sweep.registry import read_sweep

RESULTS = Path("results")
FIGURES = Path("figures")
DRAWN = ".drawn.json"
"""What was drawn from which inputs, beside the pictures; not committed."""


KINDS: dict[str, Callable[..., Optional[Drawing]]] = {
    function.__name__: function
    for function in (
        *(plots.tradeoff, plots.points_by_setting, plots.curves, plots.splits, board.draw_board),
        *(landscape.contours, landscape.planes, landscape.measured),
        *(run.range_tests, run.bits_and_loss, run.bits_of_blocks),
        *(schematic.diagram, schematic.suite_picture, schematic.cosine_picture, schematic.static_and_cyclic),
    )
}
"""Kind of picture -> what draws it, from the item and the options of papers/PAPER.yaml; `look` is the fact of `plots.looks`."""


def draw_item(data: ItemData) -> Drawing | None:
    """The picture of an item: the first of those that its paper's file names which has its runs; None without any."""
    several = ({**picture} for picture in data.spec.pictures)
    drawings = (KINDS[picture.pop("kind")](data, **picture) for picture in several)
    return next((drawing for drawing in drawings if drawing is not None), None)


def make_all(
    root: Path, target: Path, summary: Path | None = None, papers: Sequence[str] = tuple(PAPERS)
) -> list[Entry]:
    """Write every item of some papers of a repository, and the pages, below `target`; returns the entries of the page.

    The finished runs are those of the file `summary`; None: of results/summary/runs.csv of the repository.
    """
    path = summary or root / SUMMARY
    pool = Pool(read_runs(read_summary(path), path))
    items = [item for item in read_items(root / PUBLISHED) if item.paper in papers] + board_items(root / SWEEPS)
    with Drawn(target / FIGURES / DRAWN) as drawn:
        several = track(items, "items", console=Console(stderr=True))
        entries = [make_item(gather(item, pool, root), target / FIGURES, drawn) for item in several]
        found = {entry.data.item.id: entry.data.results for entry in entries}
        claims = judge(read_claims(root / PUBLISHED, papers), found, pool)
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


def main() -> None:
    """Make everything in this repository."""
    entries = make_all(resource_root(), RESULTS, SUMMARY)
    drawn = sum(entry.picture is not None for entry in entries)
    with_runs = sum(bool(entry.data.results.done) for entry in entries)
    print(f"{RESULTS / 'index.html'}: {len(entries)} items, {drawn} pictures, {with_runs} with runs of ours")


if __name__ == "__main__":
    main()
