"""Families of claims, whose tests are frozen before their first run: `bitcycle freeze` writes one, and `due_look` says which runs
count at the look that is due (`verdict.py`).

A family is a file results/published/families/NAME.yaml: when it was frozen, the number of looks, and for each claim the
fingerprint of its test, its seeds, and the power at the published effect. Training for a family and judging it both refuse a
claim whose test has another fingerprint. After a result, a test can only be changed as an amendment (`amended` in the claim's
entry): the claim is then exploratory, and decided by new seeds alone, in a family of their own. A frozen test that turns out
to be wrong is `withdrawn` in its family and no longer decides anything; the claim can then be amended and frozen again. A family
counts only runs of its seeds that finished since it was frozen, and is tested at half of them and at the end, however many are
trained in between. If the sweep is given other settings after its first runs, it has no test.
"""

import hashlib
import json
import math
import sys
from argparse import SUPPRESS
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from bitcycle.door import parser_of
from bitcycle.errors import EXIT_DONE
from bitcycle.files import read_csv, write_bytes
from bitcycle.reproduction.analysis.aggregation import Cell, Run, distinct_runs
from bitcycle.reproduction.analysis.claims import Claim, published_effect, read_claims, tested_reference
from bitcycle.reproduction.analysis.facts import Selector, matches
from bitcycle.reproduction.analysis.items import PUBLISHED
from bitcycle.reproduction.analysis.statistics import Estimate, power
from bitcycle.settings import SettingError, nearest

LOOKS = 2
"""Planned tests of a family: at half of the seeds and at the end. p-values are multiplied by it."""
LEAST_POWER = 0.5
"""Claims with less power at the published effect stay out of a family: they could only cost the others."""
WORDING = (
    *("id", "sentence", "section", "effect", "value", "looks"),
    *("untested", "amended", "quote", "reason", "note", "restates"),
)
"""The fields of a claim that are not part of its test."""


