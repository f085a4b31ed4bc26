"""Verdicts on the papers' claims, computed from finished runs: one small check for each claim that code can check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bitcycle.analysis import claims_better, claims_cpt, claims_fractrain, claims_hlhlp, claims_partial
from bitcycle.analysis.evidence import Check, Outcome
from bitcycle.analysis.items import Claim
from bitcycle.analysis.results import Results

COMPUTED, REPRODUCED, SIGN_AT_PAPER_SCALE, SIGN, CONTRADICTED, CONTRADICTED_REDUCED, NOT_RUN, NOT_CHECKABLE = (
    VERDICTS
) = (
    "reproduced by computation, no training needed",
    "reproduced at paper scale",
    "sign agrees at paper scale, size does not",
    "sign agrees at reduced scale",
    "contradicted",
    "contradicted at reduced scale",
    "not run",
    "not checkable by code",
)
MODULES = (claims_better, claims_cpt, claims_partial, claims_fractrain, claims_hlhlp)
CHECKS: dict[str, Check] = {name: check for module in MODULES for name, check in module.CHECKS.items()}
"""Claim -> its check."""
UNCHECKED: dict[str, str] = {name: reason for module in MODULES for name, reason in module.UNCHECKED.items()}
"""Claim -> why no code checks it."""


@dataclass(frozen=True)
class Finding:
    """The verdict on a claim.

    Attributes:
        claim: what the paper says.
        verdict: one of VERDICTS.
        scale: of the runs that it comes from; empty if there are none.
        measured: what was found, with the number of seeds.
        reason: why there is no result.
    """

    claim: Claim
    verdict: str
    scale: str = ""
    measured: str = ""
    reason: str = ""


def check_claims(claims: Sequence[Claim], results: Mapping[str, Results]) -> list[Finding]:
    """The verdict on every claim.

    Args:
        claims: what to check.
        results: item -> its runs.
    """
    return [verdict_on(claim, results.get(claim.item, Results())) for claim in claims]


def verdict_on(claim: Claim, results: Results) -> Finding:
    """The verdict on a claim: by runs at paper scale where they suffice, else by those at scale mini; smoke runs say nothing.

    Fewer than half of an item's cells say nothing either: a claim about many networks is not settled by the first of them.
    """
    if claim.id in UNCHECKED:
        return Finding(claim, NOT_CHECKABLE, reason=UNCHECKED[claim.id])
    check = CHECKS.get(claim.id)
    if check is None:
        return Finding(claim, NOT_CHECKABLE, reason="No check is written for it.")
    for scale in ("paper", "mini"):
        found = results.at(scale)
        outcome = check(found) if found is not None and 2 * len(found.done) >= len(found.cells) else None
        if outcome is not None:
            return Finding(
                claim,
                COMPUTED if outcome.computed and outcome.paper else _verdict(outcome, scale),
                scale_of(outcome, scale),
                outcome.measured,
            )
    outcome = check(Results())
    if outcome is not None and outcome.computed:
        return Finding(claim, COMPUTED if outcome.paper else CONTRADICTED, "computed", outcome.measured)
    return Finding(claim, NOT_RUN, reason="" if not results.done else "Some of the runs that it needs are missing.")


def scale_of(outcome: Outcome, scale: str) -> str:
    """The scale of an outcome; "computed" where no training is involved."""
    return "computed" if outcome.computed else scale


def _verdict(outcome: Outcome, scale: str) -> str:
    if scale == "paper":
        return REPRODUCED if outcome.paper else SIGN_AT_PAPER_SCALE if outcome.reduced else CONTRADICTED
    return SIGN if outcome.reduced else CONTRADICTED_REDUCED
