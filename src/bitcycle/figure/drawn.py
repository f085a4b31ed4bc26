"""What is drawn already: a picture is drawn again only where what it shows, or the code that draws it, has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

from bitcycle.analysis.collect import curve_name
from bitcycle.figure.data import ItemData
from bitcycle.figure.page import Picture
from bitcycle.figure.style import Drawing, save
from bitcycle.measurement.artifacts import ANALYSES, run_name

ROOMS = ("analysis", "figure", "measurement", "schedule")


def inputs_of(data: ItemData) -> list[Any]:
    """All that the picture of an item is drawn from."""
    runs = []
    for run in data.results.runs:
        files = [run.curves / curve_name(run.row)]
        files += sorted((run.curves.parent / ANALYSES).glob(f"{run_name(run.row)}-*.csv"))
        runs.append([dict(run.row), digest_of_files(files)])
    cells = [[cell.paper, [run.training for run in cell.runs]] for cell in data.results.cells]
    noise = sorted({data.pool.deviation(run, "final") for run in data.results.runs}, key=str)
    return [data.item.title, data.results.scale, cells, runs, list(data.published), list(data.digitized), noise]


def digest_of(content: bytes) -> str:
    """A digest of some content."""
    return hashlib.sha256(content).hexdigest()[:16]


def digest_of_files(files: Iterable[Path]) -> str:
    """A digest of the content of those files that exist."""
    return digest_of(b"".join(file.read_bytes() for file in files if file.exists()))


def digest_of_code() -> str:
    """A digest of the code that draws."""
    package = Path(__file__).parent.parent
    every = sorted(file for room in ROOMS for file in (package / room).rglob("*"))
    return matplotlib.__version__ + digest_of_files(file for file in every if file.suffix in (".py", ".yaml"))


class Drawn:
    """The pictures that are drawn already, with digests of what they were drawn from and of their files."""

    def __init__(self, path: Path) -> None:
        self.path, self.code = path, digest_of_code()
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
        digest = digest_of(json.dumps([self.code, inputs], sort_keys=True, default=str).encode())
        files = [path.with_name(path.name + suffix) for suffix in (".png", ".svg")]
        known = self.known.get(name, {})
        if known.get("inputs") != digest or known.get("files") != digest_of_files(files):
            if made := draw():
                save(made.figure, path)
            else:
                for file in files:
                    file.unlink(missing_ok=True)
            known = {"inputs": digest, "files": digest_of_files(files), "caption": made.caption if made else None}
            self.known[name] = known
        caption = known["caption"]
        return None if caption is None else Picture(files, caption, f"{name}. {caption}")
