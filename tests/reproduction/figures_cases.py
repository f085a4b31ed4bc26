"""What the tests of figures share."""

from __future__ import annotations

from bitcycle.reproduction.analysis.cells import Cell, Results, Run, parse_value
from bitcycle.reproduction.analysis.items import read_items, read_published
from bitcycle.reproduction.analysis.verdict import ClaimResult
from bitcycle.reproduction.figure.data import ItemData
from tests.conftest import ROOT

PUBLISHED = ROOT / "results" / "published"


ITEMS = {item.id: item for item in read_items(PUBLISHED)}


# Made-up runs


def made_up(*values: float, scale: str = "paper", gbitops: float | None = None, **paper: object) -> Cell:
    """A cell with runs of these metrics; settings by words such as schedule__q_max."""
    settings = {"quantizer": "sbm", **{name.replace("__", "."): str(value) for name, value in paper.items()}}
    nested: dict[str, dict[str, object]] = {}
    for key in ("model", "dataset", "schedule", "quantizer"):
        nested[key] = {"name": settings.get(key, {"quantizer": "sbm"}.get(key, ""))}
    for key, text in settings.items():
        if "." in key:
            group, _, rest = key.partition(".")
            nested.setdefault(group, {})[rest] = parse_value(text)
    runs = []
    for seed, value in enumerate(values):
        row = {"scale": scale, "hash": str(sorted(settings.items())), "seed": str(seed), "metric": "test_accuracy"}
        row |= {"final": str(value), "best": str(value), "total_steps": settings.get("training.steps", "64000")}
        row |= {"gbitops": str(gbitops)} if gbitops is not None else {}
        runs.append(Run(row, nested))
    return Cell(settings, settings, tuple(runs))


def claim_result(name: str, verdict: str = "supported", **numbers: object) -> ClaimResult:
    given = {
        "scope": "proxy: ResNet-8, CIFAR-10 at 16x16",
        "unit": "pp",
        "decided": True,
        "published_effect": "0.9 pp",
        **numbers,
    }
    return ClaimResult(
        name, name.rpartition("-")[0], name.partition("/")[0], "CPT beats static", verdict=verdict, **given
    )


SMALL = {"dataset": "cifar100", "model": "resnet74"}


STATIC = {"schedule": "static", "schedule__q_max": 8}


CYCLIC = {"schedule": "CR", "schedule__q_min": 3, "schedule__q_max": 8, "schedule__cycles": 32}


def proxied(cell: Cell, model: str, dataset: str) -> Cell:
    """The same runs standing for another network and other data of the paper."""
    return Cell({**cell.paper, "model": model, "dataset": dataset}, cell.ours, cell.runs)


def data_of(name: str, *cells: Cell, scale: str = "paper", **more: object) -> ItemData:
    """What is known of an item with some cells."""
    return ItemData(ITEMS[name], Results(scale, cells), read_published(ITEMS[name], PUBLISHED), **more)
