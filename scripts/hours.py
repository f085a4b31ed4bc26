"""The table of results/notes/plan.md with the trainings, hours and verdicts of every part of sweeps/evidence.yaml."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from bitcycle.files import markdown_table, read_csv
from bitcycle.reproduction.analysis.collect import SUMMARY
from bitcycle.reproduction.campaign import Part, read_plan
from bitcycle.reproduction.manifest import MANIFEST, read_manifest

ROOT = Path(__file__).parent.parent
PLAN = ROOT / "sweeps" / "evidence.yaml"
CLAIMS = ROOT / "results" / "summary" / "claims.csv"
UNNAMED = ("seed", "results_root")
"""Settings of a run that are no part of its name."""
COMPUTE = "training.compute"


def hours_table() -> str:
    """Every part of the plan with its finished and planned trainings, and the hours that the finished ones took; the first part
    of a family with the verdicts on the family's claims of the papers."""
    verdicts = defaultdict[str, list[str]](list)
    for row in read_csv(CLAIMS):
        verdicts[row["family"]].append(f"{row['claim_id']} {row['verdict']}")
    rows = {(row["scale"], row["hash"], row["seed"]): row for row in read_csv(ROOT / SUMMARY)}
    lines, seen = [], set[tuple[str, str, str]]()
    for part in read_plan(PLAN):
        wanted = trainings_of(part)
        done = [rows[one] for one in wanted if one in rows]
        own = [rows[one] for one in wanted if one in rows and one not in seen]
        seen |= set(wanted)
        hours = sum(float(row["seconds"]) for row in own) / 3600
        family, _, question = part.claim.partition(": ")
        found = "; ".join(verdicts.pop(family, []))
        lines.append((family, question, part.sweep, f"{len(done)} of {len(wanted)}", f"{hours:.1f}", found))
    return markdown_table(("family", "question", "sweep", "trainings done", "hours", "verdicts"), lines)


def trainings_of(part: Part) -> list[tuple[str, str, str]]:
    """Scale, hash and seed of every training of a part, by the manifest of its sweep."""
    places = read_manifest(ROOT / MANIFEST / f"{part.sweep}.csv")
    cells = {_without_compute(place.ours): place for place in places if not place.superseded}
    found = []
    for run in part.expand(ROOT, ""):
        place = cells[_without_compute({key: value for key, value in run.items() if key not in UNNAMED})]
        name = place.hash if run.get(COMPUTE) == place.ours.get(COMPUTE) else place.otherwise
        found.append((part.scale, name, run["seed"]))
    return list(dict.fromkeys(found))


def _without_compute(settings: Mapping[str, str]) -> str:
    """The settings of a cell, in which only `training.compute` may differ between its runs."""
    return json.dumps({key: value for key, value in settings.items() if key != COMPUTE}, sort_keys=True)
