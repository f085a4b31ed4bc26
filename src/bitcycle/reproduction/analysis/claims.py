"""Claims as data: each entry of results/published/claims/PAPER.yaml gives the fields of one `Claim`.

The predicate, one of `PREDICATES`, is the hypothesis about the contrast between arms a and b that is tested: its words are in
`predicates.yaml`, its test in `predicates.py`. `facts.py` explains what selects the cells of the arms.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import yaml
from omegaconf import OmegaConf

from bitcycle.reproduction.analysis.facts import as_list, described
from bitcycle.reproduction.analysis.items import PAPERS, PUBLISHED
from bitcycle.reproduction.analysis.metrics import DISPLAYS
from bitcycle.settings import SettingError, Settings, nearest, setting

PREDICATES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("predicates.yaml").read_text())
"""Predicate -> description of its test. With several arms b, it must hold for each of them."""
UNTRAINED = ("computed", "none")
"""Predicates that do not depend on runs."""
DEFAULT_MARGIN = 0.5
"""Default margin in points, if the paper gives none."""
PERCENT_OF_PERPLEXITY = 2.0
"""Default margin of a perplexity, in percent."""


@dataclass
class Claim(Settings):
    """A statement of a paper: an entry of results/published/claims/PAPER.yaml."""

    id: str = setting("", "PAPER/ITEM-cN")
    sentence: str = setting("", "the claim in one sentence")
    section: str = setting("", "section of the paper")
    effect: str = setting("", "published effect with its unit")
    value: Optional[float] = setting(None, "published effect as a number, a minus b")
    value_base: Optional[float] = setting(
        None, "for a margin in percent: the paper's mean of b, of which value is a part"
    )
    unit: str = setting("points", "unit of a minus b")
    predicate: str = setting("none", "tested hypothesis", choices=PREDICATES)
    metric: Any = setting("final", "metric of both arms, or a list of one for each; see `metrics.reading`")
    where: Any = setting({}, "facts shared by all cells (`facts.FACTS` or settings)")
    a: Any = setting({}, "facts that select arm a")
    b: Any = setting(None, "facts that select arm b, or a list for several arms")
    match: list[str] = setting([], "facts on which paired cells agree")
    minus: Any = setting(None, "facts that select cells whose values are first subtracted from both arms")
    minus_match: list[str] = setting([], "facts on which these cells agree with those of the arms")
    by: Any = setting(None, "fact, or list of facts, along which a trend is tested")
    function: str = setting("", "function of `claim_functions` that replaces the metric, or computes the claim")
    options: Any = setting({}, "options of this function, for a computed claim")
    items: list[str] = setting([], "further items of the same paper whose cells are used")
    reference: Any = setting(0.0, "value that a minus b, or a alone, is compared with; may depend on the network")
    margin: Optional[float] = setting(None, "margin of equivalence or non-inferiority", minimum=0)
    margin_percent: Optional[float] = setting(None, "margin in percent of the mean of b", minimum=0)
    display: str = setting("", "how a log ratio is displayed", choices=("", *DISPLAYS))
    also: list[Any] = setting([], "fields of further tests, all of which must hold")
    requires: list[str] = setting([], "additional preconditions, see `preconditions`")
    too_far: Any = setting({}, "networks on which the claim cannot be tested, with the reason")
    moments: int = setting(0, "required number of evaluations per run", minimum=0)
    looks: int = setting(1, "without a family: number k of tests so far; multiplies p by k (k + 1)", minimum=1)
    each: bool = setting(False, "it must hold in every cell (the sentence says every, or all), not on average")
    untested: str = setting("", "parts of the sentence that a proxy cannot test: it is at most supported in part")
    amended: str = setting("", "date and reason of a change of the test after a result: the claim is exploratory")
    quote: str = setting("", "words or numbers of the paper that margin and direction come from")
    lengths: str = setting(
        "equal",
        "training lengths; converged: may differ if all runs are long enough to have converged",
        choices=("equal", "converged", "free"),
    )
    restates: list[str] = setting([], "claims of papers that a claim of a board tests in the board's regime")
    reason: str = setting("", "why it is not tested")
    note: str = setting("", "remark on the wording in the paper, or on what the estimate is a mean of")

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
        """The arms b, each of which a is compared with."""
        return [] if self.b is None else as_list(self.b)

    @property
    def metrics(self) -> tuple[str, str]:
        """The metrics of arms a and b."""
        return (self.metric, self.metric) if isinstance(self.metric, str) else tuple(self.metric)

    @property
    def parts(self) -> "list[Claim]":
        """The tests of the claim: its own and those of `also`."""
        own = replace(self, also=[])
        return [own, *(replace(own, **{"value": None, "reference": 0.0, **dict(more)}) for more in self.also)]

    @property
    def fixed_margin(self) -> float | None:
        """The margin; None if it is a percentage of the mean of b."""
        relative = self.margin_percent is not None or "perplexity" in self.unit
        return self.margin if self.margin is not None or relative else DEFAULT_MARGIN

    @property
    def assumed_margin(self) -> bool:
        """Whether the margin is our default, because the paper has words for it and no number."""
        return self.has_margin and self.margin is None and self.margin_percent is None

    @property
    def percent(self) -> float:
        """The margin in percent of the mean of b, if it is not fixed."""
        return PERCENT_OF_PERPLEXITY if self.margin_percent is None else self.margin_percent

    @property
    def has_margin(self) -> bool:
        """Whether the predicate is about a margin, not a direction."""
        return self.predicate in ("equivalent", "at_least", "at_most", "all_equivalent", "none_better")

    def bounds(self, margin: float | None, reference: float) -> list[tuple[float, int]]:
        """The bounds that the interval must lie beyond: (value, 1: above, or -1: below)."""
        if margin is None:
            return [(reference, 1 if self.predicate == "higher" else -1)]
        return margin_bounds(self.predicate, margin)


def margin_bounds(predicate: str, margin: float) -> list[tuple[float, int]]:
    """The ends of the margin that a predicate allows, as bounds of the interval: (value, 1: above, or -1: below)."""
    low = [] if predicate in ("at_most", "none_better") else [(-margin, 1)]
    return low + ([] if predicate == "at_least" else [(margin, -1)])


def read_claims(published: Path = PUBLISHED) -> list[Claim]:
    """The claims of all papers that have a file. Raises SettingError for an unknown field or predicate."""
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
            raise SettingError(name, key, "is not a field of a claim", nearest(key, known))
    try:
        claim = Claim(**{**entry, "id": name})
    except SettingError as error:
        raise error.within(name) from None
    if claim.has_margin and not claim.quote:
        raise SettingError(name, "margin", "has no quote", "quote the words or numbers of the paper that it comes from")
    for part in claim.parts:
        _check_arms(name, part)
    return claim


def _check_arms(name: str, part: Claim) -> None:
    """Refuse arms that the test of a predicate would leave out, and a missing one."""
    if part.predicate in ("rising", "falling", "smaller_spread") and len(part.arms) > 1:
        remedy = "name one arm b, and test further ones in `also`"
        raise SettingError(name, "b", f"has {len(part.arms)} arms, of which {part.predicate} would test one", remedy)
    if part.predicate == "smaller_spread" and not part.arms:
        raise SettingError(name, "b", "is missing", "name the arm whose deviation between seeds a is compared with")
    if part.predicate in ("rising", "falling", "smaller_spread") or part.function:
        for field, given in {"minus": part.minus is not None, "each": part.each}.items():
            if given:
                raise SettingError(name, field, f"has no effect on {part.function or part.predicate}", "leave it out")


def rule_of(claim: Claim, margin: float | None = None) -> str:
    """The decision rule in one sentence."""
    if claim.predicate in UNTRAINED:
        return PREDICATES[claim.predicate]
    limit = margin if claim.fixed_margin is None else claim.fixed_margin
    words = PREDICATES[claim.predicate].format(
        reference="the published number" if isinstance(claim.reference, Mapping) else f"{float(claim.reference):g}",
        margin=(f"{claim.percent:g} % of b" if limit is None else f"{limit:.3g}") + f" {claim.unit}",
        by=" and with ".join(as_list(claim.by)) if claim.by else "",
        ours="a minus b" if claim.arms else "a",
    )
    arms = f"a: {described(claim.a) or 'all'}" + "".join(f"; b: {arm}" for arm in arms_in_words(claim))
    where = f"; where {described(claim.where)}" if claim.where else ""
    more = "".join(
        f"; and {rule_of(part).partition(' (a: ')[0]} for {part.metric}"
        + (f" (a: {described(part.a)})" if part.a != claim.a else "")
        for part in claim.parts[1:]
    )
    every = "; in every cell" if claim.each else ""
    return f"{words} ({arms}{where}{every}){more}"


def arms_in_words(claim: Claim) -> list[str]:
    """The arms b, with their metric if it is another than that of a."""
    own, other = claim.metrics
    return [described(arm) + ("" if own == other else f", its {other.replace(': ', ' ')}") for arm in claim.arms]


def tested_reference(claim: Claim) -> float:
    """The reference on the scale of the test; that of a margin, or of a published number for each network, is 0."""
    if claim.has_margin or isinstance(claim.reference, Mapping):
        return 0.0
    return _on_test_scale(claim, float(claim.reference))


def published_effect(claim: Claim, margin: float | None = None) -> float:
    """The published effect on the scale of the test; without a number, that of a margin is 0. With `value_base`, the same part of
    our mean of b as in the paper, given our `margin`, a percentage of that mean."""
    value = claim.value or 0.0
    if claim.value_base is not None and margin is not None:
        value *= margin / (claim.percent / 100) / claim.value_base
    return _on_test_scale(claim, value)


def _on_test_scale(claim: Claim, value: float) -> float:
    """A value in the displayed unit on the scale of the test, which is logarithmic for savings and ratios."""
    if claim.display == "saving":
        return -math.log(1 - value / 100)
    return math.log(value) if claim.display == "ratio" and value > 0 else value
