"""The verdict on a claim as a row of results/summary/claims.csv: what was found, how sure it is, and from which trainings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Optional, cast

from omegaconf import OmegaConf

from bitcycle.csv_files import read_csv, write_csv
from bitcycle.settings import setting

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
    """The verdict on a claim at one scope."""

    claim_id: str = setting(MISSING, "PAPER/ITEM-cN")
    item: str = setting(MISSING, "PAPER/ITEM whose runs decide it")
    paper: str = setting(MISSING, "key of the paper")
    sentence: str = setting(MISSING, "what the paper says")
    section: str = setting("", "where it says so")
    predicate: str = setting("", "one of `claims.PREDICATES`")
    rule: str = setting("", "the rule that was applied, in one sentence")
    metric: str = setting("", "what is compared")
    unit: str = setting("", "of estimate, interval, margin and published value")
    scope: str = setting("", '"paper scale", "proxy: NETWORK, DATA", or empty where no training is involved')
    scale: str = setting("", "paper, mini or smoke; empty where no training is involved")
    verdict: str = setting(NOT_RUN, "one of VERDICTS")
    holds: Optional[bool] = setting(None, "of computed claims: whether it does")
    decided: bool = setting(False, "whether the p-value that is corrected over all claims of the scale decides it")
    leaning: str = setting("", "supported or contradicted, where the uncorrected p-value alone would decide it")
    estimate: Optional[float] = setting(None, "of the contrast that the rule names")
    low: Optional[float] = setting(None, "lower end of its confidence interval")
    high: Optional[float] = setting(None, "upper end of it")
    level: Optional[float] = setting(None, "of the interval: 0.95, or 0.9 where a margin is tested")
    n: Optional[int] = setting(None, "seeds")
    trainings: Optional[int] = setting(None, "distinct trainings")
    df: Optional[float] = setting(None, "degrees of freedom of the deviation")
    looks: Optional[int] = setting(None, "how many times it was tested as seeds were added")
    p_raw: Optional[float] = setting(None, "p-value: two-sided for directions, one-sided for margins")
    p_corrected: Optional[float] = setting(None, "the same, corrected for looks (Bonferroni), then over claims (Holm)")
    margin: Optional[float] = setting(None, "of equivalence or non-inferiority")
    published_effect: str = setting("", "as printed")
    published_value: Optional[float] = setting(None, "the same as one number, in the direction of the estimate")
    reason: str = setting("", "why there is no test, or what else is to be known")
    seeds_needed: Optional[int] = setting(None, "for a decision, if the effect is as large as published")


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
