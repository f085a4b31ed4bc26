"""Manifests, which assign runs to the cells of a figure or table: results/manifest/PAPER/ITEM.csv.

They are written when a sweep is planned or launched; `python -m bitcycle.reproduction.manifest [SCALE ...]` plans every sweep
and trains nothing. Figures, tables and verdicts join recorded runs with them and compose no configurations. There is
one row per cell and scale; a cell is one configuration of the paper, with all its seeds. A run of the other
`training.compute`, which differs only in rounding, fills a cell too, with the seeds that it has no run of: a GPU
simulates what a CPU trained on codes. If a sweep assigns another run to a cell, the old run no longer counts in tables
and verdicts; its row is kept, marked with the date, as long as the run is in the summary.
"""

import contextlib
import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from bitcycle.configuration import SCALES, RunConfig
from bitcycle.door import parser_of
from bitcycle.errors import EXIT_DONE
from bitcycle.files import locked, read_csv, write_csv
from bitcycle.settings import SettingError
from bitcycle.sweep.composition import composing
from bitcycle.sweep.grid import Overrides, substitute
from bitcycle.sweep.registry import Compose, Sweep, read_sweep, sweep_files
from bitcycle.training.naming import run_hash

MANIFEST = Path("results/manifest")
COLUMNS = ("scale", "cell", "hash", "otherwise", "seeds", "proxy", "superseded", "paper", "ours")
NAMED = ("model", "dataset", "quantizer", "schedule")
"""Groups whose choices are recorded in every row, even if the sweep leaves them at their defaults."""


@dataclass(frozen=True)
class Place:
    """A cell of an item at a scale, and its run."""

    scale: str
    cell: int  # its number in the sweep
    hash: str  # of the run, excluding the seed; empty if it cannot be composed yet
    otherwise: str  # hash of the same run with the other `training.compute`; empty if there is none
    seeds: tuple[int, ...]
    proxy: str  # NETWORK, DATASET[, N samples] if these differ from the paper's
    superseded: str  # date when the sweep assigned another run to the cell; empty for the current run
    paper: Mapping[str, str]  # settings of the cell in the paper
    ours: Mapping[str, str]  # settings at this scale

    @property
    def names(self) -> list[str]:
        """The hashes of runs that fill the cell."""
        return [name for name in (self.hash, self.otherwise) if name]

    @property
    def assignment(self) -> tuple[str, frozenset[tuple[str, str]], str]:
        """What the row says: at this scale, this run fills the cell with these settings."""
        return self.scale, frozenset(self.paper.items()), self.hash


def plan_cells(sweep: Sweep, scale: str, compose: Compose) -> list[Place]:
    """Every cell of a sweep at a scale, in the order of its grids; combinations with different seeds share a cell."""
    paper = sweep.replacements("paper")
    cells: dict[str, tuple[Overrides, Overrides, set[int]]] = {}
    for settings, trained in sweep.combinations(scale):
        published = substitute({key: value for key, value in settings.items() if key != "seed"}, paper)
        ours = {"scale": scale, **trained}
        own = ours.pop("seed", None)
        planned = range(sweep.trials.get(scale, 1)) if own is None else [int(own)]
        cells.setdefault(json.dumps(published, sort_keys=True), (published, ours, set()))[-1].update(planned)
    return [_place(number, scale, *cell, compose) for number, cell in enumerate(cells.values(), start=1)]


def _place(
    number: int, scale: str, published: Overrides, ours: Overrides, seeds: Collection[int], compose: Compose
) -> Place:
    there, here = compose({"scale": "paper", **published}), compose(ours)
    if not isinstance(there, str):
        published = {**{group: getattr(there, group).name for group in NAMED}, **published}
    name, otherwise, proxy = "", "", ""
    if not isinstance(here, str):
        with contextlib.suppress(SettingError):  # its initial weights do not exist yet
            name = run_hash(here)
            otherwise = run_hash(computed_otherwise(here))
        if here.scale != "paper" or any(getattr(here, group).name != published[group] for group in NAMED[:2]):
            samples = getattr(here.dataset, "train_samples", None)
            proxy = f"{here.model.name}, {here.dataset.name}" + (f", {samples} samples" if samples else "")
    return Place(scale, number, name, otherwise, tuple(sorted(seeds)), proxy, "", published, ours)


