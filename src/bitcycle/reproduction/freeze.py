"""`bitcycle freeze`: fix the tests of claims, as a family of their own, before their first run.

A family is a file results/published/families/NAME.yaml: when it was frozen, the number of looks, and for each claim the
fingerprint of its test, its seeds, and the power at the published effect; `analysis/frozen.py` judges by it. After a result, a
test can only be changed as an amendment (`amended` in the claim's entry): the claim is then exploratory, and decided by new seeds
alone, in a family of their own. A frozen test that turns out to be wrong is `withdrawn` in its family and no longer decides
anything; the claim can then be amended and frozen again.
"""

import math
import re
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from omegaconf import OmegaConf

from bitcycle.door import parser_of
from bitcycle.errors import EXIT_DONE
from bitcycle.files import read_csv, resource_root, write_bytes
from bitcycle.reproduction.analysis.cells import Cell
from bitcycle.reproduction.analysis.claims import Claim, published_effect, read_claims, tested_reference
from bitcycle.reproduction.analysis.facts import matches
from bitcycle.reproduction.analysis.frozen import LEAST_POWER, LOOKS, arms_of, fingerprint, read_families
from bitcycle.reproduction.analysis.items import PUBLISHED, SWEEP_FOLDER, Item, read_items
from bitcycle.reproduction.analysis.statistics import Estimate, power
from bitcycle.reproduction.manifest import MANIFEST, read_manifest
from bitcycle.settings import SettingError, nearest


def write_family(path: Path, entries: Mapping[str, Mapping[str, object]]) -> Path:
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
    claim: Claim, seeds: range, row: Mapping[str, str], deviation: float | None, power: float | None, cells: int
) -> dict[str, object]:
    """The entry of a claim in a new family. Deviation and margin are those that results/summary/claims.csv tells of its earlier
    trainings, in `row`, unless the deviation is given. Raises SettingError if it has not enough power, or no quote."""
    margin = float(row["margin"]) if row.get("margin") else claim.fixed_margin if claim.has_margin else None
    if margin is None and claim.has_margin and claim.value_base is not None:
        margin = claim.percent / 100 * claim.value_base
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
    planned = {"seeds": len(seeds), "first_seed": seeds.start, **({"cells": cells} if cells else {})}
    return {"test": fingerprint(claim), **planned, **rounded}


def planned_cells(claim: Claim, items: Mapping[str, Item], root: Path) -> int:
    """The number of settings at mini scale that a claim compares, from the manifests of its items."""
    found: set[str] = set()
    for name in (claim.item, *claim.items):
        file = items[name].sweep_file(root / SWEEP_FOLDER) if name in items else root / SWEEP_FOLDER / f"{name}.yaml"
        places = read_manifest(root / MANIFEST / file.parent.name / f"{file.stem}.csv") if file else []
        current = [place for place in places if place.scale == "mini" and not place.superseded]
        cells = {place.hash: Cell(dict(place.paper), dict(place.ours)) for place in current}
        arms = [{**claim.where, **arm} for arm in arms_of(claim)]
        found |= {name for name, cell in cells.items() if any(matches(cell, arm) for arm in arms)}
    return len(found)


def planned_power(claim: Claim, deviation: float | None, margin: float | None, seeds: int) -> float | None:
    """Power of a claim at its published effect with a number of seeds, given the deviation of its contrast between seeds, on the
    scale of the test; None if the deviation is unknown, or the paper prints no number. Raises SettingError for a margin in
    percent of a mean that is not known."""
    if deviation is None or (claim.value is None and not claim.has_margin):
        return None
    if claim.has_margin and margin is None:
        problem = f"has a margin of {claim.percent:g} % of a mean that no earlier training tells"
        raise SettingError("claim", claim.id, problem, f"compute its power and add --power {claim.id}=VALUE")
    estimate = Estimate(0.0, deviation / math.sqrt(seeds), seeds - 1, seeds)
    return power(estimate, published_effect(claim, margin), claim.bounds(margin, tested_reference(claim)))


def _value(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    return name, float(value)


def _check_numbers(
    claims: Sequence[str],
    seeds: Mapping[str, float],
    deviations: Mapping[str, float],
    powers: Mapping[str, float],
    cells: Mapping[str, float],
) -> None:
    """Raises SettingError for claims without a number of seeds, for numbers that a plan cannot have, and for those of claims that
    are not to be frozen."""
    if without := [name for name in claims if name not in seeds and "" not in seeds]:
        raise SettingError("seeds", sorted(seeds), f"there is no number for {without[0]}", "add --seeds NUMBER")
    rules: tuple[tuple[str, Mapping[str, float], Callable[[float], bool], str, str], ...] = (
        ("--seeds", seeds, lambda x: x >= 1 and x.is_integer(), "a number of seeds", "plan a whole number from 1"),
        ("--deviation", deviations, lambda x: 0 < x < math.inf, "a deviation", "give a finite number above 0"),
        ("--power", powers, lambda x: 0 <= x <= 1, "a power", "give a number from 0 to 1"),
        ("--cells", cells, lambda x: x >= 1 and x.is_integer(), "a number of settings", "plan a whole number from 1"),
    )
    for option, numbers, is_valid, what, remedy in rules:
        for name, number in numbers.items():
            if name not in claims and (name or option != "--seeds"):
                problem = "gives a number for a claim that is not to be frozen here"
                raise SettingError(option, f"{name}={number:g}", problem, nearest(name, claims))
            if not is_valid(number):
                raise SettingError(option, f"{number:g}", f"is not {what}", remedy)


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
    text = "number of settings of a claim that will be trained, if not all that it compares at mini scale"
    parser.add_argument("--cells", type=_value, action="append", default=[], metavar="CLAIM=NUMBER", help=text)
    given = parser.parse_args(words)
    if not re.fullmatch(r"\w+", given.name):
        raise SettingError("family", given.name, "is not the name of a family", "use letters, digits and _")
    if given.first_seed < 0:
        raise SettingError("--first-seed", given.first_seed, "is not a seed", "give a whole number from 0")
    path = given.published / "families" / f"{given.name}.yaml"
    if path.exists():
        problem, remedy = "is frozen already", "choose another name; a frozen family does not change"
        raise SettingError("family", given.name, problem, remedy)
    known = {claim.id: claim for claim in read_claims(given.published)}
    rows = read_csv(given.published.parent / "summary" / "claims.csv", missing_ok=True)
    measured = {row["claim_id"]: row for row in reversed(rows) if row["deviation"]}
    planned, deviations, powers, cells = map(dict, (given.seeds, given.deviation, given.power, given.cells))
    _check_numbers(given.claims, planned, deviations, powers, cells)
    items = {item.id: item for item in read_items(resource_root() / PUBLISHED)}
    entries = {}
    for name in given.claims:
        if name not in known:
            raise SettingError("claim", name, "there is no such claim", nearest(name, known))
        count = int(planned[name if name in planned else ""])
        seeds, row = range(given.first_seed, given.first_seed + count), measured.get(name, {})
        settings = int(cells[name]) if name in cells else planned_cells(known[name], items, resource_root())
        entries[name] = entry_of(known[name], seeds, row, deviations.get(name), powers.get(name), settings)
    print(write_family(path, entries))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
