"""Claims as data: results/published/claims/PAPER.yaml has one entry a claim, in terms of the fields of `Claim`.

A predicate says what is tested of the contrast between two arms; `PREDICATES` lists them. Adding a claim is adding an entry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

from omegaconf import OmegaConf

from bitcycle.analysis.contrast import DISPLAYS, described, several
from bitcycle.analysis.items import PAPERS, PUBLISHED
from bitcycle.settings import SettingError, Settings, nearest, setting

PREDICATES = {
    "higher": "a minus b is above {reference}: two-sided paired t test, 95 % interval",
    "lower": "a minus b is below {reference}: two-sided paired t test, 95 % interval",
    "equivalent": "a minus b lies within {margin} of 0: two one-sided t tests at 5 %, 90 % interval",
    "at_least": "a minus b is above -{margin}: one-sided t test at 5 %, 90 % interval",
    "at_most": "a minus b is below {margin}: one-sided t test at 5 %, 90 % interval",
    "all_equivalent": "settings of a lie within {margin} of each other: two one-sided t tests of the worst pair, 90 % interval",
    "none_better": "no setting of a exceeds b by {margin}: the one-sided t test of the worst one, 90 % interval",
    "rising": "a rises with {by}: Page's test over seeds, 95 % interval of the rank correlation",
    "falling": "a falls with {by}: Page's test over seeds, 95 % interval of the rank correlation",
    "smaller_spread": "the deviation between seeds of a is below that of b: F test of pooled variances, 95 % interval",
    "computed": "follows from formulas",
    "none": "not tested",
}
"""Predicate -> what is tested, in words. Several arms b: each of them has to fulfil it."""
POINTS = 0.5
"""Margin in points where the paper gives none."""
PERCENT_OF_PERPLEXITY = 2.0


@dataclass
class Claim(Settings):
    """A statement of a paper: an entry of results/published/claims/PAPER.yaml."""

    id: str = setting("", "PAPER/ITEM-cN")
    sentence: str = setting("", "in words")
    section: str = setting("", "of the paper")
    effect: str = setting("", "as published, with its unit")
    value: Optional[float] = setting(None, "the same as one number in the direction of a minus b")
    unit: str = setting("points", "of a minus b")
    predicate: str = setting("none", "what is tested", choices=PREDICATES)
    metric: Any = setting("final", "of both arms, or a list of two; see `contrast.METRICS`")
    where: Any = setting({}, "facts of all cells (`contrast.FACTS` and settings)")
    a: Any = setting({}, "facts of the first arm")
    b: Any = setting(None, "facts of the second arm, or a list of several arms")
    match: list[str] = setting([], "facts in which partners agree")
    minus: Any = setting(None, "facts of cells whose values are first taken off those of both arms")
    minus_match: list[str] = setting([], "in which facts these agree with the cells of the arms")
    by: Any = setting(None, "fact (or facts) along which a trend goes")
    function: str = setting("", "of `claim_functions`: a number of each seed in place of a metric, or what is computed")
    options: Any = setting({}, "of a computed claim")
    items: list[str] = setting([], "more items whose cells count, of the same paper")
    reference: Any = setting(0.0, "of the comparison, as shown; without b the published number, or one by network")
    margin: Optional[float] = setting(None, "of equivalence or non-inferiority", minimum=0)
    margin_percent: Optional[float] = setting(None, "the same in percent of the mean of b", minimum=0)
    display: str = setting("", "how a difference of logarithms is shown", choices=("", *DISPLAYS))
    also: list[Any] = setting([], "fields of further tests which have to hold, too")
    requires: list[str] = setting([], "preconditions beyond those of every claim, see `preconditions`")
    too_far: Any = setting({}, "networks that cannot show what it says, and why")
    moments: int = setting(0, "evaluations that it needs of each run", minimum=0)
    looks: int = setting(1, "how often it was tested as seeds were added; multiplies its p-value", minimum=1)
    lengths: str = setting(
        *("equal", "of trainings; converged: may differ where they pass over their data often enough"),
        choices=("equal", "converged", "free"),
    )
    reason: str = setting("", "why it is not tested")
    note: str = setting("", "on the paper's text")

    @property
    def item(self) -> str:
        """PAPER/ITEM."""
        return self.id.rpartition("-")[0]

    @property
    def paper(self) -> str:
        """Key of the paper."""
        return self.id.partition("/")[0]

    @property
    def arms(self) -> list[Mapping[str, Any]]:
        """The arms that a is compared with."""
        return list(self.b) if isinstance(self.b, list) else [self.b] if self.b is not None else []

    @property
    def metrics(self) -> tuple[str, str]:
        """Of the two arms."""
        return (self.metric, self.metric) if isinstance(self.metric, str) else tuple(self.metric)

    @property
    def parts(self) -> list[Claim]:
        """The claim as its tests."""
        own = replace(self, also=[])
        return [own, *(replace(own, **{"value": None, "reference": 0.0, **dict(more)}) for more in self.also)]

    @property
    def level(self) -> float:
        """Of its interval."""
        margins = ("equivalent", "at_least", "at_most", "all_equivalent", "none_better")
        return 0.9 if self.predicate in margins else 0.95


def read_claims(published: Path = PUBLISHED) -> list[Claim]:
    """The claims of all papers that have a file. Raises SettingError for a field or predicate that does not exist."""
    files = {path.stem: path for path in sorted((published / "claims").glob("*.yaml"))}
    claims = []
    for paper in dict.fromkeys((*PAPERS, *files)):
        if paper in files:
            content: Any = OmegaConf.to_container(OmegaConf.load(files[paper]))
            claims += [_claim(paper, {**content["defaults"], **entry}) for entry in content["claims"]]
    return claims


def _claim(paper: str, entry: dict[str, Any]) -> Claim:
    name, known = f"{paper}/{entry['id']}", Claim.__dataclass_fields__
    for key in entry:
        if key not in known:
            raise SettingError(name, key, "is no field of a claim", nearest(key, known))
    try:
        return Claim(**{**entry, "id": name})
    except SettingError as error:
        raise error.within(name) from None


def rule_of(claim: Claim, margin: float | None = None) -> str:
    """The rule that is applied, in one sentence."""
    if claim.predicate in ("computed", "none"):
        return PREDICATES[claim.predicate]
    percent = f"{claim.margin_percent or PERCENT_OF_PERPLEXITY:g} % of b"
    default = percent if "perplexity" in claim.unit else f"{POINTS:g}"
    limit = claim.margin if claim.margin is not None else margin
    words = PREDICATES[claim.predicate].format(
        reference="the published number" if isinstance(claim.reference, Mapping) else f"{float(claim.reference):g}",
        margin=f"{limit:.3g} {claim.unit}" if limit is not None else f"{default} {claim.unit}",
        by=" and with ".join(several(claim.by)) if claim.by else "",
    )
    arms = f"a: {described(claim.a) or 'all'}" + "".join(f"; b: {described(arm)}" for arm in claim.arms)
    where = f"; where {described(claim.where)}" if claim.where else ""
    more = "".join(f"; and {rule_of(part).partition(' (a: ')[0]} for {part.metric}" for part in claim.parts[1:])
    looks = f"; p multiplied by {claim.looks} for {claim.looks} looks" if claim.looks > 1 else ""
    return f"{words} ({arms}{where}){more}{looks}"


def tested_reference(claim: Claim) -> float:
    """The reference as a difference of logarithms where that is what is tested."""
    reference = float(claim.reference)
    if claim.display == "saving":
        return -math.log(1 - reference / 100)
    return math.log(reference) if claim.display == "ratio" else reference