def computed_otherwise(config: RunConfig) -> RunConfig:
    """The same run with the other `training.compute`, which differs only in rounding."""
    compute = {"simulate": "codes", "codes": "simulate"}[config.training.compute]
    return replace(config, training=replace(config.training, compute=compute, recompute=False))


def record(
    name: str, sweep: Sweep, scale: str, compose: Compose, folder: Path = MANIFEST, recorded: Collection[str] = ()
) -> list[Place]:
    """Update the rows of one scale in the manifest of a sweep PAPER/ITEM, one process at a time; returns the rows of all scales.

    `recorded` are the hashes of finished runs, whose superseded rows are kept.
    """
    path = folder / f"{name}.csv"
    with locked(path):
        return _record(path, sweep, scale, compose, recorded)


def _record(path: Path, sweep: Sweep, scale: str, compose: Compose, recorded: Collection[str]) -> list[Place]:
    old = read_manifest(path)
    current = [place for place in old if place.scale == scale and not place.superseded]
    known = {frozenset(place.ours.items()): place for place in current}
    planned = []
    for place in plan_cells(sweep, scale, compose):
        before = place if place.hash else known.get(frozenset(place.ours.items()), place)
        planned.append(replace(place, hash=before.hash, otherwise=before.otherwise))
    kept = {place.assignment for place in planned}
    gone = [
        replace(place, superseded=place.superseded or date.today().isoformat())
        for place in old
        if place.scale == scale and place.assignment not in kept and not set(recorded).isdisjoint(place.names)
    ]
    others = [place for place in old if place.scale != scale]
    rows = sorted([*others, *planned, *gone], key=lambda row: (SCALES.index(row.scale), bool(row.superseded), row.cell))
    if rows != old:
        write_csv(path, COLUMNS, map(_texts, rows))
    return rows


def _texts(place: Place) -> dict[str, object]:
    settings = {name: json.dumps(getattr(place, name), separators=(",", ":")) for name in ("paper", "ours")}
    return {**vars(place), "seeds": " ".join(map(str, place.seeds)), **settings}


def read_manifest(path: Path) -> list[Place]:
    """The rows of an item's manifest; empty if there is no file."""
    found = []
    for row in read_csv(path, missing_ok=True):
        seeds, paper, ours = tuple(map(int, row["seeds"].split())), json.loads(row["paper"]), json.loads(row["ours"])
        names, words = (row["hash"], row.get("otherwise") or ""), (row["proxy"], row["superseded"])
        found.append(Place(row["scale"], int(row["cell"]), *names, seeds, *words, paper, ours))
    return found


def record_launch(name: str, scale: str, launched: Iterable[str], compose: Compose, root: Path) -> None:
    """Update the manifest of a sweep PAPER/ITEM if it lacks one of the launched runs, given by their hashes."""
    places = read_manifest(root / MANIFEST / f"{name}.csv")
    known = {run for place in places if place.scale == scale and not place.superseded for run in place.names}
    path = root / "sweeps" / f"{name}.yaml"
    if path.exists() and not set(launched) <= known:
        record(name, read_sweep(path), scale, compose, root / MANIFEST, recorded_hashes(root, scale))


def recorded_hashes(root: Path, scale: str) -> set[str]:
    """Hashes of the finished runs at a scale, from results/summary/runs.csv."""
    rows = read_csv(root / "results" / "summary" / "runs.csv", missing_ok=True)
    return {row["hash"] for row in rows if row["scale"] == scale}


def record_all(root: Path, scales: Sequence[str] = SCALES) -> int:
    """Write the manifests of all sweeps of a repository; returns the number of cells."""
    recorded = {scale: recorded_hashes(root, scale) for scale in scales}
    cells = 0
    with composing(root / "conf") as compose:
        for name, path in sweep_files(root).items():
            for scale in scales:
                rows = record(name, read_sweep(path), scale, compose, root / MANIFEST, recorded[scale])
                cells += sum(row.scale == scale and not row.superseded for row in rows)
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan all sweeps of this repository at the scales on the command line, by default all."""
    parser = parser_of("manifest")
    parser.add_argument("scales", nargs="*", metavar="SCALE", help="paper, mini or smoke; default: all")
    scales = tuple(parser.parse_args(arguments).scales) or SCALES
    print(f"{MANIFEST}: {record_all(Path.cwd(), scales)} cells at {', '.join(scales)} scale")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
