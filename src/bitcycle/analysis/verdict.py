"""The verdicts on all claims, which `make figures` writes to results/summary/claims.csv.

The rule is the same at every scale: a claim is decided if its p-value, multiplied by the number of looks (Bonferroni) and
corrected over all claims of the scale (Holm), is below 0.05; it is leaning if only the uncorrected p-value is. Claims that could
not be tested have a reason. The scope names the setting for which the verdict holds.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional, cast

from omegaconf import OmegaConf

from bitcycle.analysis import preconditions
from bitcycle.analysis import statistics as rule
from bitcycle.analysis.aggregation import Cell, Results
from bitcycle.analysis.claim_functions import COMPUTED as FORMULAS
from bitcycle.analysis.claims import UNTRAINED, Claim, rule_of, tested_reference
from bitcycle.analysis.contrast import Pool, described, select
from bitcycle.analysis.metrics import COSTS
from bitcycle.analysis.predicates import Outcome, evaluate
from bitcycle.files import read_csv, write_csv

VERDICTS = ("supported", "contradicted", "undecided", "computed", "no test", "not run")
SUPPORTED, CONTRADICTED, UNDECIDED, COMPUTED, NO_TEST, NOT_RUN = VERDICTS
SCALES = ("paper", "mini")
"""Scales at which claims are tested; smoke runs are too short."""


@dataclass
class ClaimResult:
    """The verdict on a claim in one scope."""

    claim_id: str  # PAPER/ITEM-cN
    item: str  # PAPER/ITEM with the runs that decide it
    paper: str  # key of the paper
    sentence: str  # the claim in one sentence
    section: str = ""  # section of the paper
    predicate: str = ""  # one of `claims.PREDICATES`
    rule: str = ""  # the decision rule in one sentence
    metric: str = ""  # compared metric
    unit: str = ""  # unit of estimate, interval, margin and published value
    scope: str = ""  # "paper scale" or "proxy: NETWORK, DATA"; empty if no runs are involved
    scale: str = ""  # paper or mini; empty if no runs are involved
    verdict: str = NOT_RUN  # one of VERDICTS
    holds: Optional[bool] = None  # whether a computed claim holds
    decided: bool = False  # whether the corrected p-value is significant
    leaning: str = ""  # supported or contradicted, if the uncorrected p-value is significant
    estimate: Optional[float] = None  # estimate of the contrast in the rule
    low: Optional[float] = None  # lower end of the confidence interval
    high: Optional[float] = None  # upper end of the confidence interval
    level: Optional[float] = None  # confidence level: 0.95, or 0.9 for margins
    n: Optional[int] = None  # number of seeds
    trainings: Optional[int] = None  # number of distinct runs
    df: Optional[float] = None  # degrees of freedom of the standard error
    looks: Optional[int] = None  # number of times it was tested as seeds were added
    p_raw: Optional[float] = None  # p-value: two-sided for directions, one-sided for margins
    p_corrected: Optional[float] = None  # p-value corrected for looks (Bonferroni), then over claims (Holm)
    margin: Optional[float] = None  # margin of equivalence or non-inferiority
    published_effect: str = ""  # published effect as printed
    published_value: Optional[float] = None  # published effect as a number, in the direction of the estimate
    reason: str = ""  # why there is no test, or a remark on the test
    seeds_needed: Optional[int] = None  # number of seeds that would decide an effect of the published size


FIELDS = tuple(field.name for field in dataclasses.fields(ClaimResult))


def write_claims(results: Iterable[ClaimResult], path: Path) -> None:
    """Write one row per claim and scope, with six significant digits."""
    write_csv(path, FIELDS, ({name: _as_text(getattr(result, name)) for name in FIELDS} for result in results))


def read_claim_results(path: Path) -> list[ClaimResult]:
    """Read a file written by `write_claims`."""
    schema = OmegaConf.structured(ClaimResult)
    rows = ({name: text for name, text in row.items() if text} for row in read_csv(path))
    return [cast(ClaimResult, OmegaConf.to_object(OmegaConf.merge(schema, row))) for row in rows]


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# Judging


def judge(claims: Sequence[Claim], results: Mapping[str, Results], pool: Pool) -> list[ClaimResult]:
    """The verdict on every claim at each scale with runs for it, given the results of each item. The p-values of a scale are
    corrected jointly."""
    judged: list[tuple[Claim, ClaimResult, Outcome | None]] = []
    for claim in claims:
        rows = [] if claim.predicate in UNTRAINED else [_judge_at(claim, scale, results, pool) for scale in SCALES]
        known = [row for row in rows if row is not None] or [(_without_runs(claim, results), None)]
        judged += [(claim, *row) for row in known]
    for scale in SCALES:
        tested = [one for one in judged if one[1].scale == scale and one[1].p_raw is not None]
        adjusted = rule.corrected([min(1.0, (row.p_raw or 0.0) * claim.looks) for claim, row, _ in tested])
        for (claim, row, found), p in zip(tested, adjusted):
            _correct(claim, row, found, p, len(tested) * claim.looks)
    return [row for _, row, _ in judged]


def _empty(claim: Claim) -> ClaimResult:
    metric = claim.function.replace("_", " ") or " and ".join(dict.fromkeys(claim.metrics))
    return ClaimResult(
        *(claim.id, claim.item, claim.paper, claim.sentence, claim.section, claim.predicate, rule_of(claim)),
        *(("", "") if claim.predicate in UNTRAINED else (metric, claim.unit)),
        published_effect=claim.effect,
        published_value=claim.value,
    )


def _without_runs(claim: Claim, results: Mapping[str, Results]) -> ClaimResult:
    row = _empty(claim)
    if claim.predicate == "computed":
        holds, measured = FORMULAS[claim.function](claim.options)
        return replace(row, verdict=COMPUTED, holds=holds, reason=measured)
    if claim.predicate == "none":
        return replace(row, verdict=NO_TEST, reason=claim.reason)
    some = any(results[item].done for item in (claim.item, *claim.items) if item in results)
    return replace(row, reason="The runs that it needs are missing." if some else "")


def _judge_at(
    claim: Claim, scale: str, results: Mapping[str, Results], pool: Pool
) -> tuple[ClaimResult, Outcome | None] | None:
    """The verdict at one scale, before correction; None if there are no runs."""
    at_scale = [results[item].at(scale) for item in (claim.item, *claim.items) if item in results]
    every = select([cell for one in at_scale if one is not None for cell in one.cells], claim.where)
    if not any(cell.runs for cell in every):
        return None
    cells, excluded = preconditions.counting(claim, every, pool)
    parts = claim.parts
    found = [evaluate(part, cells, pool) for part in parts]
    row = replace(_empty(claim), scale=scale)
    first = found[0]
    if first is None:
        reason = excluded if evaluate(claim, every, pool) is not None else ""
        if not reason and claim.metrics[0].startswith("depth") and select(cells, claim.a):
            reason = "No evaluation lies within 10 % of the epochs that the claim names."
        no_test = replace(row, verdict=NO_TEST, scope=_scope(scale, every), reason=reason)
        return (no_test, None) if reason else None
    row.scope = _scope(scale, [cell for one in first.contrasts for unit in one.units for cell in unit.cells])
    row.rule, row.verdict, row.estimate = rule_of(claim, first.margin), UNDECIDED, first.shown
    if first.tested.error == 0 and claim.metrics[0] not in COSTS:
        row.rule = row.rule.replace("paired t test", "sign test, as all seeds agree")
    row.low, row.high = first.interval or (None, None)
    row.level, row.margin, row.n, row.df = claim.level, first.margin, first.tested.n, first.tested.df or None
    runs = {run.training: run for one in first.contrasts for run in one.runs}
    row.trainings = len(runs)
    proxy = bool(row.scope) and scale != "paper"
    if failed := preconditions.failed(claim, first.contrasts, list(runs.values()), proxy):
        row.verdict, row.reason = NO_TEST, failed
    else:
        _test(row, parts, found)
        row.reason = "; ".join(filter(None, (row.reason, preconditions.left_out(every, cells))))
    return row, first


def _test(row: ClaimResult, parts: Sequence[Claim], found: Sequence[Outcome | None]) -> None:
    """Set the joint p-value of all parts; the further parts are described in the reason."""
    words = []
    for part, one in zip(parts[1:], found[1:]):
        if one is None or one.shown is None:
            row.reason = f"no runs tell the {part.metric}"
            return
        shown = f"{one.shown:.3g} {part.unit}".strip()
        arm = f" of {described(part.a)}" if part.a != parts[0].a else ""
        p = f" (p = {one.values.p:.2g})" if one.values.p else ""
        words.append(f"{part.display or part.metric}{arm} {shown}{p}")
    joint = rule.all_of([one.values for one in found if one is not None])
    if joint.p is None:
        missing = "one seed, and no deviation of such trainings is known" if row.n == 1 else "no deviation is known"
        words.insert(0, missing)
    elif joint.p < rule.SIGNIFICANCE:
        row.leaning = SUPPORTED if joint.supports == joint.p else CONTRADICTED
    row.p_raw, row.looks, row.reason = joint.p, None if joint.p is None else parts[0].looks, "; ".join(words)


def _correct(claim: Claim, row: ClaimResult, found: Outcome | None, p: float, tests: int) -> None:
    """Set the corrected p-value and the resulting verdict, or the number of seeds that an undecided claim needs."""
    row.p_corrected = p
    if p < rule.SIGNIFICANCE and row.leaning:
        row.decided = row.n != 1 or bool(row.df)
        if row.decided:
            row.verdict = row.leaning
        else:
            row.reason = "; ".join(filter(None, ("an order within one seed decides nothing", row.reason)))
    elif found is not None and found.tested.deviation is not None:
        effect = claim.value if found.margin is None else found.margin
        if found.margin is None and effect is not None and claim.display:
            effect = tested_reference(replace(claim, reference=effect)) - tested_reference(claim)
        row.seeds_needed = rule.seeds_needed(found.tested.deviation, effect, tests, margin=found.margin is not None)


def _scope(scale: str, cells: Iterable[Cell]) -> str:
    """The scope of a verdict from these cells: the paper's setting, or a proxy."""
    proxies = list(dict.fromkeys(preconditions.proxy_label(cell) for cell in cells if cell.runs))
    words = " / ".join(filter(None, proxies))
    return f"proxy: {words}" if words else "paper scale" if scale == "paper" else ""
