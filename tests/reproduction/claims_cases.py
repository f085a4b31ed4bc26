"""What the tests of claims share."""

from __future__ import annotations

from bitcycle.reproduction.analysis.cells import Cell, Results, Run
from bitcycle.reproduction.analysis.claims import Claim, read_claims
from bitcycle.reproduction.analysis.contrast import Pool
from bitcycle.reproduction.analysis.verdict import ClaimResult, judge
from tests.conftest import ROOT

PUBLISHED = ROOT / "results" / "published"


CLAIMS = {claim.id: claim for claim in read_claims(PUBLISHED)}


def cell(*values: float, scale: str = "mini", steps: int = 1000, curve: dict | None = None, **settings: object) -> Cell:
    """A cell with a run of each value for the seeds 0, 1, ...; settings by words such as schedule__q_max; None: no run."""
    row = {key: settings.pop(key) for key in ("seconds", "finished", "gbitops", "steps_per_second") if key in settings}
    actual = settings.pop("actual", {})
    paper = {name.replace("__", "."): str(value) for name, value in settings.items()}
    paper = {"model": "resnet74", "dataset": "cifar10", "quantizer": "sbm", **paper}
    model = "resnet8" if scale == "mini" else paper["model"]
    ours = {"model": model, "dataset": "cifar10", "schedule": paper.get("schedule", ""), **actual}
    nested = {key: {"name": value} for key, value in ours.items()}
    nested["schedule"].update({key.partition(".")[2]: value for key, value in paper.items() if "schedule." in key})
    common = {"scale": scale, "hash": str(sorted(paper.items())), "metric": "test_accuracy", **ours}
    common |= {"total_steps": str(steps), "processor": "made up", **{key: str(value) for key, value in row.items()}}
    runs = []
    for seed, value in enumerate(values):
        run = Run({**common, "seed": str(seed), "final": str(value), "best": str(value)}, nested)
        vars(run)["curve"] = curve or {}
        vars(run)["analyses"] = []
        runs.append(run)
    return Cell(paper, ours, tuple(runs))


def verdict(claim: Claim | str, *cells: Cell, scale: str = "mini", pool: Pool | None = None) -> ClaimResult:
    claim = CLAIMS[claim] if isinstance(claim, str) else claim
    runs = {run.training: run for cell in cells for run in cell.runs}
    (found,) = judge([claim], {claim.item: Results(scale, cells)}, pool or Pool(list(runs.values())))
    return found


HIGHER = Claim("x/y-c1", "one is better", predicate="higher", a={"schedule": "CR"}, b={"schedule": "static"})


ONE, OTHER = (71.0, 75.5, 74.0, 72.0), (70.0, 73.0, 73.0, 70.0)


PAIR = cell(*ONE, schedule="CR"), cell(*OTHER, schedule="static")
