"""The verdict on a claim as a row of results/summary/claims.csv: what was found, how sure it is, and from which trainings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, cast

from omegaconf import OmegaConf

from bitcycle.csv_files import read_csv, write_csv

SUPPORTED, CONTRADICTED, UNDECIDED, COMPUTED, NO_TEST, NOT_RUN = VERDICTS = (
    "supported",
    "contradicted",
    "undecided",
    "computed",
    "no test",
    "not run",
)
CLAIMS = Path("results/summary/claims.csv")


@dataclass(frozen=True)
class ClaimResult:
    """The verdict on a claim at one scope.

    Attributes:
        claim_id: PAPER/ITEM-cN.
        item: PAPER/ITEM whose runs decide it.
        paper: key of the paper.
        sentence: what the paper says.
        section: where it says so.
        predicate: one of `claims.PREDICATES`.
        rule: the rule that was applied, in one sentence.
        metric: what is compared.
        unit: of estimate, interval, margin and published value.
        scope: "paper scale", "proxy: NETWORK, DATA", or empty where no training is involved.
        scale: paper, mini or smoke; empty where no training is involved.
        verdict: one of VERDICTS.
        holds: of computed claims: whether it does.
        decided: whether the p-value that is corrected over all claims of the scale decides it.
        leaning: supported or contradicted, where the uncorrected p-value alone would decide it.
        estimate: of the contrast that the rule names.
        low, high: ends of its confidence interval.
        level: of the interval: 0.95, or 0.9 where a margin is tested.
        n: seeds.
        trainings: distinct trainings.
        df: degrees of freedom of the deviation.
        looks: how many times it was tested as seeds were added.
        p_raw, p_corrected: two-sided for directions, one-sided for margins; corrected for looks, then by Holm's method.
        margin: of equivalence or non-inferiority.
        published_effect: as printed.
        published_value: the same as one number, in the direction of the estimate.
        reason: why there is no test, or what else is to be known.
        seeds_needed: for a decision, if the effect is as large as published.
    """

    claim_id: str
    item: str
    paper: str
    sentence: str
    section: str = ""
    predicate: str = ""
    rule: str = ""
    metric: str = ""
    unit: str = ""
    scope: str = ""
    scale: str = ""
    verdict: str = NOT_RUN
    holds: Optional[bool] = None
    decided: bool = False
    leaning: str = ""
    estimate: Optional[float] = None
    low: Optional[float] = None
    high: Optional[float] = None
    level: Optional[float] = None
    n: Optional[int] = None
    trainings: Optional[int] = None
    df: Optional[float] = None
    looks: Optional[int] = None
    p_raw: Optional[float] = None
    p_corrected: Optional[float] = None
    margin: Optional[float] = None
    published_effect: str = ""
    published_value: Optional[float] = None
    reason: str = ""
    seeds_needed: Optional[int] = None


FIELDS = tuple(field.name for field in dataclasses.fields(ClaimResult))


def write_claims(results: Iterable[ClaimResult], path: Path) -> None:
    """Write one row a claim and scope; numbers with six digits."""
    write_csv(path, FIELDS, ({name: _as_text(getattr(result, name)) for name in FIELDS} for result in results))


def read_claim_results(path: Path = CLAIMS) -> list[ClaimResult]:
    """The rows of a file that `write_claims` wrote."""
    schema = OmegaConf.structured(ClaimResult)
    rows = ({name: text for name, text in row.items() if text} for row in read_csv(path))
    return [cast(ClaimResult, OmegaConf.to_object(OmegaConf.merge(schema, row))) for row in rows]


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
