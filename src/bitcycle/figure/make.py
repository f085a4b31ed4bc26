"""`make figures`: every figure and table of the five papers from results/summary, and the page results/index.html.

Nothing is trained and nothing is downloaded. A picture is drawn again only where what it shows, or the code that draws it, has
changed. Items without runs show what the paper prints, and the command that trains them.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

import matplotlib
from rich.console import Console
from rich.progress import track

from bitcycle.analysis.claims import check_claims
from bitcycle.analysis.collect import SUMMARY, read_summary
from bitcycle.analysis.curves import curve_name
from bitcycle.analysis.items import PAPERS, PUBLISHED, SWEEPS, Item, read_claims, read_items, read_published
from bitcycle.analysis.results import Results, Run, find_results, read_runs
from bitcycle.analysis.verdict import ClaimResult, write_claims
from bitcycle.figure import board
from bitcycle.figure.data import ItemData, Noise, noise_of
from bitcycle.figure.page import Entry, Picture, write_pages
from bitcycle.figure.plots import forest
from bitcycle.figure.style import Drawing, save
from bitcycle.figure.table import Spec, Table, as_records, tables_of
from bitcycle.measurement.artifacts import ANALYSES, run_name
from bitcycle.resources import resource_root
from bitcycle.sweep.item import Sweep, read_sweep
from bitcycle.sweep.manifest import MANIFEST, read_manifest

RESULTS = Path("results")
FIGURES = Path("figures")
DRAWN = ".drawn.json"
"""What was drawn from which inputs, beside the pictures; not committed."""
ANALYSE = "python -m bitcycle.measurement.after_sweep"


@dataclass(frozen=True)
class Places:
    """Where everything is read and written.

    Attributes:
        root: the repository.
        target: folder of what is written, as results of the repository.
        summary: the file of finished runs; None: results/summary/runs.csv of the repository.
        papers: keys of those to make.
    """

    root: Path
    target: Path
    summary: Optional[Path] = None
    papers: Sequence[str] = field(default=tuple(PAPERS))

    @property
    def runs(self) -> Path:
        """The file of finished runs."""
        return self.summary or self.root / SUMMARY


def module_of(paper: str) -> ModuleType | None:
    """The module with the figures of a paper; None where there is none."""
    name = f"bitcycle.figure.{paper}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def make_all(places: Places) -> list[Entry]:
    """Write every item and the pages; returns the entries of the page."""
    runs = read_runs(read_summary(places.runs), places.runs)
    noise = noise_of(run.row for run in runs)
    items = [item for item in read_items(places.root / PUBLISHED) if item.paper in places.papers]
    entries = []
    with Drawn(places.target / FIGURES / DRAWN) as drawn:
        for item in track(items, "items", console=Console(stderr=True)):
            entries.append(make_item(gather(item, runs, noise, places), places.target / FIGURES, drawn))
        boards = make_boards(runs, noise, places, drawn)
        claims = claim_results(places, entries)
        intervals = draw_forest(claims, places.target / "pictures" / "claims", drawn)
    write_pages(places.target, entries, claims, intervals, boards)
    return entries


def gather(item: Item, runs: Sequence[Run], noise: Noise, places: Places) -> ItemData:
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
        file.relative_to(places.root).as_posix() if file else "",
        noise,
    )


def manifest_of(sweep: Path, root: Path) -> Path:
    """The manifest of a sweep file."""
    return root / MANIFEST / sweep.parent.name / f"{sweep.stem}.csv"


def spec_of(item: Item) -> Spec:
    """How the numbers of an item are found in our runs."""
    module = module_of(item.paper)
    found = module.SPECS.get(item.name, module.SPEC) if module else Spec()
    assert isinstance(found, Spec)
    return found


def make_boards(runs: Sequence[Run], noise: Noise, places: Places, drawn: Drawn) -> list[Entry]:
    """The boards that have runs: accuracy against cost of all methods."""
    found = []
    for file in sorted((places.root / SWEEPS / "board").glob("*.yaml")):
        sweep = read_sweep(file)
        data = gather(
            Item("board", file.stem, "board", sweep.title, f"board/{file.stem}", sweep.runs), runs, noise, places
        )
        path = places.target / FIGURES / "board" / file.stem
        tables = [board.table(data)] if data.results.done else []
        picture = drawn.picture(data.item.id, inputs_of(data), path, lambda data=data: titled(board.draw(data), data))
        files = [*(picture.files if picture else ()), *write_csv(tables, path.with_name(f"{path.name}.csv"))]
        found += [Entry(data, tables, picture, tuple(files))] if tables else []
    return found


def make_item(data: ItemData, folder: Path, drawn: Drawn) -> Entry:
    """Write the picture of an item, if it has one, and its tables as CSV; returns its entry in the page."""
    item, path = data.item, folder / data.item.paper / data.item.name
    module = module_of(item.paper)
    draw = module.FIGURES.get(item.name) if module else None
    picture = drawn.picture(item.id, inputs_of(data), path, lambda: titled(draw(data), data)) if draw else None
    tables = tables_of(data, spec_of(item))
    files = [*(picture.files if picture else ()), *write_csv(tables, path.with_name(f"{path.name}.csv"))]
    return Entry(data, tables, picture, tuple(files))


def titled(drawing: Drawing | None, data: ItemData) -> Drawing | None:
    """A picture with a title of one line: the item, and the scale of what is drawn."""
    if drawing is not None:
        scale = (
            f" ({data.results.scale} scale)" if data.complete_enough else " (published)" if data.results.cells else ""
        )
        text = f"{data.item.id}: {data.item.title}{scale}"
        fitting = drawing.figure.get_figwidth() * 118 / len(text)
        drawing.figure.suptitle(text, fontsize=min(10.0, fitting))
    return drawing


def write_csv(tables: Sequence[Table], path: Path) -> list[Path]:
    """The rows of all tables of an item in one file, each with its source; none where there are no rows."""
    records = as_records(tables)
    if not records:
        return []
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as stream:
        columns = list(dict.fromkeys(name for record in records for name in record))
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    return [path]


# What is drawn already


def inputs_of(data: ItemData) -> list[Any]:
    """All that the picture of an item is drawn from."""
    runs = []
    for run in data.results.runs:
        files = [
            run.curves / curve_name(run.row),
            *sorted((run.curves.parent / ANALYSES).glob(f"{run_name(run.row)}-*.csv")),
        ]
        runs.append([dict(run.row), *(digest_of(file.read_bytes()) for file in files if file.exists())])
    cells = [
        [dict(cell.paper), [[run.row["hash"], run.row["seed"]] for run in cell.runs]] for cell in data.results.cells
    ]
    return [
        data.item.title,
        data.results.scale,
        cells,
        runs,
        list(data.published),
        list(data.digitized),
        data.conf.name,
    ]


def digest_of(content: bytes) -> str:
    """A digest of some content."""
    return hashlib.sha256(content).hexdigest()[:16]


def digest_of_code() -> str:
    """A digest of the code that draws."""
    package = Path(__file__).parent.parent
    files = sorted(
        file for room in ("analysis", "figure", "measurement", "schedule") for file in (package / room).rglob("*.py")
    )
    return digest_of(b"".join([matplotlib.__version__.encode(), *(file.read_bytes() for file in files)]))


class Drawn:
    """The pictures that are drawn already, with digests of what they were drawn from and of their files."""

    def __init__(self, path: Path) -> None:
        self.path, self.code = path, digest_of_code()
        self.before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.now = dict(self.before)

    def __enter__(self) -> Drawn:
        return self

    def __exit__(self, *error: object) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.now, indent=0, sort_keys=True) + "\n")

    def picture(self, name: str, inputs: list[Any], path: Path, draw: Any) -> Picture | None:
        """The picture of `path` without ending: drawn, unless it is there and its inputs are the same; None if there is none.

        Args:
            name: of the picture.
            inputs: all that it is drawn from.
            path: where it is.
            draw: returns a Drawing, or None where there is nothing to draw; stale files are removed then.
        """
        digest = digest_of(json.dumps([self.code, inputs], sort_keys=True, default=str).encode())
        files = [path.with_name(path.name + suffix) for suffix in (".png", ".svg")]
        known = self.before.get(name, {})
        if known.get("inputs") != digest or known.get("files") != self._digest(files):
            made = draw()
            if made is None:
                for file in files:
                    file.unlink(missing_ok=True)
            else:
                save(made.figure, path)
            caption = made.caption if made else ""
            known = {"inputs": digest, "files": self._digest(files), "caption": caption, "drawn": made is not None}
            self.now[name] = known
        return Picture(files, known["caption"], f"{name}. {known['caption']}") if known["drawn"] else None

    @staticmethod
    def _digest(files: Iterable[Path]) -> str:
        return digest_of(b"".join(file.read_bytes() for file in files if file.exists()))


# Claims


def draw_forest(claims: Sequence[ClaimResult], path: Path, drawn: Drawn) -> Picture | None:
    """The intervals of decided and leaning claims."""
    rows = [row for row in claims if row.estimate is not None and (row.decided or row.leaning)]
    caption = "Filled: decided, hollow: leaning; lines: confidence intervals; diamonds: the published effect, in another setting."

    def draw() -> Drawing | None:
        return Drawing(forest([vars(row) for row in rows]), caption) if rows else None

    return drawn.picture("claims", [vars(row) for row in rows], path, draw)


def claim_results(places: Places, entries: Sequence[Entry]) -> list[ClaimResult]:
    """The verdict on each claim of the items."""
    found = {entry.data.item.id: entry.data.results for entry in entries}
    claims = [claim for claim in read_claims(places.root / PUBLISHED) if claim.item in found]
    results = [
        ClaimResult(
            *(one.claim.id, one.claim.item, one.claim.item.partition("/")[0], one.claim.text),
            rule=one.claim.check,
            scope=one.scale,
            scale=one.scale,
            verdict=one.verdict,
            published_effect=one.claim.effect,
            reason=". ".join(filter(None, (one.measured, one.reason))),
        )
        for one in check_claims(claims, found)
    ]
    write_claims(results, places.target / "summary" / "claims.csv")
    return results


def main() -> None:
    """Make everything in this repository; papers named on the command line alone, without the page of the others."""
    papers = tuple(sys.argv[1:]) or tuple(PAPERS)
    entries = make_all(Places(resource_root(), RESULTS, SUMMARY, papers=papers))
    drawn = sum(entry.picture is not None for entry in entries)
    with_runs = sum(bool(entry.data.results.done) for entry in entries)
    print(f"{RESULTS / 'index.html'}: {len(entries)} items, {drawn} pictures, {with_runs} with runs of ours")


if __name__ == "__main__":
    main()
