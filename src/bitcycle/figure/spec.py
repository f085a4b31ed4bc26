"""What papers/PAPER.yaml says of the items of a paper: their pictures, and how their numbers are found in our runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Optional

import yaml

from bitcycle.analysis.contrast import Selector
from bitcycle.analysis.items import Item

PAPERS = Path(__file__).parent / "papers"


@dataclass(frozen=True)
class Spec:
    """An item as its paper's file describes it.

    Attributes:
        column: of runs.csv that holds the metric as the paper reports it: final or best.
        cost: of runs.csv: gbitops, or gbitops_to_best.
        named: fact that names the method of a cell in the words of the paper, see `contrast.FACTS`.
        base: facts of the cell that the others are compared with.
        measures: further facts of our cells, which are columns of its table.
        pictures: kind and options of its picture, see `make.KINDS`; where there are several, the first that has its runs.
    """

    column: str = "final"
    cost: str = "gbitops"
    named: str = "method"
    base: Optional[Selector] = None
    measures: Sequence[str] = ()
    pictures: Sequence[Mapping[str, Any]] = ()


@cache
def _content(paper: str) -> dict[str, Any]:
    path = PAPERS / f"{paper}.yaml"
    return dict(yaml.safe_load(path.read_text())) if path.exists() else {}


def spec_of(item: Item) -> Spec:
    """The description of an item; the usual one where its paper's file has none."""
    content = _content(item.paper)
    return Spec(**{**content.get("defaults", {}), **content.get("items", {}).get(item.name, {})})
