"""Which run fills which cell of a figure or table: results/manifest/PAPER/ITEM.csv, written when a sweep is planned or launched.

Figures, tables and verdicts join recorded runs on it and compose no configuration. One row for each cell and scale; a cell is
what the paper trains, whatever its seeds. `python -m bitcycle.sweep.manifest [SCALE ...]` plans every sweep, trains nothing.
A run that its sweep no longer names leaves tables and verdicts: its row, marked with the day, stays while the run is on record.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from bitcycle.configuration import RunConfig
from bitcycle.csv_files import read_csv, write_csv
from bitcycle.settings import SettingError
from bitcycle.sweep.grid import Overrides, as_text, expand, substitute
from bitcycle.sweep.item import SCALES, Sweep, read_sweep, with_regime
from bitcycle.training.plan import hash_of

MANIFEST = Path("results/manifest")
COLUMNS = ("scale", "cell", "hash", "seeds", "proxy", "superseded", "paper", "ours")
NAMED = ("model", "dataset", "quantizer", "schedule")
"""Groups whose options stand in every row, spelled out in the sweep or not."""
Compose = Callable[[Overrides], RunConfig | str]
"""Settings of a run -> its validated configuration, or what is wrong with them."""


@dataclass(frozen=True)
class Place:
    """A cell of an item at a scale, and the run that fills it.

    Attributes:
        scale: paper, mini or smoke.
        cell: number of the cell in its sweep.
        hash: that names the run, seeds apart; empty where it cannot be composed yet, or where none is planned at this scale.
        seeds: that the sweep trains.
        proxy: NETWORK, DATA[, N samples] where these are not the paper's, else empty.
        superseded: the day when the sweep named another run for the cell; empty for what counts.
        paper: settings of the cell as the paper trains it.
        ours: settings at this scale; none where the sweep leaves the cell out.
    """

    scale: str
    cell: int
    hash: str
    seeds: tuple[int, ...]
    proxy: str
    superseded: str
    paper: Mapping[str, str]
    ours: Mapping[str, str]


def plan_cells(sweep: Sweep, scale: str, compose: Compose) -> list[Place]:
    """Every cell of a sweep at a scale, in the order of its grids; cells that differ by a seed alone are one."""
    paper, smaller = (with_regime(sweep.at_scale.get(name) or {}) for name in ("paper", scale))
    left_out = smaller.pop("leave_out", {})
    cells: dict[str, tuple[Overrides, Overrides]] = {}
    seeds: dict[str, set[int]] = {}
    for settings in expand(sweep.grids, {}):
        published = substitute({key: value for key, value in settings.items() if key != "seed"}, paper)
        ours = {"scale": scale, **substitute(settings, smaller)}
        own = ours.pop("seed", None)
        key = json.dumps(published, sort_keys=True)
        planned = range(sweep.trials.get(scale, 1)) if own is None else [int(own)]
        if any(settings.get(name) == as_text(value) for name, value in left_out.items()):
            planned, ours = [], {}
        cells.setdefault(key, (published, ours))
        seeds.setdefault(key, set()).update(planned)
    return [
        _place(number, scale, sorted(seeds[key]), *cells[key], compose) for number, key in enumerate(cells, start=1)
    ]


def _place(
    number: int, scale: str, seeds: Sequence[int], published: Overrides, ours: Overrides, compose: Compose
) -> Place:
    there, here = compose({"scale": "paper", **published}), compose(ours) if ours else "left out at this scale"
    if not isinstance(there, str):
        published = {**{group: getattr(there, group).name for group in NAMED}, **published}
    name, proxy = "", ""
    if not isinstance(here, str):
        try:
            name = hash_of(here)
        except SettingError:
            name = ""  # it begins from weights that are not there yet
        proxy = _proxy(here, published)
    return Place(scale, number, name, tuple(seeds), proxy, "", published, ours)


def _proxy(here: RunConfig, published: Mapping[str, str]) -> str:
    if here.scale == "paper" and all(getattr(here, group).name == published[group] for group in ("model", "dataset")):
        return ""
    samples = getattr(here.dataset, "train_samples", None)
    return f"{here.model.name}, {here.dataset.name}" + (f", {samples} samples" if samples else "")


def record(
    name: str, sweep: Sweep, scale: str, compose: Compose, folder: Path = MANIFEST, recorded: Collection[str] = ()
) -> list[Place]:
    """Write the manifest of an item for one scale, beside what it says of others; returns all its rows.

    Args:
        name: PAPER/ITEM of the sweep.
        sweep: as its file says, without settings of a command line.
        scale: at which it is planned or launched.
        compose: makes configurations.
        folder: of all manifests.
        recorded: hashes of finished runs, whose superseded rows are kept.
    """
    path = folder / f"{name}.csv"
    old = read_manifest(path)
    known = {_key(place): place for place in old if place.scale == scale and not place.superseded and place.ours}
    planned = [
        replace(place, hash=place.hash or (known[_key(place)].hash if _key(place) in known else ""))
        for place in plan_cells(sweep, scale, compose)
    ]
    current = {place.hash for place in planned}
    gone = [
        place if place.superseded else replace(place, superseded=date.today().isoformat())
        for place in old
        if place.scale == scale and place.hash not in current and place.hash in recorded
    ]
    others = [place for place in old if place.scale != scale]
    rows = sorted([*others, *planned, *gone], key=lambda row: (SCALES.index(row.scale), bool(row.superseded), row.cell))
    if rows != old:
        _write(path, rows)
    return rows


def _key(place: Place) -> str:
    return json.dumps(place.ours, sort_keys=True)


def read_manifest(path: Path) -> list[Place]:
    """The rows of the manifest of an item; none if there is no file."""
    return [
        Place(
            **{name: row[name] for name in ("scale", "hash", "proxy", "superseded")},
            cell=int(row["cell"]),
            seeds=tuple(map(int, row["seeds"].split())),
            paper=json.loads(row["paper"]),
            ours=json.loads(row["ours"]),
        )
        for row in read_csv(path, missing_ok=True)
    ]


def _write(path: Path, rows: Iterable[Place]) -> None:
    written = []
    for row in rows:
        settings = {name: json.dumps(getattr(row, name), separators=(",", ":")) for name in ("paper", "ours")}
        written.append({**vars(row), "seeds": " ".join(map(str, row.seeds)), **settings})
    write_csv(path, COLUMNS, written)


def record_launch(name: str, scale: str, launched: Iterable[str], compose: Compose, root: Path) -> None:
    """Write the manifest of a sweep that is launched, unless it names all runs already.

    Args:
        name: PAPER/ITEM of the sweep.
        scale: of the launch.
        launched: hashes of the runs.
        compose: makes configurations.
        root: of the repository.
    """
    known = {place.hash for place in read_manifest(root / MANIFEST / f"{name}.csv") if place.scale == scale}
    path = root / "sweeps" / f"{name}.yaml"
    if path.exists() and not set(launched) <= known:
        record(name, read_sweep(path), scale, compose, root / MANIFEST, recorded_hashes(root, scale))


def recorded_hashes(root: Path, scale: str) -> set[str]:
    """Hashes of the finished runs at a scale, from results/summary/runs.csv."""
    rows = read_csv(root / "results" / "summary" / "runs.csv", missing_ok=True)
    return {row["hash"] for row in rows if row["scale"] == scale}


def record_all(root: Path, scales: Sequence[str] = SCALES, folder: Path | None = None) -> int:
    """Write the manifests of all sweeps below a repository; returns the number of cells."""
    from bitcycle.sweep.composition import composing

    recorded = {scale: recorded_hashes(root, scale) for scale in scales}
    cells = 0
    with composing(root / "conf") as compose:
        for path in sorted((root / "sweeps").glob("*/*.yaml")):
            name, sweep = f"{path.parent.name}/{path.stem}", read_sweep(path)
            for scale in scales:
                rows = record(name, sweep, scale, compose, folder or root / MANIFEST, recorded[scale])
                cells += sum(row.scale == scale and not row.superseded for row in rows)
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan all sweeps of this repository at the scales of the command line, or at all."""
    scales = tuple(sys.argv[1:] if arguments is None else arguments) or SCALES
    if strangers := set(scales) - set(SCALES):
        print(f"scale={min(strangers)} is not one of {', '.join(SCALES)}", file=sys.stderr)
        return 2
    print(f"{MANIFEST}: {record_all(Path.cwd(), scales)} cells at {', '.join(scales)} scale")
    return 0


if __name__ == "__main__":
    sys.exit(main())
