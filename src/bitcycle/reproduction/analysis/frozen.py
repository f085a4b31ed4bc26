"""Families of claims, whose tests `bitcycle freeze` fixed before their first run.

Training for a family and judging it both refuse a claim whose test has another fingerprint. A family counts only runs of its
seeds that finished since it was frozen, and is tested at half of its seeds and at the end, however many are trained in between
(`due_look`). If the sweep is given other settings after its first runs, the family has no test.
"""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from bitcycle.reproduction.analysis.cells import Cell, distinct_runs
from bitcycle.reproduction.analysis.claims import Claim
from bitcycle.reproduction.analysis.facts import Selector, matches
from bitcycle.reproduction.analysis.items import PUBLISHED
from bitcycle.settings import SettingError

LOOKS = 2
"""Planned tests of a family: at half of the seeds and at the end. p-values are multiplied by it."""
LEAST_POWER = 0.5
"""Claims with less power at the published effect stay out of a family: they could only cost the others."""
WORDING = (
    *("id", "sentence", "section", "effect", "value", "value_base", "looks"),
    *("untested", "amended", "quote", "reason", "note", "restates"),
)
"""The fields of a claim that are not part of its test."""


@dataclass(frozen=True)
class Family:
    """A frozen family of claims; its mappings are by the name of the claim."""

    name: str  # that of its file
    frozen: str  # when it was frozen, in UTC; families of before 26 November 2026, 12:00, name the day alone
    looks: int  # planned number of tests
    tests: Mapping[str, str]  # fingerprint of the test
    seeds: Mapping[str, Sequence[int]]  # planned seeds, in the order in which they are trained
    power: Mapping[str, float | None]  # power at the published effect; None if the paper prints no number
    withdrawn: Collection[str] = ()  # claims whose frozen test turned out to be wrong: may have another, decide nothing
    cells: Mapping[str, int] = field(default_factory=dict)  # planned number of settings; absent before 29 November 2026


def fingerprint(claim: Claim) -> str:
    """Twelve hexadecimal digits that depend on the test of a claim, and not on its words, remarks or published effect."""
    test = {name: value for name, value in vars(claim).items() if name not in WORDING}
    return hashlib.sha256(json.dumps(test, sort_keys=True, default=str).encode()).hexdigest()[:12]


def read_families(published: Path = PUBLISHED) -> list[Family]:
    """The frozen families, by name. Raises SettingError if a claim is in two of them and withdrawn in neither."""
    families = [_read(path) for path in sorted((published / "families").glob("*.yaml"))]
    homes: dict[str, str] = {}
    for family in families:
        for claim in sorted(set(family.tests) - set(family.withdrawn)):
            if claim in homes:
                problem = f"is frozen in the families {homes[claim]} and {family.name}"
                raise SettingError(
                    "claim", claim, problem, "a claim is tested in one family; new seeds need a new claim"
                )
            homes[claim] = family.name
    return families


def _read(path: Path) -> Family:
    content = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path)))
    claims: dict[str, dict[str, Any]] = content["claims"]
    tests, power = ({claim: entry.get(key) for claim, entry in claims.items()} for key in ("test", "power"))
    ranges = {claim: (int(entry.get("first_seed", 0)), int(entry["seeds"])) for claim, entry in claims.items()}
    seeds = {claim: range(first, first + count) for claim, (first, count) in ranges.items()}
    withdrawn = [claim for claim, entry in claims.items() if entry.get("withdrawn")]
    cells = {claim: int(entry["cells"]) for claim, entry in claims.items() if entry.get("cells")}
    numbers = str(content["frozen"]), int(content["looks"])
    return Family(path.stem, *numbers, cast(Any, tests), seeds, cast(Any, power), withdrawn, cells)


def family_of(claim: Claim, families: Iterable[Family]) -> Family | None:
    """The family that a claim is frozen in; one that it is withdrawn in only if there is no other."""
    homes = [family for family in families if claim.id in family.tests]
    return min(homes, key=lambda family: claim.id in family.withdrawn, default=None)


def differs(claim: Claim, family: Family) -> bool:
    """Whether the test of a claim is another than the frozen one."""
    return family.tests[claim.id] != fingerprint(claim)