@dataclass(frozen=True)
class Family:
    """A frozen family of claims.

    Attributes:
        name: its file.
        frozen: when it was frozen, in UTC; families of before 26 November 2026, 12:00, name the day alone.
        looks: planned number of tests.
        tests: claim -> fingerprint of its test.
        seeds: claim -> planned seeds, in the order in which they are trained.
        power: claim -> power at the published effect; None if the paper prints no number.
        withdrawn: claims whose frozen test turned out to be wrong; they may have another test, and decide nothing.
    """

    name: str
    frozen: str
    looks: int
    tests: Mapping[str, str]
    seeds: Mapping[str, Sequence[int]]
    power: Mapping[str, float | None]
    withdrawn: Collection[str] = ()


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
    return Family(
        path.stem, str(content["frozen"]), int(content["looks"]), cast(Any, tests), seeds, cast(Any, power), withdrawn
    )


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
    none before that half is. No look is due if the family has runs of cells with settings that the sweep has `replaced` since:
    one at the new settings would be another look.
    """
    seeds, arms = list(map(str, family.seeds[claim.id])), _arms(claim)
    cells = [_restricted(cell, seeds, family.frozen) for cell in cells]
    if before := _replaced_runs(replaced, arms, seeds, family.frozen):
        words = f"the sweep was changed when the family had runs ({len(before)}): new seeds need a claim of their own"
        return [replace(cell, runs=()) for cell in cells], words
    trained, half = _trained_seeds(cells, arms, seeds), math.ceil(len(seeds) / 2)
    if trained < half:
        words = f"{trained} of {len(seeds)} planned seeds are trained; the first test is at {half}"
        return [replace(cell, runs=()) for cell in cells], words
    count = len(seeds) if trained == len(seeds) else half
    words = f"tested at {count} of {len(seeds)} planned seeds"
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


def _replaced_runs(replaced: Iterable[Cell], arms: Sequence[Selector], seeds: Sequence[str], since: str) -> list[Run]:
    cells = [cell for cell in replaced if any(matches(cell, arm) for arm in arms)]
    runs = distinct_runs(_restricted(cell, seeds, since) for cell in cells)
    return [run for run in runs if run.row.get("finished")]


def _arms(claim: Claim) -> list[Selector]:
    return [arm for part in claim.parts for arm in (part.a, *part.arms, part.minus) if arm is not None]


def _restricted(cell: Cell, seeds: Collection[str], since: str) -> Cell:
    """A cell with its runs of these seeds since a moment; runs from before this was recorded count."""
    runs = (run for run in cell.runs if run.row["seed"] in seeds and (run.row.get("finished") or since) >= since)
    return replace(cell, runs=tuple(runs))


def freeze(path: Path, entries: Mapping[str, Mapping[str, object]]) -> Path:
    """Write a new family: for each claim the fingerprint of its test, seeds, deviation and power."""
    content = {"frozen": datetime.now(UTC).isoformat(timespec="seconds"), "looks": LOOKS, "claims": entries}
    write_bytes(path, f"# A frozen family of claims\n{OmegaConf.to_yaml(OmegaConf.create(content))}".encode())
    try:
        read_families(path.parents[1])
    except SettingError:
        path.unlink()  # it would be refused by every later command
        raise
    return path


def entry_of(
    claim: Claim, seeds: range, row: Mapping[str, str], deviation: float | None, power: float | None
) -> dict[str, object]:
    """The entry of a claim in a new family. Deviation and margin are those that results/summary/claims.csv tells of its earlier
    trainings, in `row`, unless the deviation is given. Raises SettingError if it has not enough power, or no quote."""
    margin = float(row["margin"]) if row.get("margin") else claim.fixed_margin if claim.has_margin else None
    if deviation is None and row:
        deviation = float(row["deviation"])
    if power is None:
        power = planned_power(claim, deviation, margin, len(seeds))
    if power is not None and power < LEAST_POWER:
        problem = f"has a power of {power:.2f} at the published effect with {len(seeds)} seeds"
        raise SettingError("claim", claim.id, problem, f"leave it out, or plan seeds for at least {LEAST_POWER}")
    if not claim.quote:
        problem = "does not quote the words or numbers of the paper that its direction or margin comes from"
        raise SettingError("claim", claim.id, problem, "add a quote to its entry")
    numbers = {"deviation": deviation, "power": power}
    rounded = {name: None if value is None else round(value, 3) for name, value in numbers.items()}
    return {"test": fingerprint(claim), "seeds": len(seeds), "first_seed": seeds.start, **rounded}


def planned_power(claim: Claim, deviation: float | None, margin: float | None, seeds: int) -> float | None:
    """Power of a claim at its published effect with a number of seeds, given the deviation of its contrast between seeds, on the
    scale of the test; None if the deviation is unknown, or the paper prints no number."""
    if deviation is None or (claim.value is None and not claim.has_margin):
        return None
    estimate = Estimate(0.0, deviation / math.sqrt(seeds), seeds - 1, seeds)
    return power(estimate, published_effect(claim), claim.bounds(margin, tested_reference(claim)))


def _value(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    return name, float(value)


def main(words: Sequence[str] | None = None) -> int:
    """Freeze the tests of claims before their first run."""
    parser = parser_of("freeze", __doc__)
    parser.add_argument("name", help="name of the family")
    parser.add_argument("claims", nargs="+", help="PAPER/ITEM-cN")
    text = "planned number of seeds of all claims, or of one"
    parser.add_argument("--seeds", type=_value, action="append", required=True, metavar="[CLAIM=]NUMBER", help=text)
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them; default: 0")
    text = "deviation of a claim's contrast between seeds, measured on other runs; default: that of its earlier runs"
    parser.add_argument("--deviation", type=_value, action="append", default=[], metavar="CLAIM=VALUE", help=text)
    parser.add_argument("--published", type=Path, default=PUBLISHED, help=SUPPRESS)
    text = "power of a claim, for a trend from a simulation; default: computed for its published effect and deviation"
    parser.add_argument("--power", type=_value, action="append", default=[], metavar="CLAIM=VALUE", help=text)
    given = parser.parse_args(words)
    path = given.published / "families" / f"{given.name}.yaml"
    if path.exists():
        problem, remedy = "is frozen already", "choose another name; a frozen family does not change"
        raise SettingError("family", given.name, problem, remedy)
    known = {claim.id: claim for claim in read_claims(given.published)}
    rows = read_csv(given.published.parent / "summary" / "claims.csv", missing_ok=True)
    measured = {row["claim_id"]: row for row in reversed(rows) if row["deviation"]}
    planned = dict(given.seeds)
    deviations, powers, entries = dict(given.deviation), dict(given.power), {}
    for name in given.claims:
        if name not in known:
            raise SettingError("claim", name, "there is no such claim", nearest(name, known))
        count = planned.get(name, planned.get(""))
        if count is None:
            raise SettingError("seeds", sorted(planned), f"there is no number for {name}", "add --seeds NUMBER")
        seeds, row = range(given.first_seed, given.first_seed + int(count)), measured.get(name, {})
        entries[name] = entry_of(known[name], seeds, row, deviations.get(name), powers.get(name))
    print(freeze(path, entries))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
