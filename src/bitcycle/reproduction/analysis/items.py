"""The figures, tables and listings of the five papers, and their published numbers."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from bitcycle.files import read_csv, resource_root

PUBLISHED = Path("results/published")
BOARDS = PUBLISHED / "boards"
"""Claims and frozen families of the boards, which belong to no paper."""
SWEEP_FOLDER = Path("sweeps")
PAPERS: dict[str, dict[str, str]] = yaml.safe_load(
    (resource_root() / PUBLISHED / "papers.yaml").read_text(encoding="utf-8")
)
"""Key of a paper -> its title, and its link if there is a free copy."""

Published = dict[str, str]
"""A published number: a row of a file in results/published."""


@dataclass(frozen=True)
class Item:
    """A figure, table or listing: a row of results/published/items.csv."""

    paper: str  # key of PAPERS
    name: str  # name in the paper, such as fig3 or table1
    kind: str  # figure, table, schematic, listing or missing-from-text
    title: str  # short description
    sweep: str  # PAPER/ITEM of the sweep with its runs; empty if it needs none

    @property
    def id(self) -> str:
        """PAPER/NAME."""
        return f"{self.paper}/{self.name}"

    def sweep_file(self, sweeps: Path) -> Path | None:
        """Its own sweep file, or that of the item whose runs it shows; None if there is none."""
        for name in (self.id, self.sweep):
            if self.sweep and (path := sweeps / f"{name}.yaml").exists():
                return path
        return None


def read_items(published: Path = PUBLISHED) -> list[Item]:
    """All items, in the order of the papers."""
    return [
        Item(row["paper"], row["item"], row["kind"], row["title"], row["sweep"])
        for row in read_csv(published / "items.csv")
    ]


def read_published(item: Item, published: Path = PUBLISHED, suffix: str = "") -> list[Published]:
    """The published numbers of an item; those read from its picture have the suffix "_digitized"."""
    return read_csv(published / f"{item.paper}_{item.name}{suffix}.csv", missing_ok=True)