def check_frozen(claims: Sequence[Claim], families: Sequence[Family]) -> None:
    """Refuse tests that differ from the frozen ones, and claims that are gone; a withdrawn test may differ. Raises SettingError
    naming the claim."""
    known = {claim.id: claim for claim in claims}
    for family in families:
        for name in family.tests:
            if name not in known:
                problem = f"is frozen in the family {family.name} and missing in results/published/claims"
                raise SettingError("claim", name, problem, "restore its entry")
            if differs(known[name], family) and name not in family.withdrawn:
                problem = f"its test is another than the one frozen on {family.frozen} in the family {family.name}"
                remedy = "restore the test; if it turned out to be wrong, add `withdrawn` with date and reason to its entry there"
                raise SettingError("claim", name, problem, remedy)


def due_look(
    claim: Claim, cells: Sequence[Cell], family: Family, replaced: Iterable[Cell] = ()
) -> tuple[list[Cell], str]:
    """The cells with the runs that count at the look that is due, if one is, and which look that is, or what it waits for.

    Only runs of the family's seeds since it was frozen count: those of the first half of the seeds until all are trained, and
    none before that half is, with all planned settings. No look is due if the family has runs of cells with settings that the
    sweep has `replaced` since: one at the new settings would be another look.
    """
    seeds, arms = list(map(str, family.seeds[claim.id])), arms_of(claim)
    cells = [_restricted(cell, seeds, family.frozen) for cell in cells]
    earlier = [cell for cell in replaced if any(matches(cell, arm) for arm in arms)]
    runs = distinct_runs(_restricted(cell, seeds, family.frozen) for cell in earlier)
    if finished := sum(bool(run.row.get("finished")) for run in runs):
        words = f"the sweep was changed when the family had runs ({finished}): new seeds need a claim of their own"
        return [replace(cell, runs=()) for cell in cells], words
    trained, half = _trained_seeds(cells, arms, seeds), math.ceil(len(seeds) / 2)
    count = 0 if trained < half else half if trained < len(seeds) else len(seeds)
    words = f"tested at {count} of {len(seeds)} planned seeds"
    if not count:
        words = f"{trained} of {len(seeds)} planned seeds are trained; the first test is at {half}"
    begun, planned = len(trained_settings(cells, arms)), family.cells.get(claim.id, 0)
    if count and begun < planned:
        count, words = 0, f"{begun} of {planned} planned settings have runs"
    if later := [seed for seed in seeds[trained + 1 :] if _trained_seeds(cells, arms, [seed])]:
        words += f"; it waits for seed {seeds[trained]}, as they count in this order, and {later[0]} is trained"
    return [_restricted(cell, seeds[:count], family.frozen) for cell in cells], words


def _trained_seeds(cells: Iterable[Cell], arms: Iterable[Selector], seeds: Sequence[str]) -> int:
    """The number of seeds before the first one that is not trained. A seed is trained if every cell with runs has one of this
    seed, and each arm has such cells."""
    filled = [cell for cell in cells if cell.runs]
    by_arm = [[cell for cell in filled if matches(cell, arm)] for arm in arms]
    if not all(by_arm):
        return 0
    recorded = [{run.row["seed"] for run in cell.runs} for arm in by_arm for cell in arm]
    return len(list(takewhile(lambda seed: all(seed in some for some in recorded), seeds)))


def arms_of(claim: Claim) -> list[Selector]:
    """The selectors of all arms of a claim, of each of its parts."""
    return [arm for part in claim.parts for arm in (part.a, *part.arms, part.minus) if arm is not None]


def trained_settings(cells: Iterable[Cell], arms: Sequence[Selector]) -> set[str]:
    """The hashes of the cells with runs that are in one of the arms."""
    return {cell.runs[0].row["hash"] for cell in cells if cell.runs and any(matches(cell, arm) for arm in arms)}


def _restricted(cell: Cell, seeds: Collection[str], since: str) -> Cell:
    """A cell with its runs of these seeds since a moment; runs from before this was recorded count."""
    runs = (run for run in cell.runs if run.row["seed"] in seeds and (run.row.get("finished") or since) >= since)
    return replace(cell, runs=tuple(runs))
